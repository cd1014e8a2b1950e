"""What tests ask of a store and of an engine process from outside: the command line and /proc."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def becomes(look: Callable[[], T], expected: T, seconds: float = 30.0) -> None:
    """Look until this is seen; AssertionError if it never is."""
    end = time.monotonic() + seconds
    while (seen := look()) != expected:
        assert time.monotonic() < end, f"{seen}, not {expected}, after {seconds:.0f} s"
        time.sleep(0.2)


@dataclass(frozen=True)
class StoredNamespace:
    """One namespace of a store as ``hicache-nixl ls`` shows it."""

    manifest: dict[str, Any]
    pages: int

    @property
    def part(self) -> tuple[int | None, int, int, int]:
        """TP rank, PP rank, first layer and the one behind the last."""
        page = self.manifest["page"]
        ranks = self.manifest["tp_rank"], self.manifest["pp_rank"]
        return (*ranks, page["layer_start"], page["layer_end"])


def stored(store: Path) -> list[StoredNamespace]:
    """The namespaces of the slab store in `store`; servers may be using it."""
    rows = _command("ls", store)["namespaces"]
    return [StoredNamespace(row["manifest"], row["pages"]) for row in rows]


def damaged_pages(store: Path) -> int:
    """How many pages of the slab store in `store` are not what was written."""
    return sum(counts["damaged"] for counts in _command("verify", store).values())


def _command(name: str, store: Path) -> dict[str, Any]:
    program = Path(sys.executable).with_name("hicache-nixl")
    ran = subprocess.run(
        [program, name, "--json", "--store", f"slab://{store}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    output: dict[str, Any] = json.loads(ran.stdout)
    return output


@dataclass(frozen=True)
class Resources:
    """What a process holds."""

    open_paths: tuple[str, ...]
    """What its descriptors refer to, sorted."""
    threads: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Resources":
        process = Path(f"/proc/{pid}")
        paths, threads = [], []
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                paths.append(str(descriptor.readlink()))
        for task in (process / "task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                threads.append((task / "comm").read_text().strip())
        pages = int((process / "statm").read_text().split()[1])
        return cls(
            open_paths=tuple(sorted(paths)),
            # The kernel's own workers of an io_uring come and go.
            threads=len([name for name in threads if not name.startswith("iou-")]),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )

    def under(self, directory: Path) -> list[str]:
        """The open paths below `directory`."""
        return [path for path in self.open_paths if path.startswith(f"{directory}/")]

    def kinds(self) -> tuple[str, ...]:
        """The kinds of open descriptors, without the numbers of sockets and pipes."""
        return tuple(sorted(path.split(":[")[0] for path in self.open_paths))
