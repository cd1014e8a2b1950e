"""Pages of a files store on their way: made or opened, moved, put in place or let go.

What is here moves as many pages at once as descriptors were taken for. Which pages, and whether
there is room for them, `files.py` says.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hicache_nixl.batch import Batch, Outcome, Outcomes, WriteStamp
from hicache_nixl.mover import RecordMover
from hicache_nixl.stores.base import Flags
from hicache_nixl.stores.files_clock import FileClock
from hicache_nixl.stores.files_crew import Crew
from hicache_nixl.stores.files_handles import Handles
from hicache_nixl.stores.files_layout import Owner
from hicache_nixl.stores.files_pages import Descriptors, Draft, OpenPage, PageFiles
from hicache_nixl.stores.files_uses import stamp
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)

_Rows = npt.NDArray[np.int64]


class PageMoves:
    """Writes and reads some pages at once. Safe for threads.

    Args:
        reader, writer: the engines that will be moving records (None where no NIXL is used).
        begin, end: called with the number of late transfers' pages that begin or end to need the
            store.
    """

    def __init__(
        self,
        crew: Crew,
        descriptors: Descriptors,
        owner: Owner,
        clock: FileClock,
        *,
        reader: TransferEngine | None,
        writer: TransferEngine | None,
        begin: Callable[[int], object],
        end: Callable[[int], object],
    ) -> None:
        self._crew = crew
        self._descriptors = descriptors
        self._writer_name = owner.instance.encode().ljust(16, b"\0")
        self._clock = clock
        self._reader = reader
        self._writer = writer
        self._begin = begin
        self._end = end

    def write(
        self,
        files: PageFiles,
        mover: RecordMover,
        batch: Batch,
        depths: _Rows,
        used_ns: int,
        deadline: float,
    ) -> Flags:
        """Write some pages, last used at `used_ns`; a descriptor was taken for each."""
        written = np.zeros(len(batch.keys), np.bool_)
        drafts = self._crew.map(files.drafts(), batch.keys, deadline=deadline, discard=files.drop)
        made = [i for i, draft in enumerate(drafts) if draft is not None]
        self._descriptors.give(len(drafts) - len(made))

        def drop(draft: Draft) -> None:
            try:
                files.drop(draft)
            finally:
                self._descriptors.give(1)

        handles = Handles(
            [d for d in drafts if d is not None], self._writer, files.record_bytes, drop
        )
        if not handles.pages:
            return written
        rows = np.array(made)[handles.rows]
        outcomes = np.full(len(rows), Outcome.FAILED, np.int8)
        try:
            outcomes = mover.write(
                batch.take(rows),
                handles.extents(),
                WriteStamp(self._clock.now_ns(), self._writer_name, depths[rows]),
                deadline=deadline,
                on_late=handles.on_late(self._begin, self._end),
            )
        finally:

            def finish(row: int) -> bool | None:
                draft = handles.pages[row]
                if outcomes[row] != Outcome.GOOD:
                    drop(draft)
                    return None
                try:
                    return files.publish(draft, stamp(used_ns, int(depths[rows[row]])))
                finally:
                    self._descriptors.give(1)

            ended = handles.ended()
            put = self._crew.map(finish, ended, deadline=deadline, all_the_same=True)
        written[rows[[row for row, done in zip(ended, put, strict=True) if done]]] = True
        return written

    # -- reading ----------------------------------------------------------------------------------

    def read(
        self, files: PageFiles, mover: RecordMover, batch: Batch, deadline: float
    ) -> tuple[Flags, _Rows]:
        """Read some pages; a descriptor was taken for each. Which are right, and their times."""
        read = np.zeros(len(batch.keys), np.bool_)
        times = np.zeros(len(batch.keys), np.int64)
        opened = self._crew.map(
            files.open, batch.keys, deadline=deadline, leading=True, discard=_close
        )
        there = [page for page in opened if page is not None]
        self._descriptors.give(len(opened) - len(there))

        def close(page: OpenPage) -> None:
            _close(page)
            self._descriptors.give(1)

        handles = Handles(there, self._reader, files.record_bytes, close)
        rows = handles.rows
        if not len(rows):
            return read, times
        outcomes = np.full(len(rows), Outcome.FAILED, np.int8)
        try:
            outcomes = mover.read(
                batch.take(rows),
                handles.extents(),
                None,
                deadline=deadline,
                on_late=handles.on_late(self._begin, self._end),
            )
        finally:
            ended = handles.ended()
            self._remove_bad(files, handles.pages, ended, outcomes, deadline)
            for row in ended:
                close(handles.pages[row])
        read[rows] = outcomes == Outcome.GOOD
        times[rows] = [page.facts.st_mtime_ns for page in handles.pages]
        return read, times

    def _remove_bad(
        self,
        files: PageFiles,
        pages: Sequence[OpenPage],
        ended: Sequence[int],
        outcomes: Outcomes,
        deadline: float,
    ) -> None:
        """Remove damaged pages, so that they are a miss next time."""
        bad = outcomes == Outcome.FOREIGN
        # A read that fails beside others that do not fails for its file; unless time was up.
        if (outcomes == Outcome.GOOD).any() and time.monotonic() < deadline:
            bad |= outcomes == Outcome.FAILED
        damaged = [pages[row] for row in ended if bad[row]]
        gone = self._crew.map(files.remove, damaged, deadline=deadline)
        if any(gone):
            logger.warning("removed %d pages whose records are damaged", sum(map(bool, gone)))


def _close(page: OpenPage) -> None:
    os.close(page.descriptor)
