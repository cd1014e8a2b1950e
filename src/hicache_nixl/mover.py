"""Moves page records between host pages and extents, part by part, checksums beside the transfers.

    write:  fill -> checksum -> trailer -> post ┐ while earlier parts are in flight
    read:   post ┐ while earlier parts are checked -> scatter

Each page has a result of its own: when a transfer fails, its pages are tried again one by one.
This module knows records and transfers. It does not know what an extent belongs to.
"""

import logging
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
        self._placements: dict[int, Placement] = {}

    def placement(self, geometry: PoolGeometry) -> Placement:
        """How pages of this pool move."""
        found = self._placements.get(id(geometry))
        if found is None or found.geometry is not geometry:
            found = Placement(geometry, direct_io=self._direct_io)
            self._placements[id(geometry)] = found
        return found

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
        self.counters.written_bytes += good * batch.geometry.payload_bytes
        self.counters.failed_pages += len(outcomes) - good
        return outcomes

    def read(
        self,
        batch: Batch,
        extents: Extents,
        generations: npt.NDArray[np.uint64],
        *,
        deadline: float,
        on_late: OnLate,
    ) -> Outcomes:
        """Read every page from its extent into its host page, checked; one outcome per page.

        Host pages whose outcome is not GOOD hold undefined bytes, but are not touched after this
        returns.
        """
        outcomes = _ReadCall(self, batch, extents, deadline, on_late, generations).run()
        good = int((outcomes == Outcome.GOOD).sum())
        self.counters.read_bytes += good * batch.geometry.payload_bytes
        self.counters.foreign_pages += int((outcomes == Outcome.FOREIGN).sum())
        self.counters.failed_pages += int((outcomes == Outcome.FAILED).sum())
        return outcomes


@dataclass
class _Part:
    rows: _Rows
    lease: Lease
    transfer: Transfer | None = None
    error: TransferError | None = None


class _Call(ABC):
    """One batch on its way: parts in flight, and an outcome for each page in the end."""

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
        self._in_flight: deque[_Part] = deque()

    @abstractmethod
    def start(self, part: _Part) -> None:
        """Post the transfer of a part."""

    @abstractmethod
    def finish(self, part: _Part) -> Outcomes | Outcome:
        """Wait for a part; the outcomes of its pages. The lease is given back or abandoned."""

    def run(self) -> Outcomes:
        for rows in self._parts():
            lease = self._lease(len(rows))
            if lease is None:
                break
            part = _Part(rows, lease)
            self.start(part)
            self._in_flight.append(part)
            if len(self._in_flight) >= PARTS_IN_FLIGHT:
                self._finish_oldest()
        while self._in_flight:
            self._finish_oldest()
        return self.outcomes

    def post(self, engine: TransferEngine, operation: Operation, part: _Part) -> None:
        memory, file = self.placement.descriptors(self.batch, part.rows, part.lease, self.extents)
        try:
            part.transfer = engine.post(operation, memory, file)
        except TransferError as error:
            part.error = error

    def wait(self, part: _Part, deadline: float) -> bool:
        """Whether the transfer of a part ended well. Raises DeadlineExceededError if it is late."""
        if part.transfer is None:
            return False
        try:
            part.transfer.wait(deadline)
        except DeadlineExceededError:
            raise
        except TransferError as error:
            part.error = error
            return False
        return True

    def abandon(self, part: _Part) -> None:
        """Leave a late transfer to its engine; lease and extents are freed when it has ended."""
        if part.transfer is None:
            return
        self.mover.counters.late_transfers += 1
        extents_free = self.on_late(part.rows)

        def on_end() -> None:
            part.lease.release()
            extents_free()

        part.transfer.abandon(on_end)

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

    def _finish_oldest(self) -> None:
        part = self._in_flight.popleft()
        self.outcomes[part.rows] = self.finish(part)
        if part.error is not None:
            self._retry(part)

    def _retry(self, part: _Part) -> None:
        """One bad extent fails a whole transfer: find out which it was."""
        logger.warning("%s (%d pages)", part.error, len(part.rows))
        if len(part.rows) == 1:
            return
        while self._in_flight:  # a call may wait for staging only while it holds none
            self._finish_oldest()
        for row in part.rows:
            left = self.deadline - time.monotonic()
            if left <= 0:
                return
            lease = self.mover.staging.lease(self.placement.staging_bytes, timeout=left)
            if lease is None:
                return
            self.mover.counters.retried_pages += 1
            single = _Part(np.array([row]), lease)
            self.start(single)
            self.outcomes[single.rows] = self.finish(single)


class _WriteCall(_Call):
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

    def start(self, part: _Part) -> None:
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
        self.post(self.mover.writer, "WRITE", part)

    def finish(self, part: _Part) -> Outcomes | Outcome:
        try:
            ended = self.wait(part, self.deadline)
        except DeadlineExceededError:
            self.abandon(part)
            return Outcome.LATE
        part.lease.release()
        return Outcome.GOOD if ended else Outcome.FAILED


class _ReadCall(_Call):
    def __init__(
        self,
        mover: RecordMover,
        batch: Batch,
        extents: Extents,
        deadline: float,
        on_late: OnLate,
        generations: npt.NDArray[np.uint64],
    ) -> None:
        super().__init__(mover, batch, extents, deadline, on_late)
        self.generations = generations

    def start(self, part: _Part) -> None:
        self.post(self.mover.reader, "READ", part)

    def finish(self, part: _Part) -> Outcomes | Outcome:
        try:
            ended = self.wait(part, self.deadline)
        except DeadlineExceededError:
            if not self.placement.in_place:
                self.abandon(part)
                return Outcome.FAILED
            self.mover.counters.overdue_reads += 1
            logger.warning(
                "a read of %d pages into host memory is past its deadline; waiting, because the "
                "kernel may still write there",
                len(part.rows),
            )
            ended = self.wait(part, float("inf"))
        with part.lease:
            return self._check(part) if ended else Outcome.FAILED

    def _check(self, part: _Part) -> Outcomes:
        numbers = self.batch.numbers[part.rows]
        n = len(numbers)
        trailers = self.placement.trailers(part.lease, n)
        good = record.check_trailers(
            trailers,
            namespace=self.batch.namespace,
            keys=self.keys(part.rows),
            payload_bytes=self.batch.geometry.payload_bytes,
            generations=self.generations[part.rows],
        )
        if self.mover.checks_payload:
            found = self.placement.payload_hashes(part.lease, numbers)
            good &= np.fromiter(found, np.uint64, n) == record.stored_payload_hashes(trailers)
        if not self.placement.in_place and good.any():
            payloads = self.placement.payloads(part.lease, n)
            self.batch.geometry.scatter(numbers[good], payloads if good.all() else payloads[good])
        return np.where(good, np.int8(Outcome.GOOD), np.int8(Outcome.FOREIGN))
