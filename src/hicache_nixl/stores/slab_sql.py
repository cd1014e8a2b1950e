"""The tables of a slab store's index, and the statements that several of its methods share."""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_nixl.errors import StoreError

SCHEMA = """
CREATE TABLE namespaces(
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, manifest TEXT NOT NULL);
CREATE TABLE segments(
    id INTEGER PRIMARY KEY AUTOINCREMENT, directory INTEGER NOT NULL,
    record_bytes INTEGER NOT NULL, slots INTEGER NOT NULL);
CREATE TABLE pages(
    namespace INTEGER NOT NULL, key BLOB NOT NULL, segment INTEGER NOT NULL, slot INTEGER NOT NULL,
    generation INTEGER NOT NULL, record_bytes INTEGER NOT NULL, used INTEGER NOT NULL,
    depth INTEGER NOT NULL, PRIMARY KEY(namespace, key)) WITHOUT ROWID;
CREATE INDEX pages_by_use ON pages(record_bytes, used, depth DESC);
CREATE INDEX pages_by_segment ON pages(segment, used);
CREATE TABLE vacant(
    record_bytes INTEGER NOT NULL, slot INTEGER NOT NULL, segment INTEGER NOT NULL,
    PRIMARY KEY(record_bytes, slot, segment)) WITHOUT ROWID;
CREATE TABLE claims(
    segment INTEGER NOT NULL, slot INTEGER NOT NULL, writer BLOB NOT NULL,
    PRIMARY KEY(segment, slot)) WITHOUT ROWID;
CREATE TABLE counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES('evicted_pages', 0), ('dropped_segments', 0), ('tick', 0);
PRAGMA user_version = 1;
"""

IN_CHUNK = 128

Slot = tuple[int, int]
"""(segment, slot)"""

Touch = tuple[int, bytes, int]
"""A use of a page: (namespace, key, tick)"""


@dataclass(frozen=True)
class Located:
    """Where a published page lies."""

    segment: int
    slot: int
    generation: int


@dataclass(frozen=True)
class NewPage:
    """A page whose record is written, to be published."""

    key: bytes
    segment: int
    slot: int
    depth: int


def _in_list(count: int) -> str:
    return ",".join("?" * count)


def _padded_chunks(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Chunks of few different lengths, so that few statements are compiled; repeats do no harm."""
    for start in range(0, len(keys), IN_CHUNK):
        chunk = list(keys[start : start + IN_CHUNK])
        size = 8
        while size < len(chunk):
            size *= 2
        yield chunk + [chunk[-1]] * (size - len(chunk))


def locate(
    connection: sqlite3.Connection, namespace: int, keys: Sequence[bytes]
) -> dict[bytes, Located]:
    found: dict[bytes, Located] = {}
    for chunk in _padded_chunks(keys):
        rows = connection.execute(
            "SELECT key, segment, slot, generation FROM pages WHERE namespace=? AND key IN"
            f" ({_in_list(len(chunk))})",
            (namespace, *chunk),
        )
        found.update((key, Located(*place)) for key, *place in rows)
    return found


def present(connection: sqlite3.Connection, namespace: int, keys: Sequence[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    for chunk in _padded_chunks(keys):
        rows = connection.execute(
            f"SELECT key FROM pages WHERE namespace=? AND key IN ({_in_list(len(chunk))})",
            (namespace, *chunk),
        )
        found.update(key for (key,) in rows)
    return found


def touch(connection: sqlite3.Connection, touches: Iterable[Touch]) -> None:
    connection.executemany(
        "UPDATE pages SET used=?3 WHERE namespace=?1 AND key=?2 AND used<?3", touches
    )


def vacate(connection: sqlite3.Connection, record_bytes: int, slots: Sequence[Slot]) -> None:
    connection.executemany(
        "INSERT INTO vacant VALUES(?, ?, ?)",
        [(record_bytes, slot, segment) for segment, slot in slots],
    )


def count(connection: sqlite3.Connection, name: str, by: int) -> None:
    connection.execute("UPDATE counters SET value=value+? WHERE name=?", (by, name))


@contextlib.contextmanager
def as_store_error(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"the index {path} failed: {error}") from error
