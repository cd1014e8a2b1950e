"""Moves page records between host pages and extents, part by part, checksums beside the transfers.

    write:  fill -> checksum -> trailer -> post ┐ while earlier parts are in flight
    read:   post ┐ while earlier parts are checked -> scatter

Each page has a result of its own: when a transfer fails, its pages are tried again one by one.
This module knows records and transfers. It does not know what an extent belongs to.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_nixl import record
from hicache_nixl.batch import Batch, Extents, OnLate, Outcome, Outcomes, WriteStamp
from hicache_nixl.errors import DeadlineExceededError, TransferError
from hicache_nixl.geometry import PoolGeometry
from hicache_nixl.placement import Placement
from hicache_nixl.staging import Lease, StagingArena
from hicache_nixl.transfer import Operation, Transfer, TransferEngine

logger = logging.getLogger(__name__)

PART_BYTES = 8 * 1024 * 1024
PARTS_IN_FLIGHT = 3
MIN_PARTS = 4

_Rows = npt.NDArray[np.int64]


@dataclass
class MoverCounters:
    """Since start; bytes are payload bytes of good pages."""

    written_bytes: int = 0
    read_bytes: int = 0
    retried_pages: int = 0
    failed_pages: int = 0
    foreign_pages: int = 0
    late_transfers: int = 0
    overdue_reads: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Raise the named counters. Safe for threads."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class RecordMover:
    """Writes and reads records. Safe for threads; blocks for at most the deadline of a call.

    One exception: a read in place that is late is waited for, because the kernel writes into host
    pages that would be reused. It is counted in `overdue_reads` and logged.

    Args:
        reader, writer: engines with which `staging`, and the memory of pools that move in place,
            are registered.
        direct_io: the files of all extents are open with O_DIRECT.
        checks_payload: a read compares the checksum of the payload, not only the trailer.
    """

    def __init__(
        self,
        *,
        reader: TransferEngine,
        writer: TransferEngine,
        staging: StagingArena,
        direct_io: bool,
        checks_payload: bool,
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.staging = staging
        self.checks_payload = checks_payload
        self.counters = MoverCounters()
        self._direct_io = direct_io

    def placement(self, geometry: PoolGeometry) -> Placement:
        """How pages of this pool move."""
        return Placement(geometry, direct_io=self._direct_io)

    def write(
        self,
        batch: Batch,
        extents: Extents,
        stamp: WriteStamp,
        *,
        deadline: float,
        on_late: OnLate,
    ) -> Outcomes:
        """Write every page to its extent; one outcome per page."""
        outcomes = _WriteCall(self, batch, extents, deadline, on_late, stamp).run()
        good = int((outcomes == Outcome.GOOD).sum())
        self.counters.add(
            written_bytes=good * batch.geometry.payload_bytes, failed_pages=len(outcomes) - good
        )
        return outcomes

    def read(
        self,
        batch: Batch,
        extents: Extents,
        generations: npt.NDArray[np.uint64] | None,
        *,
        deadline: float,
        on_late: OnLate,
    ) -> Outcomes:
        """Read every page from its extent into its host page, checked; one outcome per page.

        With `generations` None, a record may be of any generation.
        Host pages whose outcome is not GOOD hold undefined bytes, but are not touched after this
        returns.
        """
        outcomes = _ReadCall(self, batch, extents, deadline, on_late, generations).run()
        self.counters.add(
            read_bytes=int((outcomes == Outcome.GOOD).sum()) * batch.geometry.payload_bytes,
            foreign_pages=int((outcomes == Outcome.FOREIGN).sum()),
            failed_pages=int((outcomes == Outcome.FAILED).sum()),
        )
        return outcomes


@dataclass
class _Part:
    rows: _Rows
    lease: Lease
    transfer: Transfer | None = None
    error: TransferError | None = None


class _Call(ABC):
    """One batch on its way: parts in flight, and an outcome for each page in the end."""

    operation: Operation
    late: Outcome
    """What pages are whose transfer is late."""

    def __init__(
        self,
        mover: RecordMover,
        batch: Batch,
        extents: Extents,
        deadline: float,
        on_late: OnLate,
    ) -> None:
        self.mover = mover
        self.batch = batch
        self.placement = mover.placement(batch.geometry)
        self.extents = extents
        self.deadline = deadline
        self.on_late = on_late
        self.outcomes = np.full(len(batch.keys), Outcome.FAILED, np.int8)
        self._engine = mover.writer if self.operation == "WRITE" else mover.reader
        self._in_flight: deque[_Part] = deque()

    @abstractmethod
    def prepare(self, part: _Part) -> None:
        """What must be done before a part can be posted."""

    @abstractmethod
    def judge(self, part: _Part) -> Outcomes | Outcome:
        """The outcomes of the pages of a part whose transfer ended well."""

    def run(self) -> Outcomes:
        try:
            for rows in self._parts():
                lease = self._lease(len(rows))
                if lease is None:
                    break
                self._in_flight.append(self._start(rows, lease))
                if len(self._in_flight) >= PARTS_IN_FLIGHT:
                    self._finish_oldest()
            while self._in_flight:
                self._finish_oldest()
        finally:
            for part in self._in_flight:  # some, if something unexpected was raised
                if self._ended(part) is not None:
                    part.lease.release()
        return self.outcomes

    def wait(self, transfer: Transfer) -> None:
        """As `Transfer.wait`; a transfer that is late may be left in flight."""
        transfer.wait(self.deadline)

    def keys(self, rows: _Rows) -> list[bytes]:
        return [self.batch.keys[i] for i in rows]

    def _parts(self) -> Iterator[_Rows]:
        """Rows of each part: small enough that checksums overlap with transfers and that staging
        serves several calls at once."""
        n = len(self.batch.keys)
        by_bytes = PART_BYTES // self.placement.record_bytes
        by_staging = self.mover.staging.nbytes // 2 // self.placement.staging_bytes
        size = max(1, min(by_bytes, by_staging, -(-n // MIN_PARTS)))
        for start in range(0, n, size):
            yield np.arange(start, min(start + size, n))

    def _lease(self, pages: int) -> Lease | None:
        """Staging for a part. A call that holds some ends its own parts before it waits for others,
        so that calls cannot wait for each other in a circle."""
        nbytes = pages * self.placement.staging_bytes
        while (left := self.deadline - time.monotonic()) > 0:
            lease = self.mover.staging.lease(nbytes, timeout=0 if self._in_flight else left)
            if lease is not None or not self._in_flight:
                return lease
            self._finish_oldest()
        return None

    def _start(self, rows: _Rows, lease: Lease) -> _Part:
        part = _Part(rows, lease)
        try:
            self.prepare(part)
            memory, file = self.placement.descriptors(self.batch, rows, lease, self.extents)
            part.transfer = self._engine.post(self.operation, memory, file)
        except TransferError as error:
            part.error = error
        except BaseException:
            lease.release()
            raise
        return part

    def _finish_oldest(self) -> None:
        part = self._in_flight.popleft()
        self.outcomes[part.rows] = self._end(part)
        if part.error is not None:
            self._retry(part)

    def _end(self, part: _Part) -> Outcomes | Outcome:
        """Wait for a part; its lease is given back, now or when a late transfer has ended."""
        ended = self._ended(part)
        if ended is None:
            return self.late
        with part.lease:
            return self.judge(part) if ended else Outcome.FAILED

    def _ended(self, part: _Part) -> bool | None:
        """Whether the transfer of a part ended well; None if it is late and was abandoned."""
        if part.transfer is None:
            return False
        try:
            self.wait(part.transfer)
        except DeadlineExceededError:
            self._abandon(part, part.transfer)
            return None
        except TransferError as error:
            part.error = error
            return False
        return True

    def _abandon(self, part: _Part, transfer: Transfer) -> None:
        """Leave a late transfer to its engine; lease and extents are freed when it has ended."""
        self.mover.counters.add(late_transfers=1)
        extents_free = self.on_late(part.rows)

        def on_end() -> None:
            part.lease.release()
            extents_free()

        transfer.abandon(on_end)

    def _retry(self, part: _Part) -> None:
        """One bad extent fails a whole transfer: find out which it was."""
        logger.warning("%s (%d pages)", part.error, len(part.rows))
        if len(part.rows) == 1:
            return
        while self._in_flight:  # a call may wait for staging only while it holds none
            self._finish_oldest()
        for row in part.rows:
            lease = self._lease(1)
            if lease is None:
                return
            self.mover.counters.add(retried_pages=1)
            single = self._start(np.array([row]), lease)
            self.outcomes[single.rows] = self._end(single)


class _WriteCall(_Call):
    operation = "WRITE"
    late = Outcome.LATE

    def __init__(
        self,
        mover: RecordMover,
        batch: Batch,
        extents: Extents,
        deadline: float,
        on_late: OnLate,
        stamp: WriteStamp,
    ) -> None:
        super().__init__(mover, batch, extents, deadline, on_late)
        self.stamp = stamp

    def prepare(self, part: _Part) -> None:
        rows = part.rows
        numbers = self.batch.numbers[rows]
        self.placement.fill(part.lease, numbers)
        record.write_trailers(
            self.placement.trailers(part.lease, len(rows)),
            namespace=self.batch.namespace,
            keys=self.keys(rows),
            depths=self.stamp.depths[rows],
            payload_bytes=self.batch.geometry.payload_bytes,
            payload_hashes=list(self.placement.payload_hashes(part.lease, numbers)),
            generation=self.stamp.generation,
            written_ns=time.time_ns(),
            writer=self.stamp.writer,
        )

    def judge(self, part: _Part) -> Outcome:  # noqa: ARG002
        return Outcome.GOOD


class _ReadCall(_Call):
    operation = "READ"
    late = Outcome.FAILED

    def __init__(
        self,
        mover: RecordMover,
        batch: Batch,
        extents: Extents,
        deadline: float,
        on_late: OnLate,
        generations: npt.NDArray[np.uint64] | None,
    ) -> None:
        super().__init__(mover, batch, extents, deadline, on_late)
        self.generations = generations

    def prepare(self, part: _Part) -> None:
        pass

    def wait(self, transfer: Transfer) -> None:
        try:
            super().wait(transfer)
        except DeadlineExceededError as late:
            if not self.placement.in_place:
                raise
            self.mover.counters.add(overdue_reads=1)
            logger.warning("%s; waiting, because the kernel may still write into host pages", late)
            transfer.wait(float("inf"))

    def judge(self, part: _Part) -> Outcomes:
        numbers = self.batch.numbers[part.rows]
        n = len(numbers)
        trailers = self.placement.trailers(part.lease, n)
        good = record.check_trailers(
            trailers,
            namespace=self.batch.namespace,
            keys=self.keys(part.rows),
            payload_bytes=self.batch.geometry.payload_bytes,
            generations=None if self.generations is None else self.generations[part.rows],
        )
        if self.mover.checks_payload:
            found = self.placement.payload_hashes(part.lease, numbers)
            good &= np.fromiter(found, np.uint64, n) == record.stored_payload_hashes(trailers)
        if not self.placement.in_place and good.any():
            payloads = self.placement.payloads(part.lease, n)
            self.batch.geometry.scatter(numbers[good], payloads if good.all() else payloads[good])
        return np.where(good, np.int8(Outcome.GOOD), np.int8(Outcome.FOREIGN))
