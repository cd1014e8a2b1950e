"""The slab store: pages in slots of preallocated files on local disks, an index beside them.

    put   claim slots (index) -> write records (mover) -> publish (index)
    get   locate (index) -> read and check records (mover) -> forget what was not there (index)

A page is published only after its record is written, and a reader believes only its trailer and
checksum, so a crash at any instant, a slot that is reused under a reader, or a lost index can cost
pages but never show a wrong one. No file is created or opened on the way of a page, except when the
store grows. Several directories are striped; several processes may share them.

When the budget is used up, slots are taken from the pages of the same record size that were used
longest ago, the deepest of a prefix first: the call that uses a page also counts as a use of the
pages before it, so that no prefix gets a hole. A segment of another record size whose pages are all
older goes as a whole instead, which may cut prefixes of that size.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_nixl import record
from hicache_nixl.batch import Batch, OnLate, Outcome, Outcomes, WriteStamp
from hicache_nixl.errors import RegistrationError, StoreError
from hicache_nixl.identity import Namespace
from hicache_nixl.mover import RecordMover
from hicache_nixl.stores.base import CheckedPage, Flags, NamespaceUse, StoreUse
from hicache_nixl.stores.slab_root import SlabRoot
from hicache_nixl.stores.slab_segments import SegmentFile, SegmentTable
from hicache_nixl.stores.slab_space import SlabSpace, segment_size
from hicache_nixl.stores.slab_sql import Located, NewPage, Slot, Touch
from hicache_nixl.stores.slab_verify import verify_namespace
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)

_TOUCH_FLUSH_S = 2.0
_TOUCH_FLUSH_COUNT = 4096


class SlabStore:
    """Implements `stores.base.Store` on local directories. Safe for threads.

    Args:
        directories: of one store, always in the same order; created where their parent exists.
        capacity_bytes: budget of all segment files together. The index comes on top: about 0.3 KiB
            a page.
        segment_bytes: of one segment file; `segment_size(capacity_bytes)` if None.
        engines: those that will be moving records (none for administration).
        direct_io: open segment files with O_DIRECT.
        busy_timeout_s: how long to wait for another process to end an index transaction.

    Raises StoreError when the directories cannot be used.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        capacity_bytes: int,
        segment_bytes: int | None = None,
        engines: Sequence[TransferEngine] = (),
        direct_io: bool = True,
        busy_timeout_s: float = 10.0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes or segment_size(capacity_bytes)
        if self.segment_bytes > capacity_bytes:
            raise StoreError(
                f"a capacity of {capacity_bytes} bytes cannot hold one segment of "
                f"{self.segment_bytes} bytes; raise capacity or lower segment"
            )
        self._root = SlabRoot(directories)
        self._root.prepare()
        self._root.sign_in()
        try:
            self._index = self._root.open_index(busy_timeout_s=busy_timeout_s)
        except BaseException:
            self._root.sign_out()
            raise
        self._segments = SegmentTable(self._root.directories, engines, direct_io)
        self._ids: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._last_tick = self._index.last_tick()
        self._touched: dict[tuple[int, bytes], int] = {}
        self._touch_flushed = time.monotonic()
        self._closed = False
        self._space = SlabSpace(
            self._root,
            self._index,
            self._segments,
            capacity_bytes=capacity_bytes,
            segment_bytes=self.segment_bytes,
        )
        self._space.shrink_to_budget()

    # -- namespaces ---------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace usable; see `Store`."""
        size = record.record_bytes(namespace.payload_bytes)
        if size > self.capacity_bytes:
            raise RegistrationError(
                f"a page of {namespace} takes {size} bytes, more than the capacity of "
                f"{self.capacity_bytes} bytes; raise capacity"
            )
        self._root.note_namespace(namespace)
        self._ids[namespace.digest] = self._index.add_namespace(namespace)

    def namespaces(self) -> list[NamespaceUse]:
        """What is stored, a row a namespace."""
        self._flush_touches()
        return self._index.namespace_uses()

    def clear(self, namespace: bytes) -> int:
        """Forget every page of one namespace; the number of pages that went."""
        number = self._index.namespace_id(namespace)
        if number is None:
            return 0
        self._root.note_clear(namespace, self._tick())
        return self._index.clear(number)

    # -- pages --------------------------------------------------------------------------------

    def exists(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is stored. One index query."""
        return self._index.leading_run(self._ids[namespace], keys)

    def put(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Store pages; see `Store`. StoreError if the index cannot be used."""
        number = self._ids[batch.namespace]
        tick = self._tick()
        there = self._index.locate(number, batch.keys)
        stored = np.array([key in there for key in batch.keys], np.bool_)
        first_of = {key: i for i, key in reversed(list(enumerate(batch.keys)))}
        wanted = [i for key, i in first_of.items() if key not in there]
        self._touch(number, [*prefix, *there], tick)
        if wanted:
            rows = np.array(sorted(wanted))
            stored[rows] = self._write(
                mover, batch.take(rows), number, tick, len(prefix) + rows, deadline
            )
            for i, key in enumerate(batch.keys):  # a key that the call names twice
                stored[i] = stored[first_of[key]]
        return stored

    def _write(
        self,
        mover: RecordMover,
        batch: Batch,
        number: int,
        tick: int,
        depths: npt.NDArray[np.int64],
        deadline: float,
    ) -> Flags:
        size = record.record_bytes(batch.geometry.payload_bytes)
        slots = self._space.claim(len(batch.keys), size, tick, self._take_touches())
        written = np.zeros(len(batch.keys), np.bool_)
        if not slots:
            return written
        part = batch.take(np.arange(len(slots)))
        outcomes = np.full(len(slots), Outcome.FAILED, np.int8)
        segments, positions = np.array(slots, np.int64).T
        try:
            with self._segments.extents(segments, positions, self._describe) as (extents, usable):
                if usable.all():
                    outcomes = mover.write(
                        part,
                        extents,
                        WriteStamp(tick, self._root.writer, depths[: len(slots)]),
                        deadline=deadline,
                        on_late=self._holding(segments, slots, size),
                    )
        finally:
            good = outcomes == Outcome.GOOD
            self._index.publish(
                namespace=number,
                pages=[
                    NewPage(part.keys[i], slots[i][0], slots[i][1], int(depths[i]))
                    for i in np.flatnonzero(good)
                ],
                record_bytes=size,
                generation=tick,
                give_back=[slots[i] for i in np.flatnonzero(outcomes == Outcome.FAILED)],
            )
        written[: len(slots)] = good
        return written

    def get(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Read pages into their host pages; see `Store`. Reads the leading run that is stored.

        StoreError if the index cannot be used.
        """
        number = self._ids[batch.namespace]
        places = self._index.locate(number, batch.keys)
        read = np.zeros(len(batch.keys), np.bool_)
        run = next((i for i, k in enumerate(batch.keys) if k not in places), len(batch.keys))
        if run == 0:
            return read
        part = batch.take(np.arange(run))
        found = [places[key] for key in part.keys]
        segments = np.array([place.segment for place in found], np.int64)
        positions = np.array([place.slot for place in found], np.int64)
        generations = np.array([place.generation for place in found], np.uint64)
        with self._segments.extents(segments, positions, self._describe) as (extents, usable):
            run = int(usable.argmin()) if not usable.all() else run
            outcomes = mover.read(
                part.take(np.arange(run)),
                extents,
                generations,
                deadline=deadline,
                on_late=self._holding(segments, None, 0),
            )
        if not mover.checks_payload:
            outcomes = self._still_there(number, part.keys[:run], found, outcomes)
        self._forget_bad(number, part.keys, found, outcomes)
        read[:run] = outcomes == Outcome.GOOD
        self._touch(number, [*prefix, *part.keys], self._tick())
        self._flush_touches_if_due()
        return read

    def _still_there(
        self, number: int, keys: Sequence[bytes], found: Sequence[Located], outcomes: Outcomes
    ) -> Outcomes:
        """Without a payload checksum, a slot that was reused while it was read is noticed here:
        its page left the index before the first byte of the new one was written."""
        now = self._index.locate(number, keys)
        same = np.array([now.get(key) == found[i] for i, key in enumerate(keys)], np.bool_)
        return np.where(same, outcomes, np.int8(Outcome.FAILED))

    def _forget_bad(
        self, number: int, keys: Sequence[bytes], found: Sequence[Located], outcomes: Outcomes
    ) -> None:
        bad = outcomes == Outcome.FOREIGN
        if (outcomes == Outcome.GOOD).any():  # then storage works, and it is those places that fail
            bad |= outcomes == Outcome.FAILED
        if bad.any():
            gone = self._index.forget(number, [(keys[i], found[i]) for i in np.flatnonzero(bad)])
            if gone:
                logger.warning("forgot %d pages whose records are damaged", gone)

    # -- late transfers ---------------------------------------------------------------------

    def _describe(self, id_: int) -> SegmentFile | None:
        """A segment this process has not opened yet; those that others dropped are closed."""
        return next((s for s in self._index.segments() if s.id == id_), None)

    def _holding(
        self, segments: npt.NDArray[np.int64], slots: Sequence[Slot] | None, size: int
    ) -> OnLate:
        """What keeps the extents of a late transfer from other uses until it has ended."""

        def on_late(rows: npt.NDArray[np.int64]) -> Callable[[], None]:
            files_free = self._segments.keep_open(segments[rows])

            def on_end() -> None:
                files_free()
                if slots is not None and not self._closed:
                    self._index.publish(
                        namespace=0,
                        pages=[],
                        record_bytes=size,
                        generation=0,
                        give_back=[slots[i] for i in rows],
                    )

            return on_end

        return on_late

    # -- use ----------------------------------------------------------------------------------

    def _tick(self) -> int:
        """Nanoseconds of the clock, but never twice the same and never backwards."""
        with self._lock:
            self._last_tick = max(time.time_ns(), self._last_tick + 1)
            return self._last_tick

    def _touch(self, number: int, keys: Sequence[bytes], tick: int) -> None:
        with self._lock:
            self._touched.update(((number, key), tick) for key in keys)

    def _flush_touches_if_due(self) -> None:
        due = time.monotonic() - self._touch_flushed > _TOUCH_FLUSH_S
        if due:
            there = {segment.id for segment in self._index.segments()}
            self._segments.drop(self._segments.known() - there)  # dropped by other processes
        if due or len(self._touched) > _TOUCH_FLUSH_COUNT:
            self._flush_touches()

    def _flush_touches(self) -> None:
        touches = self._take_touches()
        if touches:
            self._index.touch(touches)

    def _take_touches(self) -> list[Touch]:
        with self._lock:
            touches = [(number, key, tick) for (number, key), tick in self._touched.items()]
            self._touched.clear()
            self._touch_flushed = time.monotonic()
        return touches

    def use(self) -> StoreUse:
        """How full the store is."""
        allocated, pages, evicted = self._index.totals()
        return StoreUse(self.capacity_bytes, allocated, pages, evicted)

    def close(self) -> None:
        """Write down what is only in memory, release files. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._flush_touches()
        except StoreError as error:
            logger.warning("last uses of pages were not written: %s", error)
        self._segments.close()
        self._index.close()
        self._root.sign_out()

    def verify(self, namespace: bytes | None = None) -> Iterator[CheckedPage]:
        """Read and check every page with ordinary reads; damaged ones are forgotten."""
        for use in self._index.namespace_uses():
            if namespace in (None, use.namespace.digest):
                yield from verify_namespace(self._index, self._root.directories, use)
