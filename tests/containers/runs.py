"""A run of the tests, which owns everything on the Docker daemon that carries its label.

What a run made is removed when it ends; when it was killed, by a watcher that outlives it; when the
machine was switched off, by the next run. Works from one process or from many workers of xdist.

Command: ``python -m containers.runs RUN`` watches over a run.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import hugepage_notes

LABEL = "hicache-nixl.test-run"
ROOT = Path(tempfile.gettempdir()) / f"hicache-nixl-test-runs-{os.getuid()}"
REMOVAL = {"container": ("--force", "--volumes"), "network": (), "volume": ("--force",)}
"""What a run may leave, in the order in which it can be removed, and the options to remove it."""
QUIET_ROUNDS = 3
"""Looks at the daemon that must find nothing: what a killed worker asked for may still appear."""


class Run:
    """One run of pytest. All its workers see the same one."""

    def __init__(self, name: str) -> None:
        """`name` is the process id of its first process and the time that process started."""
        self.name = name
        self.directory = ROOT / name

    @classmethod
    def current(cls) -> "Run":
        """The run that this process belongs to."""
        pid = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        return cls(f"{pid}-{_start_time(pid)}")

    @property
    def labels(self) -> dict[str, str]:
        """What containers, networks and volumes of this run carry."""
        return {LABEL: self.name}

    @property
    def pid(self) -> int:
        return int(self.name.split("-")[0])

    def is_alive(self) -> bool:
        """Whether its first process still runs."""
        return _start_time(self.pid) == self.name.split("-")[1]

    def begin(self) -> None:
        """Remove what dead runs left and let somebody watch over this one; once for all workers."""
        with self.lock("begin"):
            if (self.directory / "watcher").exists():
                return
            for name in _labelled_runs():
                if not Run(name).is_alive():
                    Run(name).remove()
            with (self.directory / "watcher.log").open("wb") as log:
                watcher = subprocess.Popen(
                    [sys.executable, "-m", "containers.runs", self.name],
                    cwd=Path(__file__).parents[1],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # What kills the run by its process group does not reach it.
                    start_new_session=True,
                )
            (self.directory / "watcher").write_text(str(watcher.pid))

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returned to the first worker that came here; JSON."""
        with self.lock(name):
            if (made := self.made_once(name)) is None:
                made = make()
                self._state(name).write_text(json.dumps(made))
            return made

    def made_once(self, name: str) -> Any:
        """What `once` has made; None before."""
        state = self._state(name)
        return json.loads(state.read_text()) if state.exists() else None

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Held by one process of the run at a time."""
        from filelock import FileLock

        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / f"{name}.lock"):
            yield

    def make(self, kind: Literal["network", "volume"]) -> str:
        """A new network or volume; its name. It ends with the run."""
        labels = [f"--label={name}={value}" for name, value in self.labels.items()]
        name = f"hicache-nixl-{secrets.token_hex(6)}"
        _docker(kind, "create", *labels, name, check=True)
        return name

    @contextlib.contextmanager
    def made(self, kind: Literal["network", "volume"]) -> Iterator[str]:
        """A new network or volume for the length of a block, after which nothing may use it."""
        name = self.make(kind)
        try:
            yield name
        finally:
            _docker(kind, "rm", *REMOVAL[kind], name, check=True)

    def remove(self) -> None:
        """Remove everything that carries the label of this run, and its directory."""
        for kind, options in REMOVAL.items():
            found = self._ids(kind)
            if found:
                _docker(kind, "rm", *options, *found)
        shutil.rmtree(self.directory, ignore_errors=True)

    def left(self) -> list[str]:
        """What on the daemon still carries its label."""
        return [f"{kind} {found}" for kind in REMOVAL for found in self._ids(kind)]

    def watch(self) -> None:
        """Block until the first process of the run has ended, then remove what it left, and give
        hugepages back."""
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(self.pid)
            if self.is_alive():
                select.select([process], [], [])
        quiet = 0
        while quiet < QUIET_ROUNDS:
            quiet = 0 if self.left() else quiet + 1
            self.remove()
            time.sleep(1.0)
        hugepage_notes.restore()

    def _state(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _ids(self, kind: str) -> list[str]:
        return _list(kind, f"{LABEL}={self.name}", "--quiet").split()


def _start_time(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty if there is none."""
    try:
        # The name before it, in brackets, may contain anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _docker(*arguments: str, check: bool = False) -> str:
    ran = subprocess.run(
        ["docker", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if check and ran.returncode != 0:
        raise RuntimeError(f"docker {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout


def _list(kind: str, label: str, *options: str) -> str:
    every = ["--all"] if kind == "container" else []
    return _docker(kind, "ls", *every, "--filter", f"label={label}", *options)


def _labelled_runs() -> set[str]:
    form = f'{{{{.Label "{LABEL}"}}}}'
    return {name for kind in REMOVAL for name in _list(kind, LABEL, "--format", form).split()}


if __name__ == "__main__":
    Run(sys.argv[1]).watch()
