"""Page-aligned host memory on ordinary pages or hugepages.

Owns the mapping: how it is made, populated and given back. It must not know what the memory is
for, and it does not pin (see `pinning`).

Every mapping is populated before it is handed out. Hugepages that run short would otherwise show
up as SIGBUS at the first touch, long after mmap succeeded: a cgroup's hugetlb limit is charged on
the fault, and MAP_POPULATE does not report it. MADV_POPULATE_WRITE does.

Mappings are MAP_SHARED: a private page is copied when the process forks and writes, and a device
that has it pinned would go on using the old one.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from hicache_nixl import memory_limits
from hicache_nixl.errors import HostMemoryError
from hicache_nixl.memory_limits import HugepagePool
from hicache_nixl.units import format_size

__all__ = ["HostBuffer", "HugepageReport", "Hugepages", "allocate", "hugepage_report"]

Hugepages = Literal["off", "prefer", "required"]

DEFAULT_HUGEPAGE_SIZE: Final = 2 << 20

_MAP_HUGETLB: Final = 0x40000
_MAP_HUGE_SHIFT: Final = 26
_MADV_POPULATE_WRITE: Final = 23
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_ROOT: Final = Path("/")
# One core zeroes about 1 GiB of ordinary pages a second, so large mappings share the work out.
_POPULATE_CHUNK: Final = 1 << 30
_POPULATE_THREADS: Final = 8

_logger = logging.getLogger(__name__)
_warned: set[str] = set()
_warned_lock = threading.Lock()


class HostBuffer:
    """A populated, zeroed, writable mapping of host memory.

    The memory lives until this object and every view of it are gone, or until `release()` and the
    end of the last view. It is never unmapped under a live view. A forked child shares it.

    Attributes:
        address: of the first byte; a multiple of `page_size`, which is at least 4096.
        nbytes: usable bytes, as asked for.
        mapped_bytes: `nbytes` rounded up to `page_size`.
        page_size: bytes of the pages that back it.
    """

    def __init__(self, address: int, nbytes: int, mapped_bytes: int, page_size: int) -> None:
        """Take ownership of the mapping of `mapped_bytes` bytes at `address`."""
        self.address: Final = address
        self.nbytes: Final = nbytes
        self.mapped_bytes: Final = mapped_bytes
        self.page_size: Final = page_size
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        self._memory: ctypes.Array[ctypes.c_uint8] | None = memory
        self._finalizer = weakref.finalize(memory, _munmap, address, mapped_bytes)
        # At exit, threads of a transfer library may still use the memory; the kernel frees it.
        self._finalizer.atexit = False

    @property
    def mapped(self) -> bool:
        """Whether the mapping still exists."""
        return self._finalizer.alive

    def view(self) -> npt.NDArray[np.uint8]:
        """A writable array of shape (nbytes,) over the memory, which it keeps alive.

        Raises:
            HostMemoryError: the buffer was released.
        """
        if self._memory is None:
            raise HostMemoryError(
                f"host buffer of {self.nbytes} bytes at {self.address:#x} was released: "
                "take views before release()"
            )
        return np.frombuffer(memoryview(self._memory), dtype=np.uint8)

    def release(self) -> None:
        """Give up the memory: at once, or when the last view is gone. Idempotent."""
        self._memory = None

    def __repr__(self) -> str:
        return (
            f"<HostBuffer {self.nbytes} bytes at {self.address:#x}, "
            f"{self.page_size >> 10} KiB pages{'' if self.mapped else ', released'}>"
        )


@dataclass(frozen=True)
class HugepageReport:
    """What hugepages this process could have now.

    `pools` are the page sizes the kernel knows, smallest first. `populate_write` says whether the
    kernel reports a shortage instead of raising SIGBUS; without it hugepages are not used.
    """

    pools: tuple[HugepagePool, ...]
    populate_write: bool


def hugepage_report(root: Path = _ROOT) -> HugepageReport:
    """Read the hugepage pools, their cgroup limits and the kernel's abilities.

    `root` is the directory that holds `proc` and `sys`.
    """
    return HugepageReport(tuple(memory_limits.hugepage_pools(root).values()), _can_populate())


def allocate(
    nbytes: int,
    *,
    hugepages: Hugepages = "off",
    hugepage_size: int | None = None,
    root: Path = _ROOT,
) -> HostBuffer:
    """Map and populate `nbytes` bytes of zeroed host memory. Blocks while pages are zeroed.

    Args:
        nbytes: bytes wanted, above 0.
        hugepages: `off`: ordinary pages. `prefer`: hugepages, or ordinary pages with one warning
            per process and reason. `required`: hugepages or an error.
        hugepage_size: bytes of a hugepage, a power of two; None for 2 MiB.
        root: the directory that holds `proc` and `sys`.

    Raises:
        HostMemoryError: the memory is not to be had, or the arguments make no sense.
    """
    if nbytes <= 0:
        raise HostMemoryError(f"cannot map {nbytes} bytes of host memory: ask for at least one")
    if hugepages not in ("off", "prefer", "required"):
        raise HostMemoryError(f"hugepages={hugepages!r}: use off, prefer or required")
    size = DEFAULT_HUGEPAGE_SIZE if hugepage_size is None else hugepage_size
    if size <= mmap.PAGESIZE or size & (size - 1):
        raise HostMemoryError(
            f"hugepage_size={size}: use a power of two above {mmap.PAGESIZE}, such as 2 MiB"
        )
    if hugepages != "off":
        try:
            return _allocate_hugepages(nbytes, size, root)
        except _HugepageShortageError as shortage:
            if hugepages == "required":
                raise HostMemoryError(str(shortage)) from None
            _warn_once(shortage)
    return _allocate_ordinary(nbytes, root)


class _HugepageShortageError(Exception):
    """Hugepages that are not to be had; `reason` names the kind of shortage."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _allocate_hugepages(nbytes: int, page_size: int, root: Path) -> HostBuffer:
    pages = -(-nbytes // page_size)
    wanted = pages * page_size
    what = f"cannot map {_size(nbytes)} on {pages} hugepages of {_size(page_size)}"
    if not _can_populate():
        raise _HugepageShortageError(
            "kernel",
            f"{what}: this kernel has no MADV_POPULATE_WRITE, so a shortage would be SIGBUS; "
            "use Linux 5.14 or newer, or hugepages=off",
        )
    pools = memory_limits.hugepage_pools(root)
    pool = pools.get(page_size)
    if pool is None:
        known = ", ".join(_size(size) for size in pools) or "none"
        raise _HugepageShortageError(
            "size",
            f"{what}: this kernel has no such pages (it has: {known}); set hugepage_size to one "
            f"of these, or boot with hugepagesz={page_size >> 10}K hugepages={pages}",
        )
    if pool.free < pages:
        raise _HugepageShortageError(
            "free", f"{what}: {pool.free} pages are free; {_more_pages(pool, pages, root)}"
        )
    if pool.limit is not None and pool.limit.headroom < wanted:
        raise _HugepageShortageError(
            "cgroup",
            f"{what}: the cgroup allows {_size(pool.limit.limit)} and "
            f"{_size(pool.limit.headroom)} of it are left; run "
            f"`echo {pool.limit.used + wanted} > {pool.limit.file}`, or "
            f"{_more_for_container(page_size)}",
        )
    flags = _MAP_HUGETLB | (page_size.bit_length() - 1) << _MAP_HUGE_SHIFT
    try:
        address = _map_populated(wanted, page_size, flags)
    except OSError as error:
        pool = memory_limits.hugepage_pools(root).get(page_size, pool)
        # Either another process was faster, or a limit applies that cannot be read from here.
        fix = (
            _more_pages(pool, pages, root) if pool.free < pages else _more_for_container(page_size)
        )
        raise _HugepageShortageError(
            "refused",
            f"{what}: the kernel refused ({error.strerror}) with {pool.free} pages free; {fix}",
        ) from None
    return HostBuffer(address, nbytes, wanted, page_size)


def _allocate_ordinary(nbytes: int, root: Path) -> HostBuffer:
    page_size = mmap.PAGESIZE
    wanted = -(-nbytes // page_size) * page_size
    what = f"cannot map {_size(nbytes)} of host memory"
    # Checked first, because the kernel answers overuse with the OOM killer, not with an error.
    available = memory_limits.available_memory(root)
    if available is not None and wanted > available:
        raise HostMemoryError(f"{what}: {_size(available)} are available; ask for less")
    limit = memory_limits.memory_limit(root)
    if limit is not None and wanted > limit.headroom:
        raise HostMemoryError(
            f"{what}: the cgroup allows {_size(limit.limit)} and {_size(limit.headroom)} of it "
            f"are left; ask for less, or raise {limit.file}"
        )
    try:
        address = _map_populated(wanted, page_size, 0)
    except OSError as error:
        raise HostMemoryError(
            f"{what}: the kernel refused ({error.strerror}); ask for less"
        ) from None
    return HostBuffer(address, nbytes, wanted, page_size)


def _more_pages(pool: HugepagePool, pages: int, root: Path) -> str:
    """How to have `pages` pages free."""
    total = pool.total + max(0, pages - pool.free)
    if pool.page_size == memory_limits.default_hugepage_size(root):
        return f"run `sysctl -w vm.nr_hugepages={total}`"
    return f"run `echo {total} > {pool.directory / 'nr_hugepages'}`"


def _more_for_container(page_size: int) -> str:
    # Kubernetes counts in Ki, Mi and Gi.
    return f"raise the container's hugepages-{format_size(page_size).removesuffix('B')} limit"


def _size(nbytes: int) -> str:
    return format_size(nbytes, digits=1)


def _warn_once(shortage: _HugepageShortageError) -> None:
    with _warned_lock:
        if shortage.reason in _warned:
            return
        _warned.add(shortage.reason)
    _logger.warning("%s; using ordinary pages", shortage)


def _map_populated(nbytes: int, page_size: int, flags: int) -> int:
    """Map `nbytes` bytes and back every page, or raise OSError and leave nothing mapped."""
    address = _mmap(nbytes, mmap.MAP_SHARED | flags)
    try:
        if _can_populate():
            _populate(address, nbytes, page_size)
        else:
            ctypes.memset(address, 0, nbytes)
    except BaseException:
        _munmap(address, nbytes)
        raise
    return address


def _populate(address: int, nbytes: int, page_size: int) -> None:
    chunk = max(_POPULATE_CHUNK, page_size)
    starts = range(0, nbytes, chunk)
    threads = min(_POPULATE_THREADS, len(os.sched_getaffinity(0)), len(starts))

    def populate(start: int) -> None:
        _madvise(address + start, min(chunk, nbytes - start), _MADV_POPULATE_WRITE)

    if threads == 1:
        for start in starts:
            populate(start)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="populate") as pool:
        for _ in pool.map(populate, starts):
            pass


@functools.cache
def _can_populate() -> bool:
    """Whether this kernel has MADV_POPULATE_WRITE (Linux 5.14)."""
    address = _mmap(mmap.PAGESIZE, mmap.MAP_PRIVATE)
    try:
        _madvise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
    except OSError as error:
        return error.errno != errno.EINVAL
    finally:
        _munmap(address, mmap.PAGESIZE)
    return True


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _mmap(nbytes: int, flags: int) -> int:
    # Not Python's mmap: its madvise holds the GIL while the pages are zeroed.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, nbytes, protection, mmap.MAP_ANONYMOUS | flags, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise _os_error()
    return int(address)


def _munmap(address: int, nbytes: int) -> None:
    if _libc().munmap(address, nbytes):
        raise _os_error()


def _madvise(address: int, nbytes: int, advice: int) -> None:
    if _libc().madvise(address, nbytes, advice):
        raise _os_error()


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
