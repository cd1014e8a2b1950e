"""The files store: one file a page record, in a directory that any number of hosts may share.

    put   look -> create under another name -> write records (mover) -> rename
    get   open -> read and check records (mover) -> remove what was damaged

There is no index: what the directory says is true, for every process on every host. A file appears
under its page's name only by a rename, when its record is written and its descriptor closed, so it
is whole or absent, and one that is not, after a power loss, fails its size, trailer or checksum.
With `verify=trailer`, damage inside a payload can go unnoticed.

Calls of the file system are made by a bounded number of threads (`files_crew.py`), so that one that
hangs costs its caller no more than the deadline. One process among all keeps the store within its
budget (`files_sweep.py`, `files_lease.py`), and none adds more than its share of the room that was
left when it was last told (`files_ledger.py`).
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_nixl import record
from hicache_nixl.batch import Batch, firsts
from hicache_nixl.errors import RegistrationError, StoreError
from hicache_nixl.identity import Namespace
from hicache_nixl.mover import RecordMover
from hicache_nixl.stores.base import CheckedPage, Direction, Flags, NamespaceUse, StoreUse, not_open
from hicache_nixl.stores.directory import as_store_error
from hicache_nixl.stores.files_admin import clear_namespace, namespace_use
from hicache_nixl.stores.files_clock import FileClock
from hicache_nixl.stores.files_crew import Crew
from hicache_nixl.stores.files_health import FilesHealth
from hicache_nixl.stores.files_house import INTERVAL_S, Housekeeper
from hicache_nixl.stores.files_layout import FilesRoot, Owner
from hicache_nixl.stores.files_lease import EXPIRY_S
from hicache_nixl.stores.files_ledger import Ledger, Usage, read_usage
from hicache_nixl.stores.files_moves import FileMoves
from hicache_nixl.stores.files_pages import Descriptors, PageFiles
from hicache_nixl.stores.files_sweep import LOW_WATER
from hicache_nixl.stores.files_uses import Uses
from hicache_nixl.stores.files_verify import verify_namespace
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)

THREADS = 32
"""With calls of 1 ms, 512 pages are looked at in 16 ms; more threads gain little in Python."""
_ROOM_WAIT_S = 2.0
_ROOM_WAIT_SHARE = 0.5
"""A call without room is to end before its deadline: nothing hangs."""
_UNKNOWN_SHARE = 40
"""This part of the capacity is left free: how full a small store is, is known to a few pages."""

_Rows = npt.NDArray[np.int64]


class FilesStore:
    """Implements `stores.base.Store` on a directory. Safe for threads, not for forks.

    Args:
        directory: of the store; created where its parent exists. What is not the store's own in it
            is left alone.
        capacity_bytes: budget of all records together, the same in every process that shares it.
        reader, writer: the engines that will be moving records (None where no NIXL is used).
        direct_io: open page files with O_DIRECT.
        timeout_s: how long calls without a deadline of their own may take.
        keeps_house: count, evict and stamp uses behind the calls; not for administration.
        host: who this host is, `files_layout.this_host()` if None.
        interval_s: between two rounds of what goes on behind the calls.
        expiry_s: how long a sweeper may show no sign of life before another one takes over.

    Raises StoreError when the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        reader: TransferEngine | None = None,
        writer: TransferEngine | None = None,
        direct_io: bool = True,
        timeout_s: float = 10.0,
        keeps_house: bool = True,
        host: str | None = None,
        interval_s: float = INTERVAL_S,
        expiry_s: float = EXPIRY_S,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._budget = capacity_bytes - capacity_bytes // _UNKNOWN_SHARE
        self._root = FilesRoot(directory)
        self._root.prepare()
        self._direct_io = direct_io
        self._timeout_s = timeout_s
        self._owner = Owner.of_this_process(host)
        clock = FileClock()
        self._crew = Crew(THREADS, "hicache-nixl-files")
        self._health = FilesHealth(self._root, self._crew, direct_io=direct_io)
        self._uses = Uses(self._root, clock, self._crew)
        self._ledger = Ledger(self._root, self._owner, self._budget)
        self._descriptors = Descriptors.within_limits()
        self._moves = FileMoves(
            self._crew,
            self._descriptors,
            self._owner,
            clock,
            reader=reader,
            writer=writer,
            begin=self._begin,
            end=self._end,
        )
        self._spaces: dict[bytes, PageFiles] = {}
        self._changed = threading.Condition()
        self._busy = 0
        self._closed = False
        self._house: Housekeeper | None = None
        if keeps_house:
            clock.observe(self._ledger.publish() or 0)
            if (usage := read_usage(self._root.usage)) is not None:
                self._ledger.adopt(usage)
            self._house = Housekeeper(
                self._root,
                self._owner,
                ledger=self._ledger,
                clock=clock,
                uses=self._uses,
                crew=self._crew,
                capacity_bytes=self._budget,
                interval_s=interval_s,
                expiry_s=expiry_s,
            )

    # -- namespaces -------------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace usable; see `Store`."""
        size = record.record_bytes(namespace.payload_bytes)
        if size > LOW_WATER * self._budget:
            raise RegistrationError(
                f"a page of {namespace} takes {size} bytes, too much for a capacity of "
                f"{self.capacity_bytes} bytes; raise capacity"
            )
        self._refuse_closed()
        if namespace.digest in self._spaces:
            return
        files = PageFiles(self._root, namespace, self._owner, direct_io=self._direct_io)
        with self._changed:
            kept = files if self._closed else self._spaces.setdefault(namespace.digest, files)
        if self._closed or kept is not files:
            files.close()
        self._refuse_closed()

    def namespaces(self) -> list[NamespaceUse]:
        """What is stored, a row a namespace. Looks at every file."""
        self._refuse_closed()
        with as_store_error(self._root.directory):
            uses = [
                namespace_use(self._root, namespace, self._crew)
                for namespace in self._root.noted_namespaces()
            ]
        if self._house is None:  # then nobody knows better
            nbytes, pages = sum(use.record_bytes for use in uses), sum(use.pages for use in uses)
            self._ledger.adopt(replace(self._usage(), used_bytes=nbytes, pages=pages))
        return uses

    def clear(self, namespace: bytes, *, deadline: float = math.inf) -> int:
        """Forget every page of one namespace; see `Store`.

        Pages that other calls, of any host, are just writing may be there afterwards.
        """
        self._refuse_closed()
        pages = None
        try:
            with as_store_error(self._root.directory):
                pages = clear_namespace(self._root, namespace, self._crew, deadline=deadline)
            return pages
        finally:
            if pages != 0:
                self._ledger.cleared()
                if self._house is not None:
                    self._house.hurry()

    # -- pages ------------------------------------------------------------------------------------

    def exists(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is stored, each with its exact size."""
        deadline = time.monotonic() + self._timeout_s
        with self._using(namespace, deadline) as files:
            before = files.troubles
            seen = self._crew.map(files.look, keys, deadline=deadline, leading=True)
            run = next((i for i, used_ns in enumerate(seen) if used_ns is None), len(seen))
            if keys and run == 0:
                self._health.refuse(files, before, deadline)
        return run

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> Flags:
        """Which of `keys` are stored; see `Store`."""
        deadline = time.monotonic() + self._timeout_s
        with self._using(namespace, deadline) as files:
            before = files.troubles
            seen = self._crew.map(files.look, keys, deadline=deadline)
            there = np.array([used_ns is not None for used_ns in seen], np.bool_)
            if keys and not there.any():
                self._health.refuse(files, before, deadline)
        return there

    def put(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Store pages; see `Store`. What is there is not written again."""
        with self._using(batch.namespace, deadline) as files:
            first_rows = firsts(batch.keys)
            rows = np.unique(first_rows)
            seen = self._crew.map(files.look, [batch.keys[i] for i in rows], deadline=deadline)
            stored = np.zeros(len(batch.keys), np.bool_)
            stored[rows] = [used_ns is not None for used_ns in seen]
            used_ns = self._uses.note(
                batch.namespace,
                prefix,
                (
                    (batch.keys[i], len(prefix) + int(i), used_ns)
                    for i, used_ns in zip(rows, seen, strict=True)
                    if used_ns is not None
                ),
            )
            wanted = rows[~stored[rows]]
            if len(wanted):
                stored[wanted] = self._write(
                    files,
                    mover,
                    batch.take(wanted),
                    len(prefix) + wanted,
                    len(prefix) + len(rows) - len(wanted),
                    used_ns,
                    deadline,
                )
            return stored[first_rows]

    def get(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Read pages into their host pages; see `Store`. Reads the leading run that is stored."""
        with self._using(batch.namespace, deadline) as files:
            before = files.troubles
            read, times = self._moves.read(files, mover, batch, deadline)
            if not read.any():
                self._health.refuse(files, before, deadline)
            else:
                self._uses.note(
                    batch.namespace,
                    prefix,
                    ((batch.keys[i], len(prefix) + i, int(times[i])) for i in np.flatnonzero(read)),
                )
            return read

    # -- writing ----------------------------------------------------------------------------------

    def _write(
        self,
        files: PageFiles,
        mover: RecordMover,
        batch: Batch,
        depths: _Rows,
        in_use: int,
        used_ns: int,
        deadline: float,
    ) -> Flags:
        """Write the pages there is room for, the first ones."""
        size = files.record_bytes
        written = np.zeros(len(batch.keys), np.bool_)
        call, before = object(), files.troubles
        try:
            granted = self._room(len(batch.keys) * size, size, in_use * size, call, deadline)
            rows = np.arange(granted // size)
            written[rows] = self._moves.write(
                files, mover, batch.take(rows), depths[rows], used_ns, deadline
            )
        finally:
            self._ledger.settle(call, int(written.sum()) * size)
        self._uses.added(batch.namespace, (batch.keys[i] for i in np.flatnonzero(written)), used_ns)
        if self._house is not None and self._ledger.is_due():
            self._house.hurry()
        if not written.any():
            self._health.refuse(files, before, deadline)
        return written

    def _room(self, nbytes: int, step: int, in_use: int, call: object, deadline: float) -> int:
        """Reserve room; where there is too little, wait a moment for the sweeper to make some.

        No more is asked for than what could be had without evicting the pages of the call.
        """
        nbytes = min(nbytes, max(0, int(LOW_WATER * self._budget) - in_use))
        nbytes -= nbytes % step
        if self._house is not None:
            self._house.refresh(deadline)
        granted = self._ledger.take(nbytes, step, call)
        now = time.monotonic()
        end = now + min(_ROOM_WAIT_S, _ROOM_WAIT_SHARE * (deadline - now))
        while granted < min(nbytes, self._ledger.share) and time.monotonic() < end:
            if self._house is None:
                break
            self._house.hurry()
            self._house.wait_for_news(end)
            granted += self._ledger.take(nbytes - granted, step, call)
        self._ledger.want_no_more(call)
        return granted

    # -- use --------------------------------------------------------------------------------------

    def use(self) -> StoreUse:
        """How full the store is, as the sweeper told last, or `namespaces` found."""
        usage = self._usage()
        return StoreUse(self.capacity_bytes, usage.used_bytes, usage.pages, usage.evicted_pages)

    def _usage(self) -> Usage:
        return self._ledger.usage or read_usage(self._root.usage) or Usage(0, 0, 0, 1)

    def check(self, direction: Direction, *, deadline: float) -> None:
        """Try whether reading or writing works; see `Store`."""
        self._refuse_closed()
        self._begin(1)
        try:
            self._health.check(direction, list(self._spaces.values()), deadline)
        finally:
            self._end(1)

    def verify(self, namespace: bytes | None = None) -> Iterator[CheckedPage]:
        """Read and check every page with ordinary reads; damaged ones are removed."""
        self._refuse_closed()
        with as_store_error(self._root.directory):
            for noted in self._root.noted_namespaces():
                if namespace in (None, noted.digest):
                    yield from verify_namespace(self._root, noted)

    def close(self) -> None:
        """Write down what is only in memory, end the threads, let go of directories. Idempotent.

        Waits a moment for calls in other threads. Files of late transfers stay open until these
        have ended.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
        try:
            if self._house is not None:
                self._house.close()
            elif self._ledger.state().clears:
                self._ledger.publish(closed=True)
        except StoreError as error:
            logger.warning("%s", error)
        self._crew.close()
        self._let_go()

    # -- who is at work ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self, namespace: bytes, deadline: float) -> Iterator[PageFiles]:
        """The files of a namespace, which stay usable until the block ends."""
        with self._changed:
            self._refuse_closed()
            try:
                files = self._spaces[namespace]
            except KeyError:
                raise not_open(namespace) from None
            self._busy += 1
        try:
            self._health.follow(files, deadline)
            yield files
        finally:
            self._end(1)

    def _begin(self, count: int) -> None:
        with self._changed:
            self._busy += count

    def _end(self, count: int) -> None:
        with self._changed:
            self._busy -= count
        self._let_go()

    def _let_go(self) -> None:
        """Close the directories, once the store is closed and nobody needs them."""
        with self._changed:
            if self._closed and self._busy == 0:
                while self._spaces:
                    self._spaces.popitem()[1].close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self._root.directory} is closed")
