"""The tables of a slab store's index, and the statements that several of its methods share."""

import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import xxhash

FORMAT = 1

# Pages are found by a 63-bit hash: such an index is an eighth of one by key, and as it is the one
# whose entries lie at random, it is most of what a put writes. Small database pages serve the same
# end. `id` grows with every page published, so that pages written together lie together.
SCHEMA = f"""
CREATE TABLE namespaces(
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, manifest TEXT NOT NULL);
CREATE TABLE segments(
    id INTEGER PRIMARY KEY AUTOINCREMENT, directory INTEGER NOT NULL,
    record_bytes INTEGER NOT NULL, slots INTEGER NOT NULL, fresh INTEGER NOT NULL);
CREATE TABLE pages(
    id INTEGER PRIMARY KEY, hash INTEGER NOT NULL, namespace INTEGER NOT NULL, key BLOB NOT NULL,
    segment INTEGER NOT NULL, slot INTEGER NOT NULL, generation INTEGER NOT NULL,
    record_bytes INTEGER NOT NULL, used INTEGER NOT NULL, depth INTEGER NOT NULL);
CREATE UNIQUE INDEX pages_by_hash ON pages(hash);
CREATE INDEX pages_by_use ON pages(record_bytes, used, depth DESC);
CREATE INDEX pages_by_segment ON pages(segment, id DESC);
CREATE TABLE vacant(
    record_bytes INTEGER NOT NULL, slot INTEGER NOT NULL, segment INTEGER NOT NULL,
    PRIMARY KEY(record_bytes, slot, segment)) WITHOUT ROWID;
CREATE TABLE claims(
    id INTEGER PRIMARY KEY AUTOINCREMENT, writer BLOB NOT NULL, record_bytes INTEGER NOT NULL,
    slots BLOB NOT NULL);
CREATE TABLE counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES('evicted_pages', 0), ('dropped_segments', 0), ('tick', 0);
PRAGMA user_version = {FORMAT};
"""
PAGE_SIZE = 1024
CLAIMED = "SELECT slots FROM claims"

_IN_CHUNK = 128
_SLOT = struct.Struct("<qq")

Slot = tuple[int, int]
"""(segment, slot)"""

Touch = tuple[int, bytes, int]
"""A use of a page: (namespace, key, tick)"""

PageRow = tuple[int, int, bytes, int, int, int, int, int, int]
"""A row of `pages` without its id."""


class Located(NamedTuple):
    """Where a published page lies."""

    segment: int
    slot: int
    generation: int


@dataclass(frozen=True)
class NewPage:
    """A page whose record is written, to be published."""

    key: bytes
    slot: Slot
    depth: int


@dataclass(frozen=True)
class Claim:
    """Slots that one put may write, and the generation it writes into their trailers."""

    id: int
    generation: int
    record_bytes: int
    slots: list[Slot]

    def with_slots(self, slots: list[Slot]) -> "Claim":
        """The same claim on other slots."""
        return replace(self, slots=slots)


def page_hash(namespace: int, key: bytes) -> int:
    """What a page is found by. Two pages of one hash cannot both be published."""
    return xxhash.xxh3_64_intdigest(key, seed=namespace) >> 1  # SQLite's integers are signed


def pack_slots(slots: Iterable[Slot]) -> bytes:
    return b"".join(_SLOT.pack(*slot) for slot in slots)


def unpack_slots(packed: bytes) -> list[Slot]:
    return [(segment, slot) for segment, slot in _SLOT.iter_unpack(packed)]


def padded_chunks(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Chunks of few different lengths, so that few statements are compiled; repeats do no harm."""
    for start in range(0, len(keys), _IN_CHUNK):
        chunk = list(keys[start : start + _IN_CHUNK])
        size = 8
        while size < len(chunk):
            size *= 2
        yield chunk + [chunk[-1]] * (size - len(chunk))


def find(columns: str, namespace: int, chunk: Sequence[bytes]) -> tuple[str, list[int]]:
    """The statement, and its parameters, that finds the published pages of a padded chunk."""
    marks = ",".join("?" * len(chunk))
    return (
        f"SELECT {columns} FROM pages WHERE hash IN ({marks}) AND namespace=?",
        [*(page_hash(namespace, key) for key in chunk), namespace],
    )


def next_tick(connection: sqlite3.Connection, now_ns: int) -> int:
    """A tick that nobody got before; a clock that was set back does not matter."""
    row = connection.execute(
        "UPDATE counters SET value=max(value + 1, ?) WHERE name='tick' RETURNING value", (now_ns,)
    ).fetchone()
    return int(row[0])


def touch(connection: sqlite3.Connection, touches: Iterable[Touch]) -> None:
    connection.executemany(
        "UPDATE pages SET used=?1 WHERE hash=?2 AND namespace=?3 AND key=?4 AND used<?1",
        ((tick, page_hash(number, key), number, key) for number, key, tick in touches),
    )


def take_vacant(connection: sqlite3.Connection, record_bytes: int, count: int) -> list[Slot]:
    """Slots that pages have left."""
    slots = connection.execute(
        "SELECT segment, slot FROM vacant WHERE record_bytes=? ORDER BY slot, segment LIMIT ?",
        (record_bytes, count),
    ).fetchall()
    connection.executemany(
        "DELETE FROM vacant WHERE record_bytes=? AND slot=? AND segment=?",
        [(record_bytes, slot, segment) for segment, slot in slots],
    )
    return slots


def take_fresh(connection: sqlite3.Connection, record_bytes: int, count: int) -> list[Slot]:
    """Slots that were never written, evenly from all directories."""
    taken: list[Slot] = []
    while count > len(taken):
        segments = connection.execute(
            "SELECT min(id), fresh, slots FROM segments WHERE record_bytes=? AND fresh<slots"
            " GROUP BY directory",
            (record_bytes,),
        ).fetchall()
        if not segments:
            break
        share = -(-(count - len(taken)) // len(segments))
        for id_, fresh, slots in segments:
            end = min(fresh + share, fresh + count - len(taken), slots)
            taken += [(id_, slot) for slot in range(fresh, end)]
            connection.execute("UPDATE segments SET fresh=? WHERE id=?", (end, id_))
    return taken


def evict(
    connection: sqlite3.Connection, record_bytes: int, used_before: int, count: int
) -> list[Slot]:
    """The slots of the pages that were used longest ago, the deepest of a prefix first."""
    slots = connection.execute(
        "DELETE FROM pages WHERE id IN (SELECT id FROM pages WHERE record_bytes=? AND used<?"
        " ORDER BY used, depth DESC LIMIT ?) RETURNING segment, slot",
        (record_bytes, used_before, count),
    ).fetchall()
    if slots:
        count_up(connection, "evicted_pages", len(slots))
    return slots


def vacate(connection: sqlite3.Connection, record_bytes: int, slots: Iterable[Slot]) -> None:
    connection.executemany(
        "INSERT INTO vacant VALUES(?, ?, ?)",
        ((record_bytes, slot, segment) for segment, slot in slots),
    )


def segments_of(rows: Iterable[tuple[bytes]]) -> set[int]:
    """Ids of the segments that packed slots lie in."""
    return {segment for (packed,) in rows for segment, _ in unpack_slots(packed)}


def count_up(connection: sqlite3.Connection, name: str, by: int) -> None:
    connection.execute("UPDATE counters SET value=value+? WHERE name=?", (by, name))
