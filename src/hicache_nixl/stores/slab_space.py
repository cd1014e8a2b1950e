"""Space in a slab store: which slots a writer gets, and what has to go for them.

In this order: vacant slots; a new segment, while budget and disks allow; a whole segment of another
record size, if all its pages were used longer ago than any page of this size; the pages of this
size that were used longest ago. A page that the asking call itself uses never goes.
"""

import errno
import logging
import os
import time
from collections.abc import Iterable

from hicache_nixl.errors import StoreError
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_root import SlabRoot
from hicache_nixl.stores.slab_segments import SegmentFile, SegmentTable, preallocate
from hicache_nixl.stores.slab_sql import Slot, Touch

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024
_SEGMENTS_WANTED = 64
_SEGMENT_RANGE = (16 * _MIB, 16 * 1024 * _MIB)
_INDEX_RESERVE_BYTES = 2 * _MIB
_INDEX_BYTES_PER_PAGE = 512
_DISK_FULL_PAUSE_S = 5.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def segment_size(capacity_bytes: int) -> int:
    """Bytes of a segment file when none are set: about 64 of them fill the budget."""
    low, high = _SEGMENT_RANGE
    wanted = capacity_bytes // _SEGMENTS_WANTED // _MIB * _MIB
    return min(capacity_bytes, max(low, min(high, wanted)))


class SlabSpace:
    """Hands out slots within a budget. Safe for threads and processes."""

    def __init__(
        self,
        root: SlabRoot,
        index: SlabIndex,
        segments: SegmentTable,
        *,
        capacity_bytes: int,
        segment_bytes: int,
    ) -> None:
        self._root = root
        self._index = index
        self._segments = segments
        self._capacity = capacity_bytes
        self._segment_bytes = segment_bytes
        self._disk_full_until = 0.0

    def claim(
        self, count: int, record_bytes: int, tick: int, touches: Iterable[Touch]
    ) -> list[Slot]:
        """Up to `count` slots of `record_bytes` for a call that began at `tick`.

        `touches` are noted before anything is evicted. Raises StoreError for trouble with the
        index or the directories; a full disk is no error, there are fewer slots then.
        """
        slots: list[Slot] = []
        may_drop = True
        while True:
            full = not self._may_grow(record_bytes)
            older = self._older_segment(record_bytes, tick) if full and may_drop else None
            slots += self._index.claim(
                count=count - len(slots),
                record_bytes=record_bytes,
                writer=self._root.writer,
                evict_before=tick if full and older is None else None,
                touches=touches,
            )
            touches = ()
            if len(slots) == count or (full and older is None):
                return slots
            if older is not None:
                self._drop(older)
                may_drop = False
            self._grow(record_bytes)

    def shrink_to_budget(self) -> None:
        """Give up the coldest segments while there are more than the budget allows."""
        while self._index.allocated_bytes() > self._capacity:
            segment = self._index.coldest_segment(None, time.time_ns())
            if segment is None or not self._drop(segment):
                return

    def _may_grow(self, record_bytes: int) -> bool:
        if time.monotonic() < self._disk_full_until:
            return False
        return self._index.allocated_bytes() + record_bytes <= self._capacity

    def _grow(self, record_bytes: int) -> None:
        """Add a segment in each directory, as far as budget and disks allow."""
        with self._root.locked():
            for number, directory in enumerate(self._root.directories):
                room = self._capacity - self._index.allocated_bytes()
                slots = min(max(self._segment_bytes, record_bytes), room) // record_bytes
                disk = os.statvfs(directory)
                free = disk.f_bavail * disk.f_frsize - _INDEX_RESERVE_BYTES
                fitting = min(slots, free // (record_bytes + _INDEX_BYTES_PER_PAGE))
                if fitting < slots:
                    self._disk_full_until = time.monotonic() + _DISK_FULL_PAUSE_S
                self._add_segment(number, record_bytes, fitting)

    def _add_segment(self, directory: int, record_bytes: int, slots: int) -> None:
        """Create a segment of `slots` slots, or of fewer if the disk turns out to be full."""
        while slots > 0:
            id_ = self._index.reserve_segment_id()
            segment = SegmentFile(id_, directory, record_bytes, slots)
            try:
                preallocate(self._root.directories, segment)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    path = segment.path(self._root.directories)
                    raise StoreError(f"{path} cannot be created: {error.strerror}") from error
                self._disk_full_until = time.monotonic() + _DISK_FULL_PAUSE_S
                slots //= 2
            else:
                self._index.add_segment(segment)
                return

    def _older_segment(self, record_bytes: int, tick: int) -> SegmentFile | None:
        """A segment of another record size that should go before any page of this size does."""
        if self._index.sizes() <= {record_bytes}:
            return None
        oldest = self._index.oldest_use(record_bytes)
        return self._index.coldest_segment(record_bytes, tick if oldest is None else oldest)

    def _drop(self, segment: SegmentFile) -> bool:
        with self._root.locked():
            pages = self._index.drop_segment(segment)
            if pages is None:
                return False
            segment.path(self._root.directories).unlink(missing_ok=True)
        self._segments.drop({segment.id})
        self._disk_full_until = 0.0
        logger.info("dropped segment %d with %d pages", segment.id, pages)
        return True
