"""The index of a slab store: which slot holds which page. SQLite in WAL mode, several processes.

    namespaces   digest -> small number, manifest
    segments     files that exist, and their slots
    pages        (namespace, key) -> slot, generation, last use, depth      published pages only
    vacant       slots that may be written
    claims       slots that some writer is writing; a dead writer's claims become vacant again

Every slot is in exactly one of pages, vacant and claims. `synchronous=NORMAL`: the database stays
consistent through a power loss, but may forget the last transactions; a page whose slot was reused
meanwhile is noticed by its trailer (generation). Trouble is raised as StoreError.
https://sqlite.org/wal.html, https://sqlite.org/pragma.html#pragma_synchronous
"""

import contextlib
import json
import queue
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hicache_nixl.errors import StoreError
from hicache_nixl.identity import Namespace, namespace_from_manifest
from hicache_nixl.stores import slab_sql as sql
from hicache_nixl.stores.base import NamespaceUse
from hicache_nixl.stores.slab_segments import SegmentFile
from hicache_nixl.stores.slab_sql import Located, NewPage, Slot

_CLEAR_CHUNK = 5000


class SlabIndex:
    """Safe for threads: one connection writes under a lock, any number of others read."""

    def __init__(self, path: Path, *, busy_timeout_s: float) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.Lock()
        self._readers: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        self._closed = False
        with sql.as_store_error(path):
            self._writer = self._connect()
            if self._writer.execute("PRAGMA user_version").fetchone()[0] == 0:
                self._writer.executescript(f"BEGIN IMMEDIATE;{sql.SCHEMA}COMMIT;")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA cache_size=-65536")
        connection.execute("PRAGMA mmap_size=1073741824")
        return connection

    def close(self) -> None:
        """Close every connection. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._writer.close()
        self._close_readers_if_closed()

    def _close_readers_if_closed(self) -> None:
        with contextlib.suppress(queue.Empty):
            while self._closed:
                self._readers.get_nowait().close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with sql.as_store_error(self.path):
            if self._closed:
                raise StoreError(f"the index {self.path} is closed")
            try:
                connection = self._readers.get_nowait()
            except queue.Empty:
                connection = self._connect()
            try:
                yield connection
            finally:
                self._readers.put(connection)
                self._close_readers_if_closed()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, sql.as_store_error(self.path):
            if self._closed:
                raise StoreError(f"the index {self.path} is closed")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    # -- namespaces ---------------------------------------------------------------------------

    def namespace_id(self, digest: bytes) -> int | None:
        """The number of a namespace, None if it was never opened."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT id FROM namespaces WHERE digest=?", (digest,)
            ).fetchone()
        return None if row is None else int(row[0])

    def add_namespace(self, namespace: Namespace) -> int:
        """The number of a namespace, which is entered if it is new."""
        with self._writing() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO namespaces(digest, manifest) VALUES(?, ?)",
                (namespace.digest, json.dumps(namespace.manifest, sort_keys=True)),
            )
            row = connection.execute(
                "SELECT id FROM namespaces WHERE digest=?", (namespace.digest,)
            ).fetchone()
        return int(row[0])

    def namespace_uses(self) -> list[NamespaceUse]:
        """What each namespace holds."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT manifest, count(key), coalesce(sum(record_bytes), 0),"
                " coalesce(min(used), 0), coalesce(max(used), 0) FROM namespaces"
                " LEFT JOIN pages ON namespace = id GROUP BY id ORDER BY id"
            ).fetchall()
        return [
            NamespaceUse(namespace_from_manifest(json.loads(manifest)), *map(int, numbers))
            for manifest, *numbers in rows
        ]

    # -- pages --------------------------------------------------------------------------------

    def locate(self, namespace: int, keys: Sequence[bytes]) -> dict[bytes, Located]:
        """Those of `keys` that are published, and where."""
        with self._reading() as connection:
            return sql.locate(connection, namespace, keys)

    def leading_run(self, namespace: int, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are published."""
        with self._reading() as connection:
            for start in range(0, len(keys), sql.IN_CHUNK):
                chunk = keys[start : start + sql.IN_CHUNK]
                found = sql.present(connection, namespace, chunk)
                for i, key in enumerate(chunk):
                    if key not in found:
                        return start + i
        return len(keys)

    def touch(self, touches: Iterable[sql.Touch]) -> None:
        """Note last uses: (namespace, key, tick)."""
        with self._writing() as connection:
            sql.touch(connection, touches)

    def claim(
        self,
        *,
        count: int,
        record_bytes: int,
        writer: bytes,
        evict_before: int | None,
        touches: Iterable[sql.Touch],
    ) -> list[Slot]:
        """Take up to `count` slots for writing.

        Vacant ones first; then, unless `evict_before` is None, those of the pages that were used
        longest ago and before that tick, the deepest of a prefix first.
        """
        with self._writing() as connection:
            sql.touch(connection, touches)
            slots = connection.execute(
                "SELECT segment, slot FROM vacant WHERE record_bytes=?"
                " ORDER BY slot, segment LIMIT ?",
                (record_bytes, count),
            ).fetchall()
            connection.executemany(
                "DELETE FROM vacant WHERE record_bytes=? AND slot=? AND segment=?",
                [(record_bytes, slot, segment) for segment, slot in slots],
            )
            if len(slots) < count and evict_before is not None:
                victims = connection.execute(
                    "SELECT namespace, key, segment, slot FROM pages"
                    " WHERE record_bytes=? AND used<? ORDER BY used, depth DESC LIMIT ?",
                    (record_bytes, evict_before, count - len(slots)),
                ).fetchall()
                connection.executemany(
                    "DELETE FROM pages WHERE namespace=? AND key=?",
                    [(namespace, key) for namespace, key, _, _ in victims],
                )
                sql.count(connection, "evicted_pages", len(victims))
                slots += [(segment, slot) for _, _, segment, slot in victims]
            connection.executemany(
                "INSERT INTO claims VALUES(?, ?, ?)",
                [(segment, slot, writer) for segment, slot in slots],
            )
        return slots

    def publish(
        self,
        *,
        namespace: int,
        pages: Sequence[NewPage],
        record_bytes: int,
        generation: int,
        give_back: Sequence[Slot],
    ) -> None:
        """Make written pages visible and return slots that were claimed for nothing.

        A page that somebody else published meanwhile keeps the slot it has.
        """
        with self._writing() as connection:
            there = sql.present(connection, namespace, [page.key for page in pages])
            new = [page for page in pages if page.key not in there]
            connection.executemany(
                "INSERT INTO pages VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (namespace, p.key, p.segment, p.slot, generation, record_bytes, generation,
                     p.depth)
                    for p in new
                ],
            )  # fmt: skip
            connection.execute(
                "UPDATE counters SET value=max(value, ?) WHERE name='tick'", (generation,)
            )
            vacated = [(p.segment, p.slot) for p in pages if p.key in there] + list(give_back)
            sql.vacate(connection, record_bytes, vacated)
            connection.executemany(
                "DELETE FROM claims WHERE segment=? AND slot=?",
                [(p.segment, p.slot) for p in pages] + list(give_back),
            )

    def forget(self, namespace: int, pages: Sequence[tuple[bytes, Located]]) -> int:
        """Drop pages whose slots do not hold them, unless they moved since; how many went."""
        gone = 0
        with self._writing() as connection:
            for key, place in pages:
                row = connection.execute(
                    "DELETE FROM pages WHERE namespace=? AND key=? AND segment=? AND slot=?"
                    " AND generation=? RETURNING record_bytes",
                    (namespace, key, place.segment, place.slot, place.generation),
                ).fetchone()
                if row is not None:
                    sql.vacate(connection, int(row[0]), [(place.segment, place.slot)])
                    gone += 1
        return gone

    def clear(self, namespace: int) -> int:
        """Drop every page of a namespace, in several transactions; how many went."""
        gone = 0
        while True:
            with self._writing() as connection:
                rows = connection.execute(
                    "DELETE FROM pages WHERE namespace=?1 AND key IN"
                    " (SELECT key FROM pages WHERE namespace=?1 LIMIT ?2)"
                    " RETURNING record_bytes, segment, slot",
                    (namespace, _CLEAR_CHUNK),
                ).fetchall()
                for size in {row[0] for row in rows}:
                    sql.vacate(connection, size, [(s, i) for b, s, i in rows if b == size])
            gone += len(rows)
            if len(rows) < _CLEAR_CHUNK:
                return gone

    def pages_of(self, namespace: int) -> Iterator[tuple[bytes, Located]]:
        """Every page of a namespace, in key order; read in chunks, so that writers can go on."""
        after = b""
        while True:
            with self._reading() as connection:
                rows = connection.execute(
                    "SELECT key, segment, slot, generation FROM pages WHERE namespace=? AND key>?"
                    " ORDER BY key LIMIT 1024",
                    (namespace, after),
                ).fetchall()
            if not rows:
                return
            for key, segment, slot, generation in rows:
                yield key, Located(segment, slot, generation)
            after = rows[-1][0]

    # -- segments and claims ------------------------------------------------------------------

    def segments(self) -> list[SegmentFile]:
        """Every segment, by id."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT id, directory, record_bytes, slots FROM segments ORDER BY id"
            ).fetchall()
        return [SegmentFile(*row) for row in rows]

    def reserve_segment_id(self) -> int:
        """An id that no segment had or will have."""
        with self._writing() as connection:
            cursor = connection.execute("INSERT INTO segments VALUES(NULL, 0, 0, 0)")
            connection.execute("DELETE FROM segments WHERE id=?", (cursor.lastrowid,))
        return int(cursor.lastrowid or 0)

    def add_segment(self, segment: SegmentFile, vacant: Iterable[int] | None = None) -> None:
        """Enter a segment; its slots, or those in `vacant`, are vacant."""
        slots = range(segment.slots) if vacant is None else vacant
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO segments VALUES(?, ?, ?, ?)",
                (segment.id, segment.directory, segment.record_bytes, segment.slots),
            )
            sql.vacate(connection, segment.record_bytes, [(segment.id, slot) for slot in slots])

    def sizes(self) -> set[int]:
        """Record sizes that the store has segments of."""
        with self._reading() as connection:
            rows = connection.execute("SELECT DISTINCT record_bytes FROM segments").fetchall()
        return {row[0] for row in rows}

    def oldest_use(self, record_bytes: int) -> int | None:
        """When the next page of this size to be evicted was used last."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT min(used) FROM pages WHERE record_bytes=?", (record_bytes,)
            ).fetchone()
        return None if row[0] is None else int(row[0])

    def last_tick(self) -> int:
        """The highest generation that was published."""
        with self._reading() as connection:
            row = connection.execute("SELECT value FROM counters WHERE name='tick'").fetchone()
        return int(row[0])

    def coldest_segment(self, not_record_bytes: int | None, used_before: int) -> SegmentFile | None:
        """The segment whose youngest page was used longest ago, with no slot being written."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT id, directory, s.record_bytes, slots,"
                " (SELECT coalesce(max(used), 0) FROM pages WHERE segment=id) AS newest"
                " FROM segments s WHERE s.record_bytes IS NOT ? AND newest < ?"
                " AND NOT EXISTS (SELECT 1 FROM claims WHERE segment=id)"
                " ORDER BY newest LIMIT 1",
                (not_record_bytes, used_before),
            ).fetchone()
        return None if row is None else SegmentFile(*row[:4])

    def drop_segment(self, segment: SegmentFile) -> int | None:
        """Forget a segment and its pages; how many, or None if a slot of it is being written."""
        with self._writing() as connection:
            if connection.execute(
                "SELECT 1 FROM claims WHERE segment=? LIMIT 1", (segment.id,)
            ).fetchone():
                return None
            pages = connection.execute("DELETE FROM pages WHERE segment=?", (segment.id,)).rowcount
            connection.execute(
                "DELETE FROM vacant WHERE record_bytes=? AND segment=?",
                (segment.record_bytes, segment.id),
            )
            connection.execute("DELETE FROM segments WHERE id=?", (segment.id,))
            sql.count(connection, "evicted_pages", pages)
            sql.count(connection, "dropped_segments", 1)
        return int(pages)

    def forget_slots_from(self, segment: SegmentFile, first: int) -> int:
        """Drop the pages in slots `first` and up of a segment (its file was cut short)."""
        with self._writing() as connection:
            rows = connection.execute(
                "DELETE FROM pages WHERE segment=? AND slot>=? RETURNING slot",
                (segment.id, first),
            ).fetchall()
            sql.vacate(connection, segment.record_bytes, [(segment.id, slot) for (slot,) in rows])
        return len(rows)

    def claiming_writers(self) -> set[bytes]:
        """Who is writing, or was when it died."""
        with self._reading() as connection:
            rows = connection.execute("SELECT DISTINCT writer FROM claims").fetchall()
        return {row[0] for row in rows}

    def end_claims(self, writer: bytes) -> int:
        """Make the slots of a dead writer vacant; how many."""
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO vacant SELECT record_bytes, slot, segment FROM claims"
                " JOIN segments ON id = segment WHERE writer=?",
                (writer,),
            )
            return connection.execute("DELETE FROM claims WHERE writer=?", (writer,)).rowcount

    def restore_pages(
        self, rows: Iterable[tuple[int, bytes, int, int, int, int, int, int]]
    ) -> None:
        """Enter pages found by a scan: rows of the table `pages`."""
        with self._writing() as connection:
            connection.executemany("INSERT INTO pages VALUES(?, ?, ?, ?, ?, ?, ?, ?)", rows)
            connection.execute(
                "UPDATE counters SET value=(SELECT coalesce(max(generation), 0) FROM pages)"
                " WHERE name='tick'"
            )

    def totals(self) -> tuple[int, int, int]:
        """(bytes of all segments, published pages, pages evicted since the store was made)."""
        with self._reading() as connection:
            allocated = connection.execute(
                "SELECT coalesce(sum(record_bytes * slots), 0) FROM segments"
            ).fetchone()[0]
            pages = connection.execute("SELECT count(*) FROM pages").fetchone()[0]
            evicted = connection.execute(
                "SELECT value FROM counters WHERE name='evicted_pages'"
            ).fetchone()[0]
        return int(allocated), int(pages), int(evicted)

    def allocated_bytes(self) -> int:
        """Bytes of all segments together."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT coalesce(sum(record_bytes * slots), 0) FROM segments"
            ).fetchone()
        return int(row[0])
