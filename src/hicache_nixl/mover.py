"""Moves page records between host pages and the medium, part by part, checksums beside the
transfers.

    write:  fill -> checksum -> trailer -> post ┐ while earlier parts are in flight
    read:   post ┐ while earlier parts are checked -> scatter

Each page has a result of its own: an object has a transfer of its own, and when one of several
extents fails, its pages are tried again one by one. This module knows records and engines. It does
not know what an extent or object belongs to.
"""

import numpy as np
import numpy.typing as npt

from hicache_nixl.batch import Batch, Extents, ObjectNames, OnLate, Outcome, Outcomes, WriteStamp
from hicache_nixl.geometry import PoolGeometry
from hicache_nixl.mover_call import MoverCounters, ReadCall, WriteCall
from hicache_nixl.object_engine import ObjectEngine
from hicache_nixl.pace import Pace
from hicache_nixl.placement import Placement
from hicache_nixl.staging import StagingArena
from hicache_nixl.transfer import TransferEngine


class RecordMover:
    """Writes and reads records. Safe for threads; blocks for at most the deadline of a call.

    One exception: a read in place that is late is waited for, because the kernel writes into host
    pages that would be reused. It is counted in `overdue_reads` and logged. Apart from it, host
    pages are not touched once the loan of a batch is over.

    Args:
        reader, writer: engines of one kind, with which `staging`, and the memory of pools that move
            in place, are registered.
        direct_io: the files of all extents are open with O_DIRECT.
        checks_payload: a read compares the checksum of the payload, not only the trailer.
    """

    def __init__(
        self,
        *,
        reader: TransferEngine | ObjectEngine,
        writer: TransferEngine | ObjectEngine,
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
        self._pace = Pace()

    def placement(self, geometry: PoolGeometry) -> Placement:
        """How pages of this pool move."""
        return Placement(
            geometry, direct_io=self._direct_io, always_staged=self.reader.always_staged
        )

    def write(
        self,
        batch: Batch,
        where: Extents | ObjectNames,
        stamp: WriteStamp,
        *,
        deadline: float,
        on_late: OnLate,
    ) -> Outcomes:
        """Write every page to its extent or object; one outcome per page."""
        outcomes = WriteCall(
            self.writer,
            self.staging,
            self.counters,
            self._pace,
            self.placement(batch.geometry),
            batch,
            where,
            deadline,
            on_late,
            stamp,
        ).run()
        good = int((outcomes == Outcome.GOOD).sum())
        self.counters.add(
            written_bytes=good * batch.geometry.payload_bytes, failed_pages=len(outcomes) - good
        )
        return outcomes

    def read(
        self,
        batch: Batch,
        where: Extents | ObjectNames,
        generations: npt.NDArray[np.uint64] | None,
        *,
        deadline: float,
        on_late: OnLate,
    ) -> Outcomes:
        """Read every page from its extent or object into its host page, checked; one outcome per
        page.

        With `generations` None, a record may be of any generation.
        Host pages whose outcome is not GOOD hold undefined bytes, but are not touched after this
        returns. Of objects, those behind one that was not right may not be asked for.
        """
        outcomes = ReadCall(
            self.reader,
            self.staging,
            self.counters,
            self._pace,
            self.placement(batch.geometry),
            batch,
            where,
            deadline,
            on_late,
            generations,
            self.checks_payload,
        ).run()
        self.counters.add(
            read_bytes=int((outcomes == Outcome.GOOD).sum()) * batch.geometry.payload_bytes,
            foreign_pages=int((outcomes == Outcome.FOREIGN).sum()),
            failed_pages=int((outcomes == Outcome.FAILED).sum()),
        )
        return outcomes
