"""What the kernel would grant: free hugepages, cgroup limits, available memory.

Owns the reading of /sys/kernel/mm/hugepages, /proc/meminfo and the cgroup files (v1 and v2).
It must not know of mappings: it reads and never allocates.

Every function takes `root`, the directory that holds `proc` and `sys`. A file that is missing or
unreadable means "no limit known", because the mapping itself has the last word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# cgroup v1 writes "no limit" as LONG_MAX rounded down to the page size.
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Limit:
    """A cgroup limit: the file that sets it, its value and what is used of it, in bytes."""

    file: Path
    limit: int
    used: int

    @property
    def headroom(self) -> int:
        """Bytes still to be had."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class HugepagePool:
    """The kernel's pool of one hugepage size.

    `page_size` is in bytes; `total`, `free` and `most` count pages. `free` leaves out pages that
    are reserved and adds those that overcommit may still create; `most` is `total` with the
    latter. `limits` are those of the cgroups on this size, see `hugetlb_limits`.
    """

    page_size: int
    total: int
    free: int
    most: int
    directory: Path
    limits: tuple[Limit, ...]

    @property
    def limit(self) -> Limit | None:
        """The limit with the least headroom, None where there is none."""
        return tightest(self.limits)

    @property
    def free_bytes(self) -> int:
        """Bytes that this process can still map."""
        return min([self.free * self.page_size, *(limit.headroom for limit in self.limits)])

    @property
    def allowed_bytes(self) -> int:
        """Bytes that this process and the others of its cgroup may map together; without a limit,
        the whole pool."""
        return min([self.most * self.page_size, *(limit.limit for limit in self.limits)])


def hugepage_pools(root: Path = _ROOT) -> dict[int, HugepagePool]:
    """The hugepage pools of this kernel by page size in bytes, smallest first."""
    pools = {}
    for directory in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        size = int(directory.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        total = _number(directory / "nr_hugepages") or 0
        idle = (_number(directory / "free_hugepages") or 0) - (
            _number(directory / "resv_hugepages") or 0
        )
        extra = (_number(directory / "nr_overcommit_hugepages") or 0) - (
            _number(directory / "surplus_hugepages") or 0
        )
        pools[size] = HugepagePool(
            size,
            total,
            free=max(0, idle) + max(0, extra),
            most=total + max(0, extra),
            directory=directory,
            limits=hugetlb_limits(size, root),
        )
    return dict(sorted(pools.items()))


def default_hugepage_size(root: Path = _ROOT) -> int | None:
    """The size in bytes that `vm.nr_hugepages` counts, or None without hugepages."""
    return _meminfo("Hugepagesize", root)


def available_memory(root: Path = _ROOT) -> int | None:
    """MemAvailable in bytes: what can be allocated without swapping. None if unknown."""
    return _meminfo("MemAvailable", root)


def hugetlb_limits(page_size: int, root: Path = _ROOT) -> tuple[Limit, ...]:
    """The cgroup limits on hugepages of `page_size` bytes.

    Both the limit on use and the one on reservation count, of this process's cgroup and of every
    one above it.
    """
    prefix = f"hugetlb.{_hugetlb_name(page_size)}"
    limits = []
    for directory, version in _cgroups("hugetlb", root):
        limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        for kind in (prefix, f"{prefix}.rsvd"):
            limits.append(_limit(directory / f"{kind}.{limit}", directory / f"{kind}.{used}"))
    return tuple(limit for limit in limits if limit is not None)


def memory_limit(root: Path = _ROOT) -> Limit | None:
    """The cgroup memory limit with the least headroom, of this process's cgroup and those above.

    Inactive page cache does not count as used: the kernel drops it on demand.
    """
    limits = []
    for directory, version in _cgroups("memory", root):
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            names = ("memory.max", "memory.current", "inactive_file")
        found = _limit(directory / names[0], directory / names[1])
        if found is not None:
            cache = _keyed_number(directory / "memory.stat", names[2]) or 0
            limits.append(Limit(found.file, found.limit, max(0, found.used - cache)))
    return tightest(limits)


def tightest(limits: Iterable[Limit]) -> Limit | None:
    """The limit with the least headroom; None if there is none."""
    return min(limits, key=lambda limit: limit.headroom, default=None)


def _limit(limit_file: Path, used_file: Path) -> Limit | None:
    limit = _number(limit_file)
    if limit is None or limit >= _UNLIMITED:
        return None
    return Limit(limit_file, limit, _number(used_file) or 0)


def _hugetlb_name(page_size: int) -> str:
    """The size as cgroup file names spell it: 64KB, 2MB, 1GB."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB")):
        if page_size >= unit:
            return f"{page_size // unit}{name}"
    return f"{page_size >> 10}KB"


def _cgroups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """This process's cgroup directories for `controller`, leaf first, with the cgroup version.

    A controller that sits on a v1 hierarchy is not on v2.
    """
    paths: dict[int, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if controller in names.split(","):
            paths[1] = path
        elif number == "0" and not names:
            paths[2] = path
    version = 1 if 1 in paths else 2
    mount = _mount(version, controller, root)
    if mount is None or version not in paths:
        return
    top, mounted = mount
    # In a container the path may be the host's: below the mount's root it is cut off, elsewhere
    # the mount itself is the container's cgroup.
    path = paths[version]
    if mounted != "/":
        path = path.removeprefix(mounted) if f"{path}/".startswith(f"{mounted}/") else ""
    leaf = top / path.lstrip("/")
    if ".." in leaf.parts or not leaf.is_dir():
        leaf = top
    while True:
        yield leaf, version
        if leaf == top:
            return
        leaf = leaf.parent


def _mount(version: int, controller: str, root: Path) -> tuple[Path, str] | None:
    """Where the hierarchy is mounted, and which of its directories is mounted there."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if (kind[0] == "cgroup2") if version == 2 else _is_v1(kind, controller):
            return root / _unescape(fields[4]).lstrip("/"), _unescape(fields[3])
    return None


def _is_v1(kind: list[str], controller: str) -> bool:
    return kind[0] == "cgroup" and controller in kind[2].split(",")


def _unescape(path: str) -> str:
    """mountinfo writes blanks and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _meminfo(name: str, root: Path) -> int | None:
    kilobytes = _keyed_number(root / "proc/meminfo", f"{name}:")
    return None if kilobytes is None else kilobytes * 1024


def _keyed_number(file: Path, key: str) -> int | None:
    for line in _text(file).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == key:
            return int(words[1])
    return None


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
