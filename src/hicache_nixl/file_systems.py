"""What the kernel says about the file system under a directory: kind, device, size, use.

This module owns reading the mount table and `statvfs`. It must not know settings or stores.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_nixl.errors import SettingsError, StoreError
from hicache_nixl.units import GIB, MIB

MOUNTINFO = Path("/proc/self/mountinfo")
MIN_BUDGET = 64 * MIB

# File systems that other hosts may use at the same time, as the mount table names them.
_SHARED = frozenset(
    {
        "9p",
        "acfs",
        "afs",
        "autofs",  # not mounted yet; what autofs mounts is on the network as a rule
        "beegfs",
        "beegfs_nodev",
        "ceph",
        "cifs",
        "coda",
        "cvfs",
        "fuse",
        "gfs",
        "gfs2",
        "gpfs",
        "lustre",
        "mmfs",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "prl_fs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "wekafs",
    }
)


@dataclass(frozen=True)
class FileSystem:
    """The mount that holds a directory; both fields are "unknown" where the table has none."""

    kind: str
    device: str

    @property
    def shared(self) -> bool:
        """Whether other hosts may use it too. A FUSE file system counts as shared."""
        return self.kind in _SHARED or self.kind.startswith("fuse.")

    def __str__(self) -> str:
        return f"{self.kind} on {self.device}"


@dataclass(frozen=True)
class Budget:
    """What a store may take of the file systems under its directories, in bytes."""

    nbytes: int
    size_bytes: int
    """All of the file systems, each counted once."""
    other_bytes: int
    """Taken by anything but the store: by other files, and what is reserved for root."""
    is_least: bool = False
    """Whether others have taken so much that this is `MIN_BUDGET` and not a share."""


@dataclass(frozen=True)
class FileSystems:
    """This machine's file systems. The fields are replaced in tests."""

    mountinfo: Path = MOUNTINFO
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs

    def under(self, directory: str | Path) -> FileSystem:
        """The file system of `directory`, which need not exist; links are followed."""
        place = os.path.realpath(directory)
        best, found = "", FileSystem("unknown", "unknown")
        for point, file_system in _mounts(self.mountinfo):
            # Of two mounts at one point the later one is seen.
            if _is_below(place, point) and len(point) >= len(best):
                best, found = point, file_system
        return found

    def exists(self, directory: str | Path) -> bool:
        """Whether there is such a directory."""
        return Path(directory).is_dir()

    def budget(self, directories: Sequence[str], percent: float) -> Budget:
        """How large a store in `directories` may be while its file systems stay below `percent`.

        The store's own is what lies directly in the directories and what `usage.json` there says;
        everything else that is used counts against it. At least `MIN_BUDGET`. The directories need
        not exist. Raises `SettingsError` if one cannot be looked at.
        """
        disks: dict[int, tuple[int, int]] = {}
        own: dict[int, int] = {}
        for directory in directories:
            place = _existing(Path(directory))
            try:
                device = place.stat().st_dev
                disks[device] = _size_and_use(self.statvfs(place))
                own[device] = own.get(device, 0) + _own(Path(directory))
            except OSError as error:
                raise SettingsError(
                    f"{place} cannot be looked at: {error.strerror}; set capacity"
                ) from None
        room = others = 0
        for device, (size, used) in disks.items():
            other = max(0, used - own[device])
            others += other
            room += max(0, int(size * percent / 100) - other)
        step = GIB if room >= 16 * GIB else 16 * MIB
        size_bytes = sum(size for size, _ in disks.values())
        return Budget(max(MIN_BUDGET, room // step * step), size_bytes, others, room < MIN_BUDGET)


def make_directories(directories: Iterable[str]) -> None:
    """Make `directories` with all above them, as far as they are missing. Raises `StoreError`."""
    for directory in directories:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{directory} cannot be made: {error.strerror}; name another directory"
            ) from error


def _mounts(mountinfo: Path) -> Iterable[tuple[str, FileSystem]]:
    """Mount points and what is mounted there; nothing where the table cannot be read."""
    try:
        lines = os.fsdecode(mountinfo.read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        where, what = before.split(" "), after.split(" ")
        if len(where) > 4 and len(what) > 1:
            yield _unescaped(where[4]), FileSystem(what[0], _unescaped(what[1]))


def _unescaped(text: str) -> str:
    """The table writes blanks, line ends and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _is_below(place: str, point: str) -> bool:
    return place == point or place.startswith(point.rstrip("/") + "/")


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def _size_and_use(disk: os.statvfs_result) -> tuple[int, int]:
    """Bytes of a file system, and those of them that this user cannot have."""
    return disk.f_blocks * disk.f_frsize, (disk.f_blocks - disk.f_bavail) * disk.f_frsize


def _own(store: Path) -> int:
    """Bytes on disk of a store: a slab store has its files here, a files store says its use."""
    if not store.is_dir():
        return 0
    with os.scandir(store) as entries:
        nbytes = sum(
            entry.stat(follow_symlinks=False).st_blocks * 512
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        )
    try:
        told = int(json.loads((store / "usage.json").read_text())["used_bytes"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return nbytes  # a slab store, or one that is new
    return nbytes + max(0, told)
