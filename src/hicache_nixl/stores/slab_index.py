"""The index of a slab store: which slot holds which page. SQLite, several processes.

    namespaces   digest -> small number, manifest
    segments     files that exist, their slots; slots from `fresh` on were never written
    pages        (namespace, key) -> slot, generation, last use, depth      published pages only
    vacant       slots that pages have left
    claims       slots that some put is writing; a dead writer's claims become vacant again

Every slot is in exactly one of pages, vacant, claims and the fresh end of its segment. After a
power loss the index may be older than the slots; a page whose slot was reused meanwhile is noticed
by its trailer (generation). Trouble is raised as StoreError.
"""

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hicache_nixl.errors import StoreError, StoreFormatError
from hicache_nixl.identity import Namespace, namespace_from_manifest
from hicache_nixl.stores import slab_sql as sql
from hicache_nixl.stores.base import NamespaceUse
from hicache_nixl.stores.slab_database import Database, IndexLostError
from hicache_nixl.stores.slab_segments import SegmentFile
from hicache_nixl.stores.slab_sql import Claim, Located, NewPage, PageRow, Slot, Touch

_CHUNK = 1000
_SEGMENT_COLUMNS = "id, directory, record_bytes, slots"


class SlabIndex:
    """Safe for threads and processes. `deadline` is that of `Database.writing`."""

    def __init__(self, path: Path, *, busy_timeout_s: float, create: bool = False) -> None:
        """Open an index, or make one. Raises IndexLostError if it has to be made anew."""
        if not create and not path.exists():
            raise IndexLostError(f"the index {path} is gone")
        self.path = path
        self._database = Database(
            path, busy_timeout_s=busy_timeout_s, page_size=sql.PAGE_SIZE if create else None
        )
        try:
            if create:
                self._database.script(sql.SCHEMA)
            version = int(self._database.rows("PRAGMA user_version")[0][0])
            if version > sql.FORMAT:
                raise StoreFormatError(
                    f"the index {path} has format {version}, this version reads {sql.FORMAT}; "
                    "upgrade hicache-nixl"
                )
            if version < sql.FORMAT:
                raise IndexLostError(f"the index {path} is empty")
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._database.close()

    # -- namespaces ---------------------------------------------------------------------------

    def namespace(self, digest: bytes) -> tuple[int, Namespace] | None:
        """A namespace and its number, None if it was never opened."""
        rows = self._database.rows("SELECT id, manifest FROM namespaces WHERE digest=?", (digest,))
        return None if not rows else (rows[0][0], namespace_from_manifest(json.loads(rows[0][1])))

    def add_namespace(self, namespace: Namespace) -> int:
        """The number of a namespace, which is entered if it is new."""
        with self._database.writing() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO namespaces(digest, manifest) VALUES(?, ?)",
                (namespace.digest, json.dumps(namespace.manifest, sort_keys=True)),
            )
            query = "SELECT id FROM namespaces WHERE digest=?"
            return int(connection.execute(query, (namespace.digest,)).fetchone()[0])

    def namespace_uses(self) -> list[NamespaceUse]:
        """What each namespace holds."""
        rows = self._database.rows(
            "WITH sums AS (SELECT namespace, count(*) AS pages, sum(record_bytes) AS bytes,"
            " min(used) AS oldest, max(used) AS newest FROM pages GROUP BY namespace)"
            " SELECT manifest, coalesce(pages, 0), coalesce(bytes, 0), coalesce(oldest, 0),"
            " coalesce(newest, 0) FROM namespaces LEFT JOIN sums ON namespace = id ORDER BY id"
        )
        return [
            NamespaceUse(namespace_from_manifest(json.loads(manifest)), *map(int, numbers))
            for manifest, *numbers in rows
        ]

    # -- pages --------------------------------------------------------------------------------

    def locate(self, namespace: int, keys: Sequence[bytes]) -> dict[bytes, Located]:
        """Those of `keys` that are published, and where."""
        found: dict[bytes, Located] = {}
        for chunk in sql.padded_chunks(keys):
            statement = sql.find("key, segment, slot, generation", namespace, chunk)
            for key, segment, slot, generation in self._database.rows(*statement):
                found[key] = Located(segment, slot, generation)
        return found

    def leading_run(self, namespace: int, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are published."""
        run = 0
        for chunk in sql.padded_chunks(keys):
            found = {key for (key,) in self._database.rows(*sql.find("key", namespace, chunk))}
            for key in chunk:
                if key not in found:
                    return run
                run += 1
        return min(run, len(keys))

    def touch(self, touches: Sequence[Touch], *, deadline: float | None = None) -> None:
        """Note last uses."""
        with self._database.writing(deadline) as connection:
            sql.touch(connection, touches)
            sql.next_tick(connection, max((tick for _, _, tick in touches), default=0))

    def next_tick(self) -> int:
        """A tick above that of every claim there was."""
        with self._database.writing() as connection:
            return sql.next_tick(connection, time.time_ns())

    def claim(
        self,
        *,
        count: int,
        record_bytes: int,
        writer: bytes,
        evict: bool,
        touches: Sequence[Touch] = (),
        namespace: int = 0,
        in_use: Iterable[bytes] = (),
        earlier: Claim | None = None,
        deadline: float | None = None,
    ) -> Claim:
        """Take up to `count` slots for writing, in addition to those of an `earlier` claim.

        Vacant and fresh ones; then, with `evict`, those of the pages that were used longest ago,
        the deepest of a prefix first. `touches` count, and the keys `in_use` are touched with the
        claim's own generation, before anything is evicted; pages used since then stay.
        """
        with self._database.writing(deadline) as connection:
            # Above all uses noted so far, also if the clock was set back: else those pages stay.
            now = max([time.time_ns(), *(tick + 1 for _, _, tick in touches)])
            tick = earlier.generation if earlier else sql.next_tick(connection, now)
            sql.touch(connection, touches)
            sql.touch(connection, ((namespace, key, tick) for key in in_use))
            slots = sql.take_vacant(connection, record_bytes, count)
            slots += sql.take_fresh(connection, record_bytes, count - len(slots))
            if evict and len(slots) < count:
                slots += sql.evict(connection, record_bytes, tick, count - len(slots))
            # Neighbours on the medium for neighbours in the prefix, directories by turns.
            slots.sort(key=lambda slot: (slot[1], slot[0]))
            if earlier is not None:
                slots = earlier.slots + slots
                connection.execute(
                    "UPDATE claims SET slots=? WHERE id=?", (sql.pack_slots(slots), earlier.id)
                )
                return earlier.with_slots(slots)
            id_ = connection.execute(
                "INSERT INTO claims VALUES(NULL, ?, ?, ?)",
                (writer, record_bytes, sql.pack_slots(slots)),
            ).lastrowid
            return Claim(int(id_ or 0), tick, record_bytes, slots)

    def publish(
        self,
        claim: Claim,
        *,
        namespace: int,
        pages: Sequence[NewPage],
        keep: Sequence[Slot] = (),
        deadline: float | None = None,
    ) -> set[bytes]:
        """Make written pages visible and end a claim, except on the slots in `keep`.

        Returns the keys that are not stored now. A page that somebody else published meanwhile
        keeps the slot it has.
        """
        generation = claim.generation
        rows = [
            (sql.page_hash(namespace, page.key), namespace, page.key, *page.slot, generation,
             claim.record_bytes, generation, page.depth)
            for page in pages
        ]  # fmt: skip
        not_stored: set[bytes] = set()
        with self._database.writing(deadline) as connection:
            entered = connection.executemany(
                "INSERT OR IGNORE INTO pages VALUES(NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
            ).rowcount
            used = {page.slot for page in pages}
            if rows and entered < len(rows):
                for row in rows:
                    slot = (row[3], row[4])
                    there = connection.execute(
                        "SELECT namespace, key, segment, slot FROM pages WHERE hash=?", row[:1]
                    ).fetchone()
                    if there[2:] == slot:
                        continue
                    used.discard(slot)
                    if there[:2] == row[1:3]:
                        sql.touch(connection, [(namespace, row[2], generation)])
                    else:  # another page has the same hash
                        not_stored.add(row[2])
            self._end(connection, claim, [s for s in claim.slots if s not in used], keep)
        return not_stored

    def release(
        self, claim: Claim, slots: Sequence[Slot], *, deadline: float | None = None
    ) -> None:
        """Make some of the slots of a claim vacant; the claim ends with its last slot."""
        with self._database.writing(deadline) as connection:
            row = connection.execute("SELECT slots FROM claims WHERE id=?", (claim.id,)).fetchone()
            if row is not None:
                held = sql.unpack_slots(row[0])
                keep = set(held) - set(slots)
                self._end(connection, claim, held, [slot for slot in held if slot in keep])

    @staticmethod
    def _end(
        connection: sqlite3.Connection,
        claim: Claim,
        unused: Sequence[Slot],
        keep: Sequence[Slot],
    ) -> None:
        if keep:
            connection.execute(
                "UPDATE claims SET slots=? WHERE id=?", (sql.pack_slots(keep), claim.id)
            )
        else:
            connection.execute("DELETE FROM claims WHERE id=?", (claim.id,))
        kept = set(keep)
        sql.vacate(connection, claim.record_bytes, [slot for slot in unused if slot not in kept])

    def forget(self, namespace: int, pages: Sequence[tuple[bytes, Located]]) -> int:
        """Drop pages whose slots do not hold them, unless they moved since; how many went."""
        gone = 0
        with self._database.writing() as connection:
            for key, place in pages:
                row = connection.execute(
                    "DELETE FROM pages WHERE hash=? AND namespace=? AND key=? AND segment=?"
                    " AND slot=? AND generation=? RETURNING record_bytes",
                    (sql.page_hash(namespace, key), namespace, key, *place),
                ).fetchone()
                if row is not None:
                    sql.vacate(connection, int(row[0]), [(place.segment, place.slot)])
                    gone += 1
        return gone

    def clear(self, namespace: int, *, deadline: float = math.inf) -> int:
        """Drop every page of a namespace, in several transactions; how many went. Raises StoreError
        where some are left at `deadline`."""
        gone = 0
        last = self._database.rows("SELECT coalesce(max(id), 0) FROM pages")[0][0]
        after = 0
        while after < last:
            with self._database.writing() as connection:
                rows = connection.execute(
                    "SELECT id, record_bytes, segment, slot FROM pages"
                    " WHERE id>? AND id<=? AND namespace=? ORDER BY id LIMIT ?",
                    (after, last, namespace, _CHUNK),
                ).fetchall()
                connection.executemany("DELETE FROM pages WHERE id=?", [row[:1] for row in rows])
                for size in {row[1] for row in rows}:
                    sql.vacate(connection, size, [row[2:] for row in rows if row[1] == size])
            gone += len(rows)
            after = rows[-1][0] if len(rows) == _CHUNK else last
            if after < last and time.monotonic() >= deadline:
                raise StoreError(f"cleared {gone} pages in time, not all of them; clear again")
        return gone

    def pages_of(self, namespace: int) -> Iterator[tuple[bytes, Located]]:
        """Every page of a namespace; read in chunks, so that writers can go on."""
        after = 0
        while rows := self._database.rows(
            "SELECT id, key, segment, slot, generation FROM pages WHERE id>? AND namespace=?"
            " ORDER BY id LIMIT ?",
            (after, namespace, _CHUNK),
        ):
            for _, key, *place in rows:
                yield key, Located(*place)
            after = rows[-1][0]

    # -- segments and claims ------------------------------------------------------------------

    def segments(self) -> list[SegmentFile]:
        """Every segment, by id."""
        rows = self._database.rows(f"SELECT {_SEGMENT_COLUMNS} FROM segments ORDER BY id")
        return [SegmentFile(*row) for row in rows]

    def segment(self, id_: int) -> SegmentFile | None:
        """One segment, None if it does not exist (any more)."""
        rows = self._database.rows(f"SELECT {_SEGMENT_COLUMNS} FROM segments WHERE id=?", (id_,))
        return SegmentFile(*rows[0]) if rows else None

    def reserve_segment_id(self) -> int:
        """An id that no segment had or will have."""
        with self._database.writing() as connection:
            cursor = connection.execute("INSERT INTO segments VALUES(NULL, 0, 0, 0, 0)")
            connection.execute("DELETE FROM segments WHERE id=?", (cursor.lastrowid,))
        return int(cursor.lastrowid or 0)

    def add_segment(self, segment: SegmentFile) -> None:
        """Enter a segment; its slots are fresh."""
        with self._database.writing() as connection:
            connection.execute(
                "INSERT INTO segments VALUES(?, ?, ?, ?, 0)",
                (segment.id, segment.directory, segment.record_bytes, segment.slots),
            )

    def oldest_use(self, record_bytes: int) -> int | None:
        """When the next page of this size to be evicted was used last."""
        query = "SELECT min(used) FROM pages WHERE record_bytes=?"
        rows = self._database.rows(query, (record_bytes,))
        return None if rows[0][0] is None else int(rows[0][0])

    def coldest_segment(
        self, not_record_bytes: int | None, used_before: int | None
    ) -> SegmentFile | None:
        """The segment whose youngest page was used longest ago, with no slot being written."""
        claimed = sql.segments_of(self._database.rows(sql.CLAIMED))
        rows = self._database.rows(
            f"SELECT {_SEGMENT_COLUMNS} FROM segments s WHERE record_bytes IS NOT ?1"
            " AND NOT EXISTS (SELECT 1 FROM pages WHERE segment=s.id AND used>=?2)"
            " ORDER BY (SELECT coalesce(max(used), 0) FROM pages WHERE segment=s.id), id",
            (not_record_bytes, used_before),
        )
        return next((SegmentFile(*row) for row in rows if row[0] not in claimed), None)

    def drop_segment(self, segment: SegmentFile) -> int | None:
        """Forget a segment and its pages; how many, or None if a slot of it is being written."""
        with self._database.writing() as connection:
            if segment.id in sql.segments_of(connection.execute(sql.CLAIMED)):
                return None
            pages = connection.execute("DELETE FROM pages WHERE segment=?", (segment.id,)).rowcount
            connection.execute(
                "DELETE FROM vacant WHERE record_bytes=? AND segment=?",
                (segment.record_bytes, segment.id),
            )
            connection.execute("DELETE FROM segments WHERE id=?", (segment.id,))
            sql.count_up(connection, "evicted_pages", pages)
            sql.count_up(connection, "dropped_segments", 1)
        return int(pages)

    def forget_slots_from(self, segment: SegmentFile, first: int) -> int:
        """Drop the pages in slots `first` and up of a segment (its file was cut short)."""
        with self._database.writing() as connection:
            delete = "DELETE FROM pages WHERE segment=? AND slot>=? RETURNING segment, slot"
            slots = connection.execute(delete, (segment.id, first)).fetchall()
            sql.vacate(connection, segment.record_bytes, slots)
        return len(slots)

    def claiming_writers(self) -> set[bytes]:
        """Who is writing, or was when it died."""
        return {writer for (writer,) in self._database.rows("SELECT DISTINCT writer FROM claims")}

    def end_claims(self, writer: bytes) -> int:
        """Make the slots of a dead writer vacant; how many."""
        freed = 0
        with self._database.writing() as connection:
            delete = "DELETE FROM claims WHERE writer=? RETURNING record_bytes, slots"
            rows = connection.execute(delete, (writer,)).fetchall()
            for record_bytes, packed in rows:
                slots = sql.unpack_slots(packed)
                sql.vacate(connection, record_bytes, slots)
                freed += len(slots)
        return freed

    def restore(self, segments: Mapping[SegmentFile, set[int]], pages: Iterable[PageRow]) -> None:
        """Enter what a scan found: segments, their slots that hold a page, and those pages."""
        with self._database.writing() as connection:
            for segment, used in segments.items():
                fresh = max(used, default=-1) + 1
                connection.execute(
                    "INSERT INTO segments VALUES(?, ?, ?, ?, ?)",
                    (segment.id, segment.directory, segment.record_bytes, segment.slots, fresh),
                )
                vacant = (slot for slot in range(fresh) if slot not in used)
                sql.vacate(connection, segment.record_bytes, ((segment.id, s) for s in vacant))
            connection.executemany(
                "INSERT INTO pages VALUES(NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)", pages
            )
            connection.execute(
                "UPDATE counters SET value=(SELECT coalesce(max(generation), 0) FROM pages)"
                " WHERE name='tick'"
            )

    def totals(self) -> tuple[int, int, int]:
        """(bytes of all segments, published pages, pages evicted since the index was made)."""
        pages = self._database.rows("SELECT count(*) FROM pages")[0][0]
        evicted = self._database.rows("SELECT value FROM counters WHERE name='evicted_pages'")
        return self.allocated_bytes(), int(pages), int(evicted[0][0])

    def allocated_bytes(self) -> int:
        """Bytes of all segments together."""
        total = "SELECT coalesce(sum(record_bytes * slots), 0) FROM segments"
        return int(self._database.rows(total)[0][0])
