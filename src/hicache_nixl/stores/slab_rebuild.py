"""Makes the index of a slab store anew from the trailers in its slots."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hicache_nixl import record
from hicache_nixl.identity import Namespace
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_segments import SegmentFile, find_segments
from hicache_nixl.stores.slab_sql import PageRow, page_hash

logger = logging.getLogger(__name__)

_THREADS = 16
_CHUNK = 256
_READ_BYTES = 1024 * 1024
_READ_THROUGH_BYTES = 32 * 1024
"""Up to this record size, whole records are read, many at once: fewer reads take less time."""


def rebuild(
    index: SlabIndex, directories: Sequence[Path], namespaces: Mapping[bytes, tuple[Namespace, int]]
) -> None:
    """Fill an empty index with the newest record of every page. Reads every trailer.

    `namespaces`: digest -> namespace and the tick of its last clear. Pages of others, and those
    that were cleared, are left out. A page that was evicted and not yet overwritten comes back.
    """
    start = time.monotonic()
    segments: dict[int, SegmentFile] = {}
    for segment in find_segments(directories):
        if segment.slots > 0:
            segments.setdefault(segment.id, segment)
    numbers = {
        digest: (index.add_namespace(namespace), cleared_at)
        for digest, (namespace, cleared_at) in namespaces.items()
    }
    rows: dict[int, PageRow] = {}
    for segment in segments.values():
        for slot, trailer in _scan(segment, directories):
            number, cleared_at = numbers.get(trailer.namespace, (0, 0))
            if number == 0 or trailer.generation <= cleared_at:
                continue
            hash_ = page_hash(number, trailer.key)
            earlier = rows.get(hash_)
            if earlier is None or earlier[5] < trailer.generation:
                rows[hash_] = (
                    hash_, number, trailer.key, segment.id, slot, trailer.generation,
                    segment.record_bytes, trailer.generation, trailer.depth,
                )  # fmt: skip
    used: dict[int, set[int]] = {id_: set() for id_ in segments}
    for row in rows.values():
        used[row[3]].add(row[4])
    # By use, so that pages written together lie together again.
    pages = sorted(rows.values(), key=lambda row: (row[7], row[8]))
    index.restore({segment: used[id_] for id_, segment in segments.items()}, pages)
    if segments:
        logger.warning(
            "made a new index of %d pages from %d segments in %.1f s",
            len(pages),
            len(segments),
            time.monotonic() - start,
        )


def _scan(
    segment: SegmentFile, directories: Sequence[Path]
) -> Iterator[tuple[int, record.Trailer]]:
    """The intact trailers of one segment, by slot."""
    size = segment.record_bytes
    offset = size - record.TRAILER_BYTES
    in_one = max(1, _READ_BYTES // size) if size <= _READ_THROUGH_BYTES else 1
    descriptor = os.open(segment.path(directories), os.O_RDONLY | os.O_CLOEXEC)

    def read(first: int) -> list[tuple[int, record.Trailer]]:
        found = []
        for start in range(first, min(first + _CHUNK, segment.slots), in_one):
            slots = min(in_one, segment.slots - start)
            block = os.pread(descriptor, slots * size - offset, start * size + offset)
            for i in range(slots):
                trailer = _trailer(block[i * size : i * size + record.TRAILER_BYTES])
                if trailer and record.record_bytes(trailer.payload_bytes) == size:
                    found.append((start + i, trailer))
        return found

    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        with ThreadPoolExecutor(_THREADS) as pool:
            for found in pool.map(read, range(0, segment.slots, _CHUNK)):
                yield from found
    finally:
        os.close(descriptor)


def _trailer(block: bytes) -> record.Trailer | None:
    if len(block) < record.TRAILER_BYTES or not block.startswith(record.MAGIC):
        return None
    return record.parse_trailer(np.frombuffer(block, np.uint8))
