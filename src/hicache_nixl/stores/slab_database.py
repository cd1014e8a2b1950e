"""The database file of a slab store's index: connections, transactions, and what SQLite's errors
mean. What is in the tables it does not know.

WAL mode: any number of processes read, one writes at a time. `synchronous=NORMAL`: the database
stays consistent through a power loss, but may forget the last transactions. No mmap: an I/O error
under a mapping is SIGBUS and the end of the engine, not an exception.
https://sqlite.org/wal.html, https://sqlite.org/pragma.html#pragma_synchronous
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hicache_nixl.errors import StoreError

_BUSY_WAIT_S = 0.05
_CLOSE_WAIT_S = 2.0
_LOST = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_CHECKPOINT_PAGES = 16384
_WAL_LIMIT_BYTES = 64 * 1024 * 1024
_WRITER_CACHE_KIB = 65536
_READER_CACHE_KIB = 16384


class IndexLostError(StoreError):
    """The file is not a database, or a damaged one: it has to be made again."""


class Database:
    """Safe for threads, not for forks: open it in the process that uses it.

    Reads go through the one writing connection while nobody writes, because a commit empties the
    cache of every connection but its own; otherwise through a pool of reading connections.
    """

    def __init__(self, path: Path, *, busy_timeout_s: float, page_size: int | None = None) -> None:
        """Open a database; `page_size` makes a new one where there is none."""
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._mode = "rw" if page_size is None else "rwc"
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        with self._as_store_error():
            self._writer = self._connect(_WRITER_CACHE_KIB, _BUSY_WAIT_S, page_size)

    def _connect(
        self, cache_kib: int, busy_s: float, page_size: int | None = None
    ) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={self._mode}",
            uri=True,
            timeout=busy_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        try:
            if page_size is not None:
                connection.execute(f"PRAGMA page_size={page_size}")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
            connection.execute(f"PRAGMA journal_size_limit={_WAL_LIMIT_BYTES}")
            connection.execute(f"PRAGMA cache_size=-{cache_kib}")
        except BaseException:
            connection.close()
            raise
        return connection

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """What one SELECT gives. Raises StoreError."""
        with self._as_store_error():
            if self._lock.acquire(blocking=False):
                try:
                    self._check_open()
                    return self._writer.execute(statement, parameters).fetchall()
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                        raise
                finally:
                    self._leave()
            self._check_open()
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect(_READER_CACHE_KIB, self._busy_timeout_s)
            try:
                return connection.execute(statement, parameters).fetchall()
            finally:
                self._idle.append(connection)
                self._close_idle_if_closed()

    @contextlib.contextmanager
    def writing(self, deadline: float | None = None) -> Iterator[sqlite3.Connection]:
        """A transaction, committed at the end of the block, rolled back if it raises.

        Waits for other writers until `deadline` (`time.monotonic`), or for the busy timeout.
        Raises StoreError.
        """
        if deadline is None:
            deadline = time.monotonic() + self._busy_timeout_s
        left = max(0.0, deadline - time.monotonic())
        if not self._lock.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            raise StoreError(f"the index {self.path} is busy with another thread's transaction")
        with self._as_store_error():
            try:
                self._check_open()
                self._begin(deadline)
                try:
                    yield self._writer
                    self._writer.execute("COMMIT")
                finally:
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
            finally:
                self._leave()

    def _begin(self, deadline: float) -> None:
        if self._writer.in_transaction:  # its end failed
            self._writer.execute("ROLLBACK")
        while True:
            try:
                self._writer.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
            else:
                return

    def script(self, statements: str) -> None:
        """Run statements in one transaction. Raises StoreError."""
        with self._lock, self._as_store_error():
            self._writer.executescript(f"BEGIN IMMEDIATE;{statements}COMMIT;")

    def close(self) -> None:
        """Close every connection. Idempotent.

        Waits a moment for a transaction of another thread. One that takes longer, on a disk that
        does not answer, closes its connection when it ends.
        """
        self._closed = True
        if self._lock.acquire(timeout=_CLOSE_WAIT_S):
            self._leave()
        self._close_idle_if_closed()

    def _leave(self) -> None:
        """Release the lock; whoever does it last in a closed database closes the connection."""
        try:
            if self._closed:
                self._writer.close()
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the index {self.path} is closed")

    def _close_idle_if_closed(self) -> None:
        with contextlib.suppress(IndexError):
            while self._closed:
                self._idle.pop().close()

    @contextlib.contextmanager
    def _as_store_error(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is not None and code & 0xFF in _LOST:
                mark_lost(self.path)
                raise IndexLostError(
                    f"the index {self.path} is damaged ({error}); start again to have it made anew "
                    "from the slots"
                ) from error
            raise StoreError(f"the index {self.path} failed: {error}") from error


def mark_lost(path: Path) -> None:
    """Have the next opening make this index anew, although it may look whole."""
    with contextlib.suppress(OSError):
        lost_mark(path).touch()


def lost_mark(path: Path) -> Path:
    """The file that says that an index is to be made anew."""
    return path.with_name(path.name + ".lost")
