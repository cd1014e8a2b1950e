"""Building blocks for tests of what lies between a host pool and a file, without SGLang.

Everything is seeded and cleans up after itself: the pools are plain memory, `engines` and
`make_mover` are context managers.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_nixl.geometry import PoolGeometry, Region
from hicache_nixl.memory import HostBuffer, allocate
from hicache_nixl.mover import RecordMover
from hicache_nixl.record import ALIGNMENT, padded
from hicache_nixl.staging import StagingArena
from hicache_nixl.transfer import QUEUE_PARAMETERS, TransferEngine

Bytes = npt.NDArray[np.uint8]

_OFF_ALIGNMENT = 64
"""How far an unaligned pool starts behind a page of memory."""


def aligned_array(nbytes: int) -> Bytes:
    """Zeroed memory that starts on a multiple of ALIGNMENT; it lives as long as the array."""
    return np.frombuffer(mmap.mmap(-1, padded(nbytes)), np.uint8)[:nbytes]


def address_of(array: Bytes) -> int:
    return int(array.ctypes.data)


def open_file(path: Path, *, direct_io: bool = True) -> int:
    """A descriptor of a file, which is made; with O_DIRECT if wanted and the file system has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if direct_io:
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_DIRECT, 0o600)
    return os.open(path, flags, 0o600)


@dataclass(frozen=True)
class HostPool:
    """A pool and its memory; keep it for as long as the geometry is in use."""

    geometry: PoolGeometry
    memory: Bytes

    def page(self, number: int) -> bytes:
        """The payload of one page."""
        return b"".join(window[number].tobytes() for window in self.geometry.windows)

    def pages(self, numbers: npt.NDArray[np.int64]) -> list[bytes]:
        return [self.page(int(number)) for number in numbers]

    def fill(self, seed: int) -> None:
        """Overwrite the pool with seeded bytes."""
        self.memory[:] = np.random.default_rng(seed).integers(
            0, 256, self.memory.size, dtype=np.uint8
        )


def host_pool(
    seed: int,
    pages: int,
    segments: int,
    segment_bytes: int,
    aligned: bool = True,
    *,
    page_contiguous: bool = False,
) -> HostPool:
    """A pool of `pages` pages of `segments` segments, filled with seeded bytes.

    A segment of all pages lies in one piece, as in `layer_first`; with `page_contiguous` a page
    does, as in `page_first_direct`. Its memory starts on a multiple of ALIGNMENT if `aligned`.
    """
    nbytes = pages * segments * segment_bytes
    start = 0 if aligned else _OFF_ALIGNMENT
    memory = aligned_array(start + nbytes)[start:]
    step, stride = (
        (segment_bytes, segments * segment_bytes)
        if page_contiguous
        else (pages * segment_bytes, segment_bytes)
    )
    geometry = PoolGeometry(
        layout="page_first_direct" if page_contiguous else "layer_first",
        byte_order="layer-major",
        page_tokens=1,
        pages=pages,
        bases=np.uint64(address_of(memory))
        + np.arange(segments, dtype=np.uint64) * np.uint64(step),
        strides=np.full(segments, stride),
        lengths=np.full(segments, segment_bytes),
        regions=(Region(address_of(memory), nbytes),),
    )
    pool = HostPool(geometry, memory)
    pool.fill(seed)
    return pool


def page_keys(count: int, seed: int = 0) -> list[bytes]:
    """`count` different keys."""
    return [b"%08x%08x" % (seed, number) + bytes(16) for number in range(count)]


@contextmanager
def engines(queue: str = "uring") -> Iterator[tuple[TransferEngine, TransferEngine]]:
    """A reader and a writer on NIXL's POSIX plug-in."""
    reader = TransferEngine("POSIX", QUEUE_PARAMETERS[queue])
    writer = TransferEngine("POSIX", QUEUE_PARAMETERS[queue])
    try:
        yield reader, writer
    finally:
        reader.close()
        writer.close()


@dataclass(frozen=True)
class Rig:
    """A mover with its parts, and a way to give it files and pools."""

    mover: RecordMover
    reader: TransferEngine
    writer: TransferEngine
    staging: StagingArena
    buffer: HostBuffer
    direct_io: bool
    _cleanup: ExitStack

    def register_pool(self, pool: HostPool) -> None:
        """Let both engines touch a pool, if it moves in place."""
        if self.mover.placement(pool.geometry).in_place:
            for region in pool.geometry.regions:
                self._register_memory(region.address, region.nbytes)

    def open_file(self, path: Path, nbytes: int) -> int:
        """A preallocated file that both engines may touch, open as the mover expects."""
        descriptor = open_file(path, direct_io=self.direct_io)
        self._cleanup.callback(os.close, descriptor)
        os.posix_fallocate(descriptor, 0, nbytes)
        for engine in (self.reader, self.writer):
            registration = engine.register_file(descriptor, nbytes)
            self._cleanup.callback(engine.deregister, registration)
        return descriptor

    def _register_memory(self, address: int, nbytes: int) -> None:
        for engine in (self.reader, self.writer):
            registration = engine.register_memory(address, nbytes)
            self._cleanup.callback(engine.deregister, registration)


@contextmanager
def make_mover(
    *pools: HostPool,
    staging_bytes: int = 4 << 20,
    direct_io: bool = True,
    checks_payload: bool = True,
    queue: str = "uring",
) -> Iterator[Rig]:
    """A mover over engines that really run, with `pools` registered."""
    with engines(queue) as (reader, writer), ExitStack() as cleanup:
        buffer = allocate(staging_bytes)
        cleanup.callback(buffer.release)
        staging = StagingArena(buffer)
        mover = RecordMover(
            reader=reader,
            writer=writer,
            staging=staging,
            direct_io=direct_io,
            checks_payload=checks_payload,
        )
        rig = Rig(mover, reader, writer, staging, buffer, direct_io, cleanup)
        rig._register_memory(staging.address, staging.nbytes)
        for pool in pools:
            rig.register_pool(pool)
        yield rig


def record_offsets(count: int, record_bytes: int) -> npt.NDArray[np.int64]:
    """Where `count` records lie back to back; `record_bytes` is a multiple of ALIGNMENT."""
    return np.arange(count, dtype=np.int64) * (-(-record_bytes // ALIGNMENT) * ALIGNMENT)
