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
from hicache_nixl.stores.slab_segments import SegmentTable
from hicache_nixl.stores.slab_space import SlabSpace, segment_size
from hicache_nixl.stores.slab_sql import Claim, Located, NewPage, Touch
from hicache_nixl.stores.slab_verify import verify_namespace
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 2.0
_TOUCHES = 4096
_TOUCHES_LIMIT = 65536
_MAX_SEGMENTS = 4096

_Rows = npt.NDArray[np.int64]


class SlabStore:
    """Implements `stores.base.Store` on local directories. Safe for threads, not for forks.

    Args:
        directories: of one store, always in the same order; created where their parent exists.
        capacity_bytes: budget of all segment files together, the same in every process that shares
            the directories. The index comes on top: about 0.2 KiB a page and 16 MiB of journal.
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
        if capacity_bytes // self.segment_bytes > _MAX_SEGMENTS and segment_bytes:
            raise StoreError(
                f"segments of {segment_bytes} bytes would be more than {_MAX_SEGMENTS} files for a "
                f"capacity of {capacity_bytes} bytes; raise segment"
            )
        self._root = SlabRoot(directories)
        self._root.prepare()
        self._index = self._root.open_index(busy_timeout_s=busy_timeout_s)
        self._segments = SegmentTable(
            self._root.directories, engines, direct_io, self._index.segment
        )
        self._space = SlabSpace(
            self._root,
            self._index,
            self._segments,
            capacity_bytes=capacity_bytes,
            segment_bytes=self.segment_bytes,
        )
        self._numbers: dict[bytes, int] = {}
        self._record_sizes: set[int] = set()
        self._lock = threading.Lock()
        self._last_tick = 0
        self._touched: dict[tuple[int, bytes], int] = {}
        self._next_housekeeping = time.monotonic() + _HOUSEKEEPING_S
        self._closed = False
        try:
            self._space.shrink_to_budget()
        except BaseException:
            self.close()
            raise

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
        self._numbers[namespace.digest] = self._index.add_namespace(namespace)
        self._record_sizes.add(size)
        needed = len(self._record_sizes) * self.segment_bytes
        if needed > self.capacity_bytes:
            logger.warning(
                "pages of %d sizes need a segment each, %d bytes in all, and the capacity is %d: "
                "they will displace each other; raise capacity or lower segment",
                len(self._record_sizes),
                needed,
                self.capacity_bytes,
            )

    def namespaces(self) -> list[NamespaceUse]:
        """What is stored, a row a namespace."""
        self._flush_touches()
        return self._index.namespace_uses()

    def clear(self, namespace: bytes) -> int:
        """Forget every page of one namespace; the number of pages that went.

        Pages that other calls are just writing may be there afterwards.
        """
        found = self._index.namespace(namespace)
        if found is None:
            return 0
        self._root.note_clear(found[1], self._index.next_tick())
        return self._index.clear(found[0])

    # -- pages --------------------------------------------------------------------------------

    def exists(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is stored."""
        return self._index.leading_run(self._number(namespace), keys)

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> Flags:
        """Which of `keys` are stored; see `Store`."""
        there = self._index.locate(self._number(namespace), keys)
        return np.array([key in there for key in keys], np.bool_)

    def put(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Store pages; see `Store`. StoreError if the index cannot be used."""
        number = self._number(batch.namespace)
        there = self._index.locate(number, batch.keys)
        stored = np.array([key in there for key in batch.keys], np.bool_)
        first_of = {key: i for i, key in reversed(list(enumerate(batch.keys)))}
        wanted = sorted(i for key, i in first_of.items() if key not in there)
        if wanted:
            rows = np.array(wanted)
            stored[rows] = self._write(
                mover,
                batch.take(rows),
                number,
                [*prefix, *there],
                len(prefix) + rows,
                deadline,
            )
            for i, key in enumerate(batch.keys):  # a key that the call names twice
                stored[i] = stored[first_of[key]]
        else:
            self._touch(number, [*prefix, *there])
        self._keep_house()
        return stored

    def _write(
        self,
        mover: RecordMover,
        batch: Batch,
        number: int,
        in_use: Sequence[bytes],
        depths: npt.NDArray[np.int64],
        deadline: float,
    ) -> Flags:
        claim = self._space.claim(
            len(batch.keys),
            record.record_bytes(batch.geometry.payload_bytes),
            touches=self._take_touches(),
            namespace=number,
            in_use=in_use,
            deadline=deadline,
        )
        with self._lock:
            self._last_tick = max(self._last_tick, claim.generation)
        slots = claim.slots
        outcomes = np.full(len(batch.keys), Outcome.FAILED, np.int8)
        late: set[int] = set()
        try:
            if slots:
                segments, positions = np.array(slots, np.int64).T
                with self._segments.extents(segments, positions) as (extents, rows):
                    outcomes[rows] = mover.write(
                        batch.take(rows),
                        extents,
                        WriteStamp(claim.generation, self._root.writer, depths[rows]),
                        deadline=deadline,
                        on_late=self._holding_slots(claim, segments, rows, late),
                    )
        finally:
            # What was not reported late has ended, even if the mover raised something.
            good = np.flatnonzero(outcomes == Outcome.GOOD).tolist()
            bad = []
            if good and time.monotonic() < deadline:  # then storage works, and those slots do not
                failed = np.flatnonzero(outcomes[: len(slots)] == Outcome.FAILED).tolist()
                bad = [slots[i] for i in failed if not self._segments.is_missing(slots[i][0])]
                if bad:
                    logger.warning("%d slots cannot be written and are left out", len(bad))
            not_stored = self._space.publish(
                claim,
                number,
                [NewPage(batch.keys[i], slots[i], int(depths[i])) for i in good],
                late=[slots[i] for i in late],
                bad=bad,
            )
        written = np.zeros(len(batch.keys), np.bool_)
        written[[i for i in good if batch.keys[i] not in not_stored]] = True
        return written

    def get(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Read pages into their host pages; see `Store`. Reads the leading run that is stored.

        StoreError if the index cannot be used.
        """
        number = self._number(batch.namespace)
        places = self._index.locate(number, batch.keys)
        read = np.zeros(len(batch.keys), np.bool_)
        run = next((i for i, k in enumerate(batch.keys) if k not in places), len(batch.keys))
        if run == 0:
            self._keep_house()
            return read
        found = [places[key] for key in batch.keys[:run]]
        segments = np.array([place.segment for place in found], np.int64)
        positions = np.array([place.slot for place in found], np.int64)
        generations = np.array([place.generation for place in found], np.uint64)
        with self._segments.extents(segments, positions) as (extents, usable):
            rows = usable[usable == np.arange(len(usable))]  # the leading run of these
            part = batch.take(rows)
            outcomes = mover.read(
                part,
                extents,
                generations[rows],
                deadline=deadline,
                on_late=lambda late: self._segments.keep_open(segments[late]),
            )
        if not mover.checks_payload:
            outcomes = self._still_there(number, part.keys, found, outcomes)
        self._forget_bad(number, part.keys, found, outcomes)
        read[rows] = outcomes == Outcome.GOOD
        self._touch(number, [*prefix, *part.keys])
        self._keep_house()
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
        if not bad.any():
            return
        try:
            gone = self._index.forget(number, [(keys[i], found[i]) for i in np.flatnonzero(bad)])
        except StoreError as error:
            logger.warning("damaged pages are not forgotten: %s", error)
            return
        if gone:
            logger.warning("forgot %d pages whose records are damaged", gone)

    def _holding_slots(
        self, claim: Claim, segments: _Rows, written: _Rows, late: set[int]
    ) -> OnLate:
        """Keeps the slots of a late write from other uses until it has ended."""

        def on_late(rows: _Rows) -> Callable[[], None]:
            rows = written[rows]
            files_free = self._segments.keep_open(segments[rows])
            late.update(int(row) for row in rows)

            def on_end() -> None:
                files_free()
                self._space.give_back(claim, [claim.slots[row] for row in rows])

            return on_end

        return on_late

    def _number(self, namespace: bytes) -> int:
        try:
            return self._numbers[namespace]
        except KeyError:
            raise RegistrationError(
                f"namespace {namespace.hex()[:12]} is not open; call open_namespace first"
            ) from None

    # -- use ----------------------------------------------------------------------------------

    def _touch(self, number: int, keys: Sequence[bytes]) -> None:
        with self._lock:
            # Above that of any page this process wrote, also if the clock was set back.
            self._last_tick = tick = max(time.time_ns(), self._last_tick + 1)
            if len(self._touched) < _TOUCHES_LIMIT:
                self._touched.update(((number, key), tick) for key in keys)

    def _take_touches(self) -> list[Touch]:
        with self._lock:
            touches = [(number, key, tick) for (number, key), tick in self._touched.items()]
            self._touched.clear()
        return touches

    def _flush_touches(self, deadline: float | None = None) -> None:
        touches = self._take_touches()
        if not touches:
            return
        try:
            self._index.touch(touches, deadline=deadline)
        except StoreError:
            with self._lock:
                for number, key, tick in touches:
                    self._touched.setdefault((number, key), tick)
            raise

    def _keep_house(self) -> None:
        """What is done behind some of the calls. It does not wait, and does not fail them."""
        now = time.monotonic()
        try:
            for segment in self._segments.take_missing():
                if self._space.drop(segment, now):
                    path = segment.path(self._root.directories)
                    logger.warning("%s is gone; its pages are forgotten", path)
            if now < self._next_housekeeping and len(self._touched) < _TOUCHES:
                return
            self._next_housekeeping = now + _HOUSEKEEPING_S
            there = {segment.id for segment in self._index.segments()}
            self._segments.drop(self._segments.known() - there)  # dropped by other processes
            self._flush_touches(now)
        except StoreError as error:
            logger.info("put off: %s", error)

    def use(self) -> StoreUse:
        """How full the store is."""
        allocated, pages, evicted = self._index.totals()
        return StoreUse(self.capacity_bytes, allocated, pages, evicted)

    def verify(self, namespace: bytes | None = None) -> Iterator[CheckedPage]:
        """Read and check every page with ordinary reads; damaged ones are forgotten."""
        for use in self._index.namespace_uses():
            if namespace in (None, use.namespace.digest):
                yield from verify_namespace(self._index, self._root.directories, use)

    def close(self) -> None:
        """Write down what is only in memory, release files. Idempotent.

        While a late write is still under way, this process goes on being known as a writer, so that
        nobody gets the slot.
        """
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
        if not self._space.holds_claims:
            self._root.sign_out()
