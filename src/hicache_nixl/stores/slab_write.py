"""One put of a slab store: claim slots, write records, publish what was written."""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hicache_nixl import record
from hicache_nixl.batch import Batch, OnLate, Outcome, Outcomes, WriteStamp
from hicache_nixl.errors import StoreError
from hicache_nixl.mover import RecordMover
from hicache_nixl.stores.base import Flags
from hicache_nixl.stores.slab_opening import SlabOpening
from hicache_nixl.stores.slab_sql import Claim, NewPage

logger = logging.getLogger(__name__)

_Rows = npt.NDArray[np.int64]


class SlabWrite:
    """Pages that are not stored, on their way into slots.

    Args:
        number: of their namespace in the index.
        depths: how many pages lie before each in its prefix.
    """

    def __init__(
        self,
        opening: SlabOpening,
        mover: RecordMover,
        batch: Batch,
        number: int,
        depths: _Rows,
        deadline: float,
    ) -> None:
        self._opening = opening
        self._mover = mover
        self._batch = batch
        self._number = number
        self._depths = depths
        self._deadline = deadline
        self._late: set[int] = set()

    def run(self, in_use: Sequence[bytes]) -> Flags:
        """True for each page that is stored now; the pages `in_use` are not evicted.

        Raises StoreError if the index cannot be used, or where no page could be written, be it for
        lack of a file that can be made or because all writes failed.
        """
        claim = self._opening.space.claim(
            len(self._batch.keys),
            record.record_bytes(self._batch.geometry.payload_bytes),
            touches=self._opening.uses.take(),
            namespace=self._number,
            in_use=in_use,
            deadline=self._deadline,
        )
        self._opening.uses.saw(claim.generation)
        outcomes = np.full(len(self._batch.keys), Outcome.FAILED, np.int8)
        try:
            if claim.slots:
                self._write(claim, outcomes)
        finally:  # what was not reported late has ended, even if the mover raised something
            written = self._publish(claim, outcomes)
        if not written.any() and time.monotonic() < self._deadline:
            self._refuse(claim, outcomes)
        return written

    def _write(self, claim: Claim, outcomes: Outcomes) -> None:
        segments, positions = np.array(claim.slots, np.int64).T
        with self._opening.segments.extents(segments, positions) as (extents, rows):
            outcomes[rows] = self._mover.write(
                self._batch.take(rows),
                extents,
                WriteStamp(claim.generation, self._opening.root.writer, self._depths[rows]),
                deadline=self._deadline,
                on_late=self._holding_slots(claim, segments, rows),
            )

    def _publish(self, claim: Claim, outcomes: Outcomes) -> Flags:
        slots, keys = claim.slots, self._batch.keys
        good = np.flatnonzero(outcomes == Outcome.GOOD).tolist()
        bad = []
        if good and time.monotonic() < self._deadline:  # then storage works; those slots do not
            failed = np.flatnonzero(outcomes[: len(slots)] == Outcome.FAILED).tolist()
            missing = self._opening.segments.is_missing
            bad = [slots[i] for i in failed if not missing(slots[i][0])]
            if bad:
                logger.warning("%d slots cannot be written and are left out", len(bad))
        not_stored = self._opening.space.publish(
            claim,
            self._number,
            [NewPage(keys[i], slots[i], int(self._depths[i])) for i in good],
            late=[slots[i] for i in self._late],
            bad=bad,
        )
        written = np.zeros(len(keys), np.bool_)
        written[[i for i in good if keys[i] not in not_stored]] = True
        return written

    def _refuse(self, claim: Claim, outcomes: Outcomes) -> None:
        """Raise StoreError if it was for trouble that nothing was written."""
        if not claim.slots:
            if (trouble := self._opening.space.growth_trouble) is not None:
                raise StoreError(f"the store cannot grow: {trouble}")
            return
        missing = self._opening.segments.is_missing
        tried = outcomes[: len(claim.slots)]
        if (tried == Outcome.FAILED).all() and not all(missing(s) for s, _ in claim.slots):
            raise StoreError(f"{len(tried)} pages in {self._opening.root.first} cannot be written")

    def _holding_slots(self, claim: Claim, segments: _Rows, written: _Rows) -> OnLate:
        """Keeps the slots of a late write from other uses until it has ended."""

        def on_late(rows: _Rows) -> Callable[[], None]:
            rows = written[rows]
            files_free = self._opening.segments.keep_open(segments[rows])
            done = self._opening.hold()
            self._late.update(int(row) for row in rows)

            def on_end() -> None:
                files_free()
                try:
                    self._opening.space.give_back(claim, [claim.slots[row] for row in rows])
                finally:
                    done()

            return on_end

        return on_late
