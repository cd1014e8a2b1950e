"""The run's directory, the page cache under it, and what machine this is.

Everything a run writes lies in one directory named after its process, which goes when the run
ends, fails or is interrupted; one left by a killed run goes when the next one starts.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.plan import BenchError, format_size

_DROP = Path("/proc/sys/vm/drop_caches")
_RUN = "run-"


@contextmanager
def workspace(root: Path, needed: int) -> Iterator[Path]:
    """A fresh directory under `root`, removed with everything in it on the way out.

    `needed` bytes must be free on the file system; otherwise a `BenchError` before any write.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        run = root / f"{_RUN}{os.getpid()}"
        run.mkdir()
    except OSError as error:
        raise BenchError(
            f"--dir {root}: {error.strerror}; choose a directory to write in"
        ) from error
    try:
        free = shutil.disk_usage(run).free
        if free < needed:
            raise BenchError(
                f"--dir {root}: {format_size(free)} free, {format_size(needed)} needed; "
                "choose another directory, fewer --pages or fewer --rounds"
            )
        yield run
    finally:
        shutil.rmtree(run, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    for old in root.glob(f"{_RUN}*"):
        pid = old.name.removeprefix(_RUN)
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)


class PageCache:
    """Makes the next read come from the medium, by the strongest means this process may use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.method = "drop_caches" if os.access(_DROP, os.W_OK) else "posix_fadvise"

    def drop(self) -> None:
        """Write dirty pages back, then drop them. Blocks until both are done."""
        os.sync()
        if self.method == "drop_caches":
            try:
                _DROP.write_text("3\n")
            except OSError:  # a container may show the file as writable and refuse the write
                self.method = "posix_fadvise"
        if self.method == "posix_fadvise":
            self._advise()

    def _advise(self) -> None:
        for parent, _, names in os.walk(self._directory):
            for name in names:
                try:
                    fd = os.open(Path(parent, name), os.O_RDONLY)
                except FileNotFoundError:
                    continue
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


def _mount(path: Path) -> tuple[str, str]:
    """Source and type of the file system that holds `path`."""
    best = ("", "unknown", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, point, kind = line.split()[:3]
        inside = path.is_relative_to(point)
        if inside and len(point) >= len(best[0]):
            best = (point, source, kind)
    return best[1], best[2]


def _device(path: Path) -> dict[str, object]:
    """Name, model and rotation of the block device under `path`, where the kernel tells."""
    number = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not block.exists():
        return {"name": "none"}
    block = block.resolve()
    disk = block if (block / "queue").exists() else block.parent
    facts: dict[str, object] = {"name": disk.name}
    for name in ("device/model", "queue/rotational", "queue/scheduler", "queue/nr_requests"):
        file = disk / name
        if file.exists():
            facts[name.rpartition("/")[2]] = file.read_text().strip()
    return facts


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions(fio: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "fio": fio}
    for package in ("hicache-nixl", "nixl", "sglang", "torch", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "source tree"
    return found


def describe_machine(directory: Path, fio: str) -> dict[str, object]:
    """What the figures depend on: kernel, file system, device, cores, memory and versions."""
    source, kind = _mount(directory.resolve())
    return {
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": kind,
        "mount_source": source,
        "device": _device(directory),
        "versions": _versions(fio),
        "load_average": os.getloadavg(),
    }
