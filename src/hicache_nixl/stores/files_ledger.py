"""What each writer has added, and how full the store is: two kinds of small files.

    <directory>/writers/<owner>    {"added": bytes, "wanted": bytes, "clears": number,
                                   "closed": bool}, by each writer
    <directory>/usage.json         by the sweeper: what is used, and which `added` that includes

Between two looks at the directory tree the sweeper knows from the writers how much has come. A
writer knows from `usage.json` how much room is left, and takes no more than its share of that until
it is told anew: so all of them together stay within the capacity, although none knows what the
others have added meanwhile.

How much a `clear` removed, nobody tells: of what it removed, the sweeper may have seen one part
before and not the other. It is told that there was one, and looks at everything again.
"""

import json
import logging
import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hicache_nixl.errors import StoreError
from hicache_nixl.stores.directory import UNREADABLE, write_json
from hicache_nixl.stores.files_layout import FilesRoot, Owner, names_in

logger = logging.getLogger(__name__)

PUBLISH_SHARE = 64
"""A writer publishes at once what it has added since the last time when that is more than this part
of the capacity."""
_CONTENT_BYTES = 128  # always as many, so that a file is never seen half replaced
_HEARTBEAT_S = 60.0
_ABANDONED_NS = 3600 * 10**9
_WANTED_S = 5.0
"""A writer waits for no longer, and one that has died wants nothing."""


@dataclass(frozen=True)
class Usage:
    """How full a store was; bytes."""

    used_bytes: int
    pages: int
    evicted_pages: int
    grain_ns: int
    included: dict[str, int] = field(default_factory=dict)
    """Of each writer, how much of what it added is in `used_bytes`."""


@dataclass(frozen=True)
class Said:
    """What a writer tells; bytes, but for `clears`, all since it was opened."""

    added: int = 0
    wanted: int = 0
    """What is to be, where there was too little room."""
    clears: int = 0
    """How many times it cleared a namespace."""
    closed: bool = False


def most_room(capacity_bytes: int) -> int:
    """How much of a store is emptied at most, so that every writer gets what one wants."""
    return capacity_bytes // 2


class Ledger:
    """This writer's file. Safe for threads.

    Args:
        capacity_bytes: budget of the store.
    """

    def __init__(self, root: FilesRoot, owner: Owner, capacity_bytes: int) -> None:
        self._path = root.writers / str(owner)
        self._owner = str(owner)
        self._lock = threading.Lock()
        self._capacity = capacity_bytes
        self._added = 0
        self._clears = 0
        self._reserved: dict[object, int] = {}
        self._wants: dict[object, int] = {}
        self._published: dict[str, Any] = {}
        self._published_at = 0.0
        self._usage: Usage | None = None

    def adopt(self, usage: Usage) -> None:
        """Take how full the store is."""
        self._usage = usage

    @property
    def usage(self) -> Usage | None:
        """How full the store was when this process last heard of it."""
        return self._usage

    def state(self) -> Said:
        """What there is to tell, in one instant."""
        with self._lock:
            short = sum(self._wants.values())
            wanted = short + sum(self._reserved.values()) if short else 0
            return Said(self._added, wanted, self._clears)

    def take(self, nbytes: int, step: int, call: object) -> int:
        """Reserve room for pages of `step` bytes, at most `nbytes`; bytes that there was room for.

        They are reserved for `call` until it settles. What there is no room for is wanted by it,
        until it takes again.
        """
        with self._lock:
            granted = min(nbytes, self._room()) // step * step
            self._reserved[call] = self._reserved.get(call, 0) + granted
            self._wants[call] = nbytes - granted
        return granted

    def _room(self) -> int:
        usage, own = self._usage, self._added + sum(self._reserved.values())
        if usage is None:  # nobody has looked yet
            return 0
        since = own - usage.included.get(self._owner, 0)
        return max(0, (self._capacity - usage.used_bytes) // self._writers() - since)

    def _writers(self) -> int:
        included = {} if self._usage is None else self._usage.included
        return len(included.keys() | {self._owner})

    @property
    def share(self) -> int:
        """Bytes of room that the sweeper makes for one writer at most."""
        return most_room(self._capacity) // self._writers()

    def want_no_more(self, call: object) -> None:
        """`call` makes do with what it has."""
        with self._lock:
            self._wants.pop(call, None)

    def settle(self, call: object, nbytes: int) -> None:
        """`call` has made pages of `nbytes` of what was reserved for it; it needs the rest not."""
        with self._lock:
            self._added += nbytes
            self._reserved.pop(call, None)
            self._wants.pop(call, None)

    def cleared(self) -> None:
        """Pages have gone."""
        with self._lock:
            self._clears += 1

    def is_due(self) -> bool:
        """Whether enough was added to tell it at once."""
        unsaid = self._added - int(self._published.get("added", 0))
        return unsaid > self._capacity // PUBLISH_SHARE

    def publish(self, *, closed: bool = False) -> int | None:
        """Write the file if there is news or it is time for a sign of life. Raises StoreError.

        The time the file system gave it, in ns; None if it was not written.
        """
        # A page is told of when it is there, so that the sweeper, which may have seen it before,
        # counts it twice for a moment rather than not at all.
        content = vars(replace(self.state(), closed=closed))
        now = time.monotonic()
        if content == self._published and now - self._published_at < _HEARTBEAT_S:
            return None
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, json.dumps(content).ljust(_CONTENT_BYTES).encode())
                mtime_ns = os.fstat(descriptor).st_mtime_ns
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error.strerror}") from error
        self._published, self._published_at = content, now
        return mtime_ns


class WriterFiles:
    """The files of all writers, as the sweeper reads them. Belongs to one thread.

    Args:
        own: of this process, which need not be read to be known.
        capacity_bytes: budget of the store.
    """

    def __init__(self, root: FilesRoot, owner: Owner, own: Ledger, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._directory = root.writers
        self._owner = owner
        self._own = own
        self._said: dict[str, tuple[Said, float]] = {}
        self.clears = 0
        """How many times a namespace was cleared, as far as was told."""

    @property
    def included(self) -> dict[str, int]:
        """Of each writer, how much of what it added was in `growth`."""
        return {name: said.added for name, (said, _) in self._said.items()}

    @property
    def wanted(self) -> int:
        """Room for as much as a writer that found too little wanted a moment ago, for each."""
        since = time.monotonic() - _WANTED_S
        most = max((said.wanted for said, at in self._said.values() if at > since), default=0)
        return min(most * len(self._said), most_room(self._capacity))

    def growth(self, now_ns: int) -> int:
        """Bytes added by all since the last call. Files of the dead are removed. Raises OSError."""
        grown = 0
        names = names_in(self._directory)
        for name in names:
            said = self._read(name)
            if said is None:
                continue
            known = self._said.get(name)
            before = known[0] if known else Said()
            grown += said.added - before.added
            self.clears += said.clears - before.clears
            if known is None or said != before:
                self._said[name] = (said, time.monotonic())
            if said.closed or self._is_abandoned(name, now_ns):
                (self._directory / name).unlink(missing_ok=True)
        for name in self._said.keys() - set(names):
            del self._said[name]
        return grown

    def _read(self, name: str) -> Said | None:
        if name == str(self._owner):
            return self._own.state()
        if Owner.parse(name) is None:
            return None
        try:
            content = json.loads((self._directory / name).read_text())
            return Said(
                int(content["added"]),
                int(content["wanted"]),
                int(content["clears"]),
                bool(content["closed"]),
            )
        except UNREADABLE:  # it is just being written, or gone
            return None

    def _is_abandoned(self, name: str, now_ns: int) -> bool:
        if name == str(self._owner):
            return False
        if self._owner.knows_dead(name):
            return True
        try:
            return (self._directory / name).stat().st_mtime_ns < now_ns - _ABANDONED_NS
        except OSError:
            return False


def write_usage(path: Path, usage: Usage) -> None:
    """Tell the writers. Raises StoreError."""
    write_json(path, vars(usage), durable=False)


def read_usage(path: Path) -> Usage | None:
    """What the sweeper told last; None if it told nothing that can be read."""
    try:
        content = json.loads(path.read_text())
        usage = Usage(
            used_bytes=int(content["used_bytes"]),
            pages=int(content["pages"]),
            evicted_pages=int(content["evicted_pages"]),
            grain_ns=int(content["grain_ns"]),
            included={str(name): int(added) for name, added in content["included"].items()},
        )
        if min(usage.used_bytes, usage.pages, usage.evicted_pages) < 0 or usage.grain_ns < 1:
            raise ValueError("a count below zero")
        return usage
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        logger.info("%s cannot be used: %s", path, error)
        return None
