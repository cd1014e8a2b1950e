"""Space in a slab store: which slots a put gets, and what has to go for them.

In this order: vacant slots; a new segment, while budget and disks allow; a whole segment of another
record size, if all its pages were used longer ago than any page of this size; the pages of this
size that were used longest ago. A page that the asking call itself uses never goes.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hicache_nixl.errors import StoreError
from hicache_nixl.stores.directory import NO_ROOM
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_root import SlabRoot
from hicache_nixl.stores.slab_segments import SegmentFile, SegmentTable, preallocate, remove
from hicache_nixl.stores.slab_sql import Claim, NewPage, Slot, Touch

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024
_SEGMENTS_WANTED = 64
_SEGMENT_RANGE = (16 * _MIB, 16 * 1024 * _MIB)
_SMALLEST_PART = 16
"""A segment is at least this part of a full one, or descriptors would not be bounded."""
_INDEX_RESERVE_BYTES = 32 * _MIB
_INDEX_BYTES_PER_PAGE = 512
_PAUSE_S = 5.0
_SETTLE_S = 0.5


def segment_size(capacity_bytes: int) -> int:
    """Bytes of a segment file when none are set: about 64 of them fill the budget."""
    low, high = _SEGMENT_RANGE
    wanted = capacity_bytes // _SEGMENTS_WANTED // _MIB * _MIB
    return min(capacity_bytes, max(low, min(high, wanted)))


class SlabSpace:
    """Hands out slots within a budget, and takes them back. Safe for threads and processes."""

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
        self._no_growth_until = 0.0
        self.growth_trouble: str | None = None
        """Why the store could not grow when it last tried, unless it was for lack of room."""
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}  # claim -> slots
        self._owed: list[tuple[Claim, Sequence[Slot]]] = []

    # -- claims -------------------------------------------------------------------------------

    def claim(
        self,
        count: int,
        record_bytes: int,
        *,
        touches: Sequence[Touch],
        namespace: int,
        in_use: Iterable[bytes],
        deadline: float,
    ) -> Claim:
        """Up to `count` slots of `record_bytes`, to be given back by `publish` and `give_back`.

        `touches`, and the use of the pages `in_use`, are noted before anything is evicted. Raises
        StoreError for trouble with the index; a disk that is full or fails is no error, there are
        fewer slots then.
        """
        self._pay()
        claim: Claim | None = None
        may_grow = may_drop = True
        try:
            while True:
                missing = count - (len(claim.slots) if claim else 0)
                may_grow = may_grow and self._may_grow(record_bytes)
                older = self._older_segment(record_bytes) if may_drop and not may_grow else None
                last = not may_grow and older is None
                claim = self._index.claim(
                    count=missing,
                    record_bytes=record_bytes,
                    writer=self._root.writer,
                    evict=last,
                    touches=touches,
                    namespace=namespace,
                    in_use=in_use,
                    earlier=claim,
                    deadline=deadline,
                )
                touches = in_use = ()
                with self._lock:
                    self._held[claim.id] = len(claim.slots)
                if last or len(claim.slots) == count:
                    return claim
                if older is not None:
                    may_drop = False
                    may_grow = self._try_drop(older, deadline)
                if may_grow:
                    may_grow = self._try_grow(record_bytes, deadline)
        except BaseException:
            if claim is not None:
                self.give_back(claim, claim.slots)
            raise

    def publish(
        self,
        claim: Claim,
        namespace: int,
        pages: Sequence[NewPage],
        *,
        late: Sequence[Slot] = (),
        bad: Sequence[Slot] = (),
    ) -> set[bytes]:
        """Make pages visible and end a claim; see `SlabIndex.publish`.

        Slots in `late` stay claimed until they are given back; those in `bad`, which cannot be
        written, until the store is opened again, or every put would try them first. Blocks for up
        to half a second. If it raises, the claim is ended by a later call.
        """
        keep = [*late, *bad]
        try:
            not_stored = self._index.publish(
                claim,
                namespace=namespace,
                pages=pages,
                keep=keep,
                deadline=time.monotonic() + _SETTLE_S,
            )
        except BaseException:
            kept = set(keep)
            rest = [slot for slot in claim.slots if slot not in kept]
            with self._lock:
                self._owed.append((claim, rest))
            self._ended(claim, len(bad))
            raise
        self._ended(claim, len(claim.slots) - len(late))
        return not_stored

    def give_back(self, claim: Claim, slots: Sequence[Slot]) -> None:
        """End a claim on some slots, now or, if the index is in trouble, with a later call."""
        with self._lock:
            self._owed.append((claim, slots))
        try:
            self._pay()
        except StoreError as error:
            logger.warning("%d slots are given back later: %s", len(slots), error)

    @property
    def holds_claims(self) -> bool:
        """Whether a slot of this store may still be written by this process."""
        return bool(self._held)

    def _pay(self) -> None:
        while self._owed:
            with self._lock:
                owed, self._owed = self._owed, []
            for i, (claim, slots) in enumerate(owed):
                try:
                    self._index.release(claim, slots, deadline=time.monotonic() + _SETTLE_S)
                except BaseException:
                    with self._lock:
                        self._owed += owed[i:]
                    raise
                self._ended(claim, len(slots))

    def _ended(self, claim: Claim, slots: int) -> None:
        with self._lock:
            left = self._held.pop(claim.id, 0) - slots
            if left > 0:
                self._held[claim.id] = left

    # -- segments -----------------------------------------------------------------------------

    def shrink_to_budget(self) -> None:
        """Give up the coldest segments while there are more than the budget allows."""
        while self._index.allocated_bytes() > self._capacity:
            segment = self._index.coldest_segment(None, None)
            if segment is None or not self.drop(segment):
                return

    def drop(self, segment: SegmentFile, deadline: float | None = None) -> bool:
        """Give up a segment with its pages, unless a slot of it is being written."""
        with self._root.locked(deadline):
            pages = self._index.drop_segment(segment)
            if pages is None:
                return False
            remove(self._root.directories, segment)
        self._segments.drop({segment.id})
        self._no_growth_until = 0.0
        logger.info("dropped segment %d with %d pages", segment.id, pages)
        return True

    def _slots_for(self, record_bytes: int) -> int:
        """Slots of a full segment."""
        return max(self._segment_bytes, record_bytes) // record_bytes

    def _fitting(self, record_bytes: int, room: int, bytes_per_slot: int) -> int:
        """Slots of the segment that fits into `room` bytes; 0 rather than a tiny one."""
        wanted = self._slots_for(record_bytes)
        fitting = min(wanted, max(0, room) // bytes_per_slot)
        return fitting if fitting * _SMALLEST_PART >= wanted else 0

    def _may_grow(self, record_bytes: int) -> bool:
        if time.monotonic() < self._no_growth_until:
            return False
        room = self._capacity - self._index.allocated_bytes()
        return self._fitting(record_bytes, room, record_bytes) > 0

    def _older_segment(self, record_bytes: int) -> SegmentFile | None:
        """A segment of another record size that should go before any page of this size does."""
        return self._index.coldest_segment(record_bytes, self._index.oldest_use(record_bytes))

    def _try_drop(self, segment: SegmentFile, deadline: float) -> bool:
        try:
            return self.drop(segment, deadline)
        except OSError as error:  # StoreError is one
            logger.warning("segment %d is not dropped: %s", segment.id, error)
            return False

    def _try_grow(self, record_bytes: int, deadline: float) -> bool:
        """Add segments; False if none could be added, and then not again for a while."""
        grown = False
        self.growth_trouble = None
        try:
            with self._root.locked(deadline):
                grown = self._grow(record_bytes)
        except OSError as error:
            self.growth_trouble = str(error)
            logger.warning("the store does not grow: %s", error)
        if not grown:
            self._no_growth_until = time.monotonic() + _PAUSE_S
        return grown

    def _grow(self, record_bytes: int) -> bool:
        """Add a segment in each of the emptiest directories, as far as budget and disks allow."""
        allocated = dict.fromkeys(range(len(self._root.directories)), 0)
        for segment in self._index.segments():
            allocated[segment.directory] += segment.nbytes
        level = min(allocated.values())
        grown = False
        for number in sorted(allocated, key=allocated.__getitem__):
            if grown and allocated[number] > level:
                break
            room = self._capacity - self._index.allocated_bytes()
            free = self._free_bytes(self._root.directories[number]) - _INDEX_RESERVE_BYTES
            slots = min(
                self._fitting(record_bytes, room, record_bytes),
                self._fitting(record_bytes, free, record_bytes + _INDEX_BYTES_PER_PAGE),
            )
            grown |= self._add_segment(number, record_bytes, slots)
        return grown

    def _add_segment(self, directory: int, record_bytes: int, slots: int) -> bool:
        """Create a segment of `slots` slots, or of fewer if the disk turns out to be full."""
        while slots > 0:
            id_ = self._index.reserve_segment_id()
            segment = SegmentFile(id_, directory, record_bytes, slots)
            try:
                preallocate(self._root.directories, segment)
            except OSError as error:
                path = segment.path(self._root.directories)
                logger.warning("%s cannot be created: %s", path, error.strerror)
                if error.errno not in NO_ROOM:
                    self.growth_trouble = f"{path}: {error.strerror}"
                    return False
                slots = self._fitting(record_bytes, slots // 2 * record_bytes, record_bytes)
            else:
                self._index.add_segment(segment)
                return True
        return False

    def _free_bytes(self, directory: Path) -> int:
        try:
            disk = os.statvfs(directory)
        except OSError as error:
            self.growth_trouble = f"{directory}: {error.strerror}"
            logger.warning("%s cannot be looked at: %s", directory, error.strerror)
            return 0
        return disk.f_bavail * disk.f_frsize
