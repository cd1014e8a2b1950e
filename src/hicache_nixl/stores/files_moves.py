"""Pages of a files store on their way: made or opened, moved, put in place or let go.

A call is cut into parts of some files each, so that what the file system does and what the engine
does overlap, and few files are open. Which pages, and whether there is room for them, `files.py`
says.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_nixl.batch import Batch, Outcome, Outcomes, WriteStamp
from hicache_nixl.mover import RecordMover
from hicache_nixl.stores.base import Flags
from hicache_nixl.stores.files_clock import FileClock
from hicache_nixl.stores.files_crew import Crew, Job
from hicache_nixl.stores.files_handles import Handles
from hicache_nixl.stores.files_layout import Owner
from hicache_nixl.stores.files_pages import Descriptors, Draft, OpenPage, PageFiles
from hicache_nixl.stores.files_uses import stamp
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)

_LEAST_AT_ONCE = 32
_MOST_AT_ONCE = 128
_BYTES_AT_ONCE = 16 * 1024 * 1024

_Rows = npt.NDArray[np.int64]
Page = TypeVar("Page", Draft, OpenPage)


class FileMoves:
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

    # -- writing ----------------------------------------------------------------------------------

    def write(
        self,
        files: PageFiles,
        mover: RecordMover,
        batch: Batch,
        depths: _Rows,
        used_ns: int,
        deadline: float,
    ) -> Flags:
        """Write pages, last used at `used_ns`. While some are written, files are made for the next
        and those before are put in place."""
        written = np.zeros(len(batch.keys), np.bool_)
        ahead = _Ahead(
            self._crew,
            self._descriptors,
            files.drafts(),
            batch.keys,
            _files_at_once(files.record_bytes),
            leading=False,
            discard=files.drop,
        )
        placing: list[tuple[_Rows, Job[int, bool]]] = []
        try:
            for rows, drafts in ahead.parts(deadline):
                self._write_part(
                    files, mover, batch, depths, used_ns, rows, drafts, placing, deadline
                )
        finally:
            ahead.close()
            for rows, job in placing:
                written[rows] = [done is not None for done in job.results(deadline)]
        return written

    def _write_part(
        self,
        files: PageFiles,
        mover: RecordMover,
        batch: Batch,
        depths: _Rows,
        used_ns: int,
        rows: _Rows,
        drafts: Sequence[Draft],
        placing: list[tuple[_Rows, Job[int, bool]]],
        deadline: float,
    ) -> None:
        """Write the pages at `rows`; the job that puts them in place is added to `placing`."""

        def drop(draft: Draft) -> None:
            try:
                files.drop(draft)
            finally:
                self._descriptors.give(1)

        def finish(row: int) -> bool | None:
            if outcomes[row] != Outcome.GOOD:
                drop(handles.pages[row])
                return None
            try:
                return files.publish(handles.pages[row], stamp(used_ns, int(depths[rows[row]])))
            finally:
                self._descriptors.give(1)

        handles = Handles(drafts, self._writer, files.record_bytes, drop)
        rows = rows[handles.rows]
        if not len(rows):
            return
        outcomes = np.full(len(rows), Outcome.FAILED, np.int8)
        try:
            outcomes = mover.write(
                batch.take(rows),
                handles.extents(),
                WriteStamp(self._clock.now_ns(), self._writer_name, depths[rows]),
                deadline=deadline,
                on_late=handles.on_late(self._begin, self._end),
            )
            _note_if_all_failed(files, outcomes, deadline)
        finally:
            ended = handles.ended()
            placing.append((rows[ended], self._crew.start(finish, ended, all_the_same=True)))

    # -- reading ----------------------------------------------------------------------------------

    def read(
        self, files: PageFiles, mover: RecordMover, batch: Batch, deadline: float
    ) -> tuple[Flags, _Rows]:
        """Read the leading run of pages that are there. Which are right, and their times.

        While some are read, the next are opened.
        """
        read = np.zeros(len(batch.keys), np.bool_)
        times = np.zeros(len(batch.keys), np.int64)
        ahead = _Ahead(
            self._crew,
            self._descriptors,
            files.open,
            batch.keys,
            _files_at_once(files.record_bytes),
            leading=True,
            discard=_close,
        )
        try:
            for rows, pages in ahead.parts(deadline):
                good, mtimes = self._read_part(files, mover, batch.take(rows), pages, deadline)
                read[rows], times[rows] = good, mtimes
                if not good.all():
                    break
        finally:
            ahead.close()
        return read, times

    def _read_part(
        self,
        files: PageFiles,
        mover: RecordMover,
        batch: Batch,
        pages: Sequence[OpenPage],
        deadline: float,
    ) -> tuple[Flags, _Rows]:
        read = np.zeros(len(batch.keys), np.bool_)
        times = np.zeros(len(batch.keys), np.int64)

        def close(page: OpenPage) -> None:
            _close(page)
            self._descriptors.give(1)

        handles = Handles(pages, self._reader, files.record_bytes, close)
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
            _note_if_all_failed(files, outcomes, deadline)
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


class _Ahead(Generic[Page]):
    """Files of a call, opened part by part, each part while the one before it is in use.

    A descriptor is taken for each file; those of the files that `parts` gave out are whose they
    are.
    """

    def __init__(
        self,
        crew: Crew,
        descriptors: Descriptors,
        open_one: Callable[[bytes], Page | None],
        keys: Sequence[bytes],
        at_once: int,
        *,
        leading: bool,
        discard: Callable[[Page], object],
    ) -> None:
        self._crew = crew
        self._descriptors = descriptors
        self._open_one: Callable[[bytes], Page | None] = open_one
        self._keys = keys
        self._at_once = at_once
        self._leading = leading
        self._discard: Callable[[Page], object] = discard
        self._start = 0
        self._job: tuple[_Rows, Job[bytes, Page]] | None = None

    def parts(self, deadline: float) -> Iterator[tuple[_Rows, list[Page]]]:
        """The files that could be opened, and which of `keys` they are of. With `leading`, none
        behind one that could not."""
        while True:
            if self._job is None:
                self._begin(deadline)
            if self._job is None:
                return
            rows, job = self._job
            opened = job.results(deadline)
            self._job = None
            there = [
                (row, page) for row, page in zip(rows, opened, strict=True) if page is not None
            ]
            self._descriptors.give(len(rows) - len(there))
            complete = len(there) == len(rows) or not self._leading
            if complete:
                self._begin(0.0)  # if there are descriptors now, else after this part
            yield np.array([row for row, _ in there], np.int64), [page for _, page in there]
            if not complete:
                return

    def close(self) -> None:
        """Let go of what was opened and not given out."""
        if self._job is not None:
            rows, job = self._job
            self._job = None
            for page in job.results(0.0):
                if page is not None:
                    self._discard(page)
            self._descriptors.give(len(rows))

    def _begin(self, deadline: float) -> None:
        """Open the next part, if there is one; wait for descriptors until `deadline`."""
        wanted = min(self._at_once, len(self._keys) - self._start)
        count = self._descriptors.take(wanted, deadline) if wanted else 0
        if count == 0:
            return
        rows = np.arange(self._start, self._start + count)
        keys = self._keys[self._start : self._start + count]
        self._start += count
        job = self._crew.start(self._open_one, keys, leading=self._leading, discard=self._discard)
        self._job = (rows, job)


def _files_at_once(nbytes: int) -> int:
    """How many files of `nbytes` are worth a transfer, within reason."""
    return min(max(_LEAST_AT_ONCE, _BYTES_AT_ONCE // nbytes), _MOST_AT_ONCE)


def _note_if_all_failed(files: PageFiles, outcomes: Outcomes, deadline: float) -> None:
    if (outcomes == Outcome.FAILED).all() and time.monotonic() < deadline:
        error = OSError(errno.EIO, "the transfers failed")
        files.note_trouble(f"{len(outcomes)} pages cannot be moved", error)


def _close(page: OpenPage) -> None:
    os.close(page.descriptor)
