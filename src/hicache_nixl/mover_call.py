"""One batch on its way between host pages and the medium: parts in flight, an outcome a page.

Owns the order of things within a call, and two promises: staging is used again only when no
transfer touches it any more, and host pages are touched only while they are on loan. It knows
records and transfers; what is done with the outcomes, it does not.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hicache_nixl import record
from hicache_nixl.batch import Batch, Extents, ObjectNames, OnLate, Outcome, Outcomes, WriteStamp
from hicache_nixl.errors import DeadlineExceededError, TransferError
from hicache_nixl.object_engine import ObjectEngine, ObjectTransfer
from hicache_nixl.pace import Pace
from hicache_nixl.placement import Placement
from hicache_nixl.staging import Lease, StagingArena
from hicache_nixl.transfer import Operation, Transfer, TransferEngine

logger = logging.getLogger(__name__)

PART_BYTES = 8 * 1024 * 1024
PARTS_IN_FLIGHT = 3
MIN_PARTS = 4
QUEUED_REQUESTS = 2
"""Objects in flight per request that the plug-in has in flight, so that its threads never wait."""

_Rows = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


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


@dataclass
class _Part:
    rows: _Rows
    lease: Lease
    transfer: Transfer | ObjectTransfer | None = None
    error: TransferError | None = None
    holds: ExitStack = field(default_factory=ExitStack)
    """The loan of the host pages, while they are read in place."""


@dataclass
class _Call(ABC):
    engine: TransferEngine | ObjectEngine
    staging: StagingArena
    counters: MoverCounters
    pace: Pace
    placement: Placement
    batch: Batch
    where: Extents | ObjectNames
    deadline: float
    on_late: OnLate

    operation: ClassVar[Operation]
    late: ClassVar[Outcome]
    """What pages are whose transfer is late."""

    def __post_init__(self) -> None:
        self._outcomes = np.full(len(self.batch.keys), Outcome.FAILED, np.int8)
        self._in_flight: deque[_Part] = deque()
        self._stopped = False

    @abstractmethod
    def prepare(self, part: _Part) -> bool:
        """What must be done before a part can be posted; False if its pages are not on loan."""

    @abstractmethod
    def judge(self, part: _Part, moved: _Flags) -> Outcomes:
        """The outcomes of the pages of a part, of which `moved` were moved."""

    def run(self) -> Outcomes:
        """Move the batch; one outcome a page. Once."""
        size, most_in_flight = self._cut()
        n = len(self.batch.keys)
        try:
            for start in range(0, n, size):
                rows = np.arange(start, min(start + size, n))
                lease = self._lease(len(rows))
                if lease is None:
                    break
                self._in_flight.append(self._start(rows, lease))
                if len(self._in_flight) >= most_in_flight:
                    self._finish_oldest()
            while self._in_flight:
                self._finish_oldest()
        finally:
            for part in self._in_flight:  # some, if something unexpected was raised
                self._let_go(part, self._wait(part)[1])
        return self._outcomes

    def wait_for(self, transfer: Transfer | ObjectTransfer) -> None:
        """As its `wait`; a transfer that is late may be left in flight."""
        transfer.wait(self.deadline)

    def keys(self, rows: _Rows) -> list[bytes]:
        return [self.batch.keys[i] for i in rows]

    def _cut(self) -> tuple[int, int]:
        """Pages in a part: so few that checksums overlap with transfers and that staging serves
        several calls at once. And parts in flight: so many that the engine is never idle."""
        staging = self.staging.nbytes - self.staging.quarantined_bytes
        by_bytes = PART_BYTES // self.placement.record_bytes
        by_staging = staging // 2 // self.placement.staging_bytes
        size = max(1, min(by_bytes, by_staging, -(-len(self.batch.keys) // MIN_PARTS)))
        requests = self.engine.requests if isinstance(self.engine, ObjectEngine) else 0
        return size, max(PARTS_IN_FLIGHT, -(-requests * QUEUED_REQUESTS // size))

    def _lease(self, pages: int) -> Lease | None:
        """Staging for a part; None if there will be none. A call that holds some ends its own parts
        before it waits for others, so that calls cannot wait for each other in a circle."""
        nbytes = pages * self.placement.staging_bytes
        while not self._is_over() and (left := self.deadline - time.monotonic()) > 0:
            lease = self.staging.lease(nbytes, timeout=0 if self._in_flight else left)
            if lease is not None or not self._in_flight:
                return lease
            self._finish_oldest()
        return None

    def _is_over(self) -> bool:
        return self._stopped or self.batch.loan.is_over

    def _start(self, rows: _Rows, lease: Lease) -> _Part:
        part = _Part(rows, lease)
        try:
            if self.prepare(part):
                part.transfer = self._post(part)
        except TransferError as error:
            part.error = error
        except BaseException:
            self._let_go(part, np.zeros(len(rows), np.bool_))
            raise
        return part

    def _post(self, part: _Part) -> Transfer | ObjectTransfer:
        where = self.where
        if isinstance(where, ObjectNames) and isinstance(self.engine, ObjectEngine):
            records = self.placement.staged_records(part.lease, len(part.rows))
            names = [where.names[i] for i in part.rows]
            return self.engine.post(self.operation, records, names)
        if isinstance(where, Extents) and isinstance(self.engine, TransferEngine):
            memory, file = self.placement.descriptors(self.batch, part.rows, part.lease, where)
            return self.engine.post(self.operation, memory, file)
        raise TypeError(f"{type(self.engine).__name__} cannot move {type(where).__name__}")

    def _finish_oldest(self) -> None:
        part = self._in_flight.popleft()
        self._end(part)
        if part.error is None or isinstance(part.error, DeadlineExceededError):
            return
        if isinstance(self.where, Extents):
            self._tell(part.error, len(part.rows))
            self._retry(part)
        elif self.operation == "WRITE":
            self._tell(part.error, len(part.rows))
        else:  # most often one is not there
            logger.debug("%s (%d pages)", part.error, len(part.rows))

    def _tell(self, error: TransferError, pages: int) -> None:
        if self.pace.allows():
            logger.warning("%s (%d pages)", error, pages)

    def _end(self, part: _Part) -> None:
        """Wait for a part, and note what became of its pages."""
        moved, late = self._wait(part)
        try:
            if moved.any():
                self._outcomes[part.rows] = self.judge(part, moved)
            self._outcomes[part.rows[late]] = self.late
        finally:
            self._let_go(part, late)
        # Pages behind one that is not there are of no use, and requests cost money.
        objects_read = self.operation == "READ" and isinstance(self.where, ObjectNames)
        self._stopped |= objects_read and bool((self._outcomes[part.rows] != Outcome.GOOD).any())

    def _wait(self, part: _Part) -> tuple[_Flags, _Flags]:
        """Which pages of a part were moved, and which are late."""
        n = len(part.rows)
        if part.transfer is None:
            return np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        try:
            self.wait_for(part.transfer)
        except TransferError as error:
            part.error = error
        return np.broadcast_to(part.transfer.done, n), np.broadcast_to(part.transfer.late, n)

    def _let_go(self, part: _Part, late: _Flags) -> None:
        """Give back what a part holds: now, or when its late transfers have ended."""
        part.holds.close()
        if part.transfer is None or not late.any():
            part.lease.release()
            return
        self.counters.add(late_transfers=1)
        part.lease.quarantine()
        places_free = self.on_late(part.rows[late])

        def on_end() -> None:
            part.lease.release()
            places_free()

        part.transfer.abandon(on_end)

    def _retry(self, part: _Part) -> None:
        """One bad extent fails a whole transfer: find out which it was."""
        if len(part.rows) == 1:
            return
        while self._in_flight:  # a call may wait for staging only while it holds none
            self._finish_oldest()
        for row in part.rows:
            lease = self._lease(1)
            if lease is None:
                return
            self.counters.add(retried_pages=1)
            self._end(self._start(np.array([row]), lease))


@dataclass
class WriteCall(_Call):
    """Writes pages: through staging as they are when they are copied there, in place as they are
    when the transfer ends; if the loan of the latter is over by then, they may have changed and
    have failed."""

    stamp: WriteStamp

    operation = "WRITE"
    late = Outcome.LATE

    def prepare(self, part: _Part) -> bool:
        rows = part.rows
        numbers = self.batch.numbers[rows]
        with self.batch.loan.using() as may:
            if not may:
                return False
            self.placement.fill(part.lease, numbers)
            everything = np.arange(len(rows))
            hashes = list(self.placement.payload_hashes(part.lease, numbers, everything))
        record.write_trailers(
            self.placement.trailers(part.lease, len(rows)),
            namespace=self.batch.namespace,
            keys=self.keys(rows),
            depths=self.stamp.depths[rows],
            payload_bytes=self.batch.geometry.payload_bytes,
            payload_hashes=hashes,
            generation=self.stamp.generation,
            written_ns=time.time_ns(),
            writer=self.stamp.writer,
        )
        return True

    def judge(self, part: _Part, moved: _Flags) -> Outcomes:  # noqa: ARG002
        if self.placement.in_place and self.batch.loan.is_over:
            moved = np.zeros_like(moved)
        return np.where(moved, np.int8(Outcome.GOOD), np.int8(Outcome.FAILED))


@dataclass
class ReadCall(_Call):
    """Reads pages. In place the loan is held until the transfer has ended, also when it is late,
    because the kernel writes into host pages: this can exceed the deadline."""

    generations: npt.NDArray[np.uint64] | None
    checks_payload: bool

    operation = "READ"
    late = Outcome.FAILED

    def prepare(self, part: _Part) -> bool:
        if self.placement.in_place:
            return part.holds.enter_context(self.batch.loan.using())
        if isinstance(self.where, ObjectNames):  # of a short object, the end stays as it is
            self.placement.trailers(part.lease, len(part.rows))[:] = 0
        return True

    def wait_for(self, transfer: Transfer | ObjectTransfer) -> None:
        try:
            super().wait_for(transfer)
        except DeadlineExceededError as late:
            if not self.placement.in_place:
                raise
            self.counters.add(overdue_reads=1)
            logger.warning("%s; waiting, because the kernel may still write into host pages", late)
            transfer.wait(float("inf"))

    def judge(self, part: _Part, moved: _Flags) -> Outcomes:
        numbers = self.batch.numbers[part.rows]
        n = len(numbers)
        trailers = self.placement.trailers(part.lease, n)
        good = moved & record.check_trailers(
            trailers,
            namespace=self.batch.namespace,
            keys=self.keys(part.rows),
            payload_bytes=self.batch.geometry.payload_bytes,
            generations=None if self.generations is None else self.generations[part.rows],
        )
        foreign = np.where(moved, np.int8(Outcome.FOREIGN), np.int8(Outcome.FAILED))
        with self.batch.loan.using() as may:
            if not may:
                return np.full(n, Outcome.FAILED, np.int8)
            if self.checks_payload:
                which = np.flatnonzero(good)
                found = self.placement.payload_hashes(part.lease, numbers, which)
                stored = record.stored_payload_hashes(trailers)[which]
                good[which] = np.fromiter(found, np.uint64, len(which)) == stored
            if not self.placement.in_place and good.any():
                payloads = self.placement.payloads(part.lease, n)
                self.batch.geometry.scatter(
                    numbers[good], payloads if good.all() else payloads[good]
                )
        return np.where(good, np.int8(Outcome.GOOD), foreign)
