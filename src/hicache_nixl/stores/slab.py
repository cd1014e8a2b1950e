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

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from hicache_nixl import record
from hicache_nixl.batch import Batch, Outcome, Outcomes
from hicache_nixl.errors import RegistrationError, StoreError
from hicache_nixl.identity import Namespace
from hicache_nixl.mover import RecordMover
from hicache_nixl.stores.base import CheckedPage, Direction, Flags, NamespaceUse, StoreUse
from hicache_nixl.stores.slab_opening import SlabOpening
from hicache_nixl.stores.slab_space import segment_size
from hicache_nixl.stores.slab_sql import Located
from hicache_nixl.stores.slab_verify import verify_namespace
from hicache_nixl.stores.slab_write import SlabWrite
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 2.0
_LOOK_S = 1.0
_TOUCHES = 4096
_MAX_SEGMENTS = 4096


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
        self._open_files = partial(
            SlabOpening,
            directories,
            capacity_bytes=capacity_bytes,
            segment_bytes=self.segment_bytes,
            engines=engines,
            direct_io=direct_io,
            busy_timeout_s=busy_timeout_s,
        )
        self._opening: SlabOpening | None = self._open_files()
        self._root = self._opening.root
        self._namespaces: dict[bytes, Namespace] = {}
        self._lock = threading.Lock()
        self._reopening = threading.Lock()
        self._next_look = 0.0
        self._next_housekeeping = time.monotonic() + _HOUSEKEEPING_S
        self._closed = False

    # -- the directories ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self) -> Iterator[SlabOpening]:
        """What is open. StoreError while the directories are gone, which is noticed here."""
        opening = self._opening
        now = time.monotonic()
        if opening is not None and now >= self._next_look:
            self._next_look = now + _LOOK_S
            if not opening.is_there():
                self._let_go(opening)
                opening = None
        if opening is None:
            raise StoreError(f"{self._root.first} is gone; mount it, or bring it back")
        with opening.using():
            yield opening

    def _let_go(self, opening: SlabOpening) -> None:
        with self._lock:
            if self._opening is not opening or self._closed:
                return
            self._opening = None
        logger.warning("%s is gone; its files are let go of until it is back", self._root.first)
        opening.close()

    def _reopen(self, deadline: float) -> None:
        """Open the directories again, if they are back. Raises StoreError."""
        if not self._reopening.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreError(f"{self._root.first} is being opened")
        try:
            if self._opening is not None:
                return
            opening = self._open_files(store=self._root.store)
            for namespace in list(self._namespaces.values()):
                opening.add_namespace(namespace)
            with self._lock:
                if not self._closed:
                    self._opening = opening
            if self._opening is opening:
                logger.warning("%s is back", self._root.first)
            else:
                opening.close()
        finally:
            self._reopening.release()

    def check(self, direction: Direction, *, deadline: float) -> None:
        """Try whether reading or writing works; see `Store`.

        Opens the directories again if they were gone; with a lost index that can take longer than
        `deadline`.
        """
        self._next_look = 0.0
        if self._opening is None:
            self._reopen(deadline)
        with self._using() as opening:
            opening.check(direction, deadline=deadline)

    # -- namespaces ---------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace usable; see `Store`."""
        size = record.record_bytes(namespace.payload_bytes)
        if size > self.capacity_bytes:
            raise RegistrationError(
                f"a page of {namespace} takes {size} bytes, more than the capacity of "
                f"{self.capacity_bytes} bytes; raise capacity"
            )
        with self._using() as opening:
            opening.add_namespace(namespace)
        self._namespaces[namespace.digest] = namespace
        sizes = {record.record_bytes(known.payload_bytes) for known in self._namespaces.values()}
        needed = len(sizes) * self.segment_bytes
        if needed > self.capacity_bytes:
            logger.warning(
                "pages of %d sizes need a segment each, %d bytes in all, and the capacity is %d: "
                "they will displace each other; raise capacity or lower segment",
                len(sizes),
                needed,
                self.capacity_bytes,
            )

    def namespaces(self) -> list[NamespaceUse]:
        """What is stored, a row a namespace."""
        with self._using() as opening:
            opening.uses.flush(opening.index)
            return opening.index.namespace_uses()

    def clear(self, namespace: bytes, *, deadline: float = math.inf) -> int:
        """Forget every page of one namespace; see `Store`.

        Pages that other calls are just writing may be there afterwards.
        """
        with self._using() as opening:
            found = opening.index.namespace(namespace)
            if found is None:
                return 0
            opening.root.note_clear(found[1], opening.index.next_tick())
            return opening.index.clear(found[0], deadline=deadline)

    # -- pages --------------------------------------------------------------------------------

    def exists(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is stored."""
        with self._using() as opening:
            return opening.index.leading_run(opening.number(namespace), keys)

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> Flags:
        """Which of `keys` are stored; see `Store`."""
        with self._using() as opening:
            there = opening.index.locate(opening.number(namespace), keys)
            return np.array([key in there for key in keys], np.bool_)

    def put(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Store pages; see `Store`."""
        with self._using() as opening:
            number = opening.number(batch.namespace)
            there = opening.index.locate(number, batch.keys)
            stored = np.array([key in there for key in batch.keys], np.bool_)
            first_of = {key: i for i, key in reversed(list(enumerate(batch.keys)))}
            wanted = sorted(i for key, i in first_of.items() if key not in there)
            if not wanted:
                opening.uses.note(number, [*prefix, *there])
                self._keep_house(opening)
                return stored
            rows = np.array(wanted)
            write = SlabWrite(
                opening, mover, batch.take(rows), number, len(prefix) + rows, deadline
            )
            try:
                stored[rows] = write.run([*prefix, *there])
            finally:
                self._keep_house(opening)
            for i, key in enumerate(batch.keys):  # a key that the call names twice
                stored[i] = stored[first_of[key]]
            return stored

    def get(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Read pages into their host pages; see `Store`. Reads the leading run that is stored."""
        with self._using() as opening:
            number = opening.number(batch.namespace)
            try:
                read, used = self._read(opening, mover, batch, number, deadline)
                if used:
                    opening.uses.note(number, [*prefix, *batch.keys[:used]])
            finally:
                self._keep_house(opening)
            return read

    def _read(
        self,
        opening: SlabOpening,
        mover: RecordMover,
        batch: Batch,
        number: int,
        deadline: float,
    ) -> tuple[Flags, int]:
        """Which pages were read, and how many were tried."""
        places = opening.index.locate(number, batch.keys)
        read = np.zeros(len(batch.keys), np.bool_)
        run = next((i for i, k in enumerate(batch.keys) if k not in places), len(batch.keys))
        if run == 0:
            return read, 0
        found = [places[key] for key in batch.keys[:run]]
        segments = np.array([place.segment for place in found], np.int64)
        positions = np.array([place.slot for place in found], np.int64)
        generations = np.array([place.generation for place in found], np.uint64)
        with opening.segments.extents(segments, positions) as (extents, usable):
            rows = usable[usable == np.arange(len(usable))]  # the leading run of these
            part = batch.take(rows)
            outcomes = mover.read(
                part,
                extents,
                generations[rows],
                deadline=deadline,
                on_late=lambda late: opening.segments.keep_open(segments[late]),
            )
        tried = len(rows) or not opening.segments.is_missing(int(segments[0]))
        if tried and (outcomes == Outcome.FAILED).all() and time.monotonic() < deadline:
            raise StoreError(f"{run} pages in {self._root.first} cannot be read")
        if not mover.checks_payload:
            outcomes = self._still_there(opening, number, part.keys, found, outcomes)
        self._forget_bad(opening, number, part.keys, found, outcomes, deadline)
        read[rows] = outcomes == Outcome.GOOD
        return read, len(part.keys)

    def _still_there(
        self,
        opening: SlabOpening,
        number: int,
        keys: Sequence[bytes],
        found: Sequence[Located],
        outcomes: Outcomes,
    ) -> Outcomes:
        """Without a payload checksum, a slot that was reused while it was read is noticed here:
        its page left the index before the first byte of the new one was written."""
        now = opening.index.locate(number, keys)
        same = np.array([now.get(key) == found[i] for i, key in enumerate(keys)], np.bool_)
        return np.where(same, outcomes, np.int8(Outcome.FAILED))

    def _forget_bad(
        self,
        opening: SlabOpening,
        number: int,
        keys: Sequence[bytes],
        found: Sequence[Located],
        outcomes: Outcomes,
        deadline: float,
    ) -> None:
        bad = outcomes == Outcome.FOREIGN
        # A read that fails beside others that do not fails for its place; unless time was up.
        if (outcomes == Outcome.GOOD).any() and time.monotonic() < deadline:
            bad |= outcomes == Outcome.FAILED
        if not bad.any():
            return
        try:
            gone = opening.index.forget(number, [(keys[i], found[i]) for i in np.flatnonzero(bad)])
        except StoreError as error:
            logger.warning("damaged pages are not forgotten: %s", error)
            return
        if gone:
            logger.warning("forgot %d pages whose records are damaged", gone)

    # -- use ----------------------------------------------------------------------------------

    def _keep_house(self, opening: SlabOpening) -> None:
        """What is done behind some of the calls. It does not wait, and does not fail them."""
        now = time.monotonic()
        try:
            for segment in opening.segments.take_missing():
                if opening.space.drop(segment, now):
                    path = segment.path(self._root.directories)
                    logger.warning("%s is gone; its pages are forgotten", path)
            if now < self._next_housekeeping and len(opening.uses) < _TOUCHES:
                return
            self._next_housekeeping = now + _HOUSEKEEPING_S
            there = {segment.id for segment in opening.index.segments()}
            opening.segments.drop(opening.segments.known() - there)  # dropped by other processes
            opening.uses.flush(opening.index, now)
        except StoreError as error:
            logger.info("put off: %s", error)

    def use(self) -> StoreUse:
        """How full the store is."""
        with self._using() as opening:
            allocated, pages, evicted = opening.index.totals()
        return StoreUse(self.capacity_bytes, allocated, pages, evicted)

    def verify(self, namespace: bytes | None = None) -> Iterator[CheckedPage]:
        """Read and check every page with ordinary reads; damaged ones are forgotten."""
        with self._using() as opening:
            for use in opening.index.namespace_uses():
                if namespace in (None, use.namespace.digest):
                    yield from verify_namespace(opening.index, self._root.directories, use)

    def close(self) -> None:
        """Write down what is only in memory, release files. Idempotent.

        While a late write is still under way, this process goes on being known as a writer, so that
        nobody gets the slot.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            opening = self._opening
        if opening is None:
            return
        try:
            opening.uses.flush(opening.index)
        except StoreError as error:
            logger.warning("last uses of pages were not written: %s", error)
        opening.close()
