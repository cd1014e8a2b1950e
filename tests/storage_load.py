"""Backup and prefetch threads on one connector, as SGLang runs them, with every byte compared.

How to use it:

    load = Load(connector, pool, deadline_s=1.0)
    with load.running():          # until the end of the block
        ...                       # faults come and go
    load.check()                  # raises for whatever went wrong in any thread

Contents follow from keys, so a page that is reported as read can be compared whatever happened in
between. When a call has returned, its host pages are given other bytes, and are watched until they
are used again: nobody may write them any more.
"""

import contextlib
import itertools
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import held_up
import pools

BATCH = 8
"""Pages of one call."""
SLACK_S = 2.0
"""Beyond its deadline a call may take so long on a busy machine, or for as long as it let wait."""
_SETS = 3
"""Sets of host pages that a thread uses in turn."""
BACKUPS, PREFETCHES = 1, 2
"""Threads of a load, unless it is told otherwise."""
_REUSED = 0xA5
_OWN = 1_000
"""Groups from here on belong to one thread."""
_FRESH = 10_000
"""Groups from here on are set once."""


def pages_for(threads: int) -> int:
    """Host pages for so many threads; the last sets are for calls of the test itself."""
    return (threads + 1) * _SETS * BATCH


PAGES = pages_for(BACKUPS + PREFETCHES)


def make_pool(*, pages: int = PAGES, **shape: Any) -> Any:
    """A pool for a load: 32 KiB a page unless told otherwise."""
    return pools.make_mha_pool(
        "page_first_direct",
        **{"pages": pages, "page_size": 16, "layers": 4, "heads": 2, "head_dim": 64, **shape},
    )


class Load:
    """Threads that set, ask and get the same few groups of pages, over and over; every other set
    is of a new group.

    Args:
        connector: with `pool` registered as the anchor.
        deadline_s: what its settings say.
        groups: how many prefixes of BATCH pages there are.
        seed: of the contents and of the order.
        backups: threads that set.
        prefetches: threads that ask and get, all groups.
        others: threads that set, ask and get groups of their own.
    """

    def __init__(
        self,
        connector: Any,
        pool: Any,
        *,
        deadline_s: float,
        groups: int = 6,
        seed: int = 0,
        backups: int = BACKUPS,
        prefetches: int = PREFETCHES,
        others: int = 0,
    ) -> None:
        self.connector = connector
        self.pool = pool
        self.groups = groups
        self.stored: set[int] = set()
        """Groups whose set was True for every page."""
        self.longest_s = 0.0
        """The longest call so far, or since `count_anew`."""
        self.counts: Counter[str] = Counter()
        """Calls ("set", "get", "exists"), pages that were read, and pages that were stored and not
        there before; since then, too."""
        self._seed = seed
        self._deadline_s = deadline_s
        self._work = (
            [self._backup] * backups + [self._prefetch] * prefetches + [self._alone] * others
        )
        self._own = len(self._work)
        self._nbytes = len(pools.page_bytes(pool, 0))
        self._watched: dict[tuple[int, int], bool] = {}
        self._unused = itertools.count(_FRESH)
        self._errors: list[BaseException] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        held_up.watch()

    # -- what the tests do ----------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Backup and prefetch threads, for the length of the block."""
        self._stop.clear()
        threads = [
            threading.Thread(target=self._repeat, args=(work, number), name=f"load-{number}")
            for number, work in enumerate(self._work)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def run(self, seconds: float) -> None:
        """The threads for some seconds; raises what went wrong."""
        with self.running():
            time.sleep(seconds)
        self.check()

    def check(self) -> None:
        """Raise the first error of any thread, or for a host page that changed after its call."""
        self.raise_error()
        for owner, turn in list(self._watched):
            self._look(owner, turn)

    def raise_error(self) -> None:
        """Raise the first error of any thread so far."""
        if self._errors:
            raise self._errors[0]

    def count_anew(self) -> Counter[str]:
        """New `counts`, of calls that begin from now on."""
        with self._lock:
            self.counts, self.longest_s = Counter(), 0.0
            return self.counts

    def wait_until(self, what: str, reached: Callable[[], bool], seconds: float) -> None:
        """Block until it is; raises an error of any thread at once."""
        end = time.monotonic() + seconds
        while not reached():
            self.raise_error()
            assert time.monotonic() < end, f"not within {seconds} s: {what}"
            time.sleep(0.05)

    def set(self, group: int) -> list[bool]:
        """One set by the test itself."""
        return self._set(self._own, 0, group)

    def get(self, group: int, thread: int | None = None) -> list[bool]:
        """One get by the test itself; raises for a wrong byte. Gets at the same time need host
        pages each: those of `thread`, 0 to 3, while the threads do not run."""
        return self._get(self._own if thread is None else thread, 1, group)

    def exists(self, group: int) -> int:
        """One exists by the test itself."""
        with self._timed("exists"):
            found: int = self.connector.batch_exists(self.keys(group))
        assert 0 <= found <= BATCH
        return found

    def wait_works(self, seconds: float = 30.0) -> float:
        """Block until a set and a get of a fresh group are True throughout; the seconds it took."""
        begin = time.monotonic()
        while not self._works(next(self._unused)):
            took = time.monotonic() - begin
            assert took < seconds, f"storage does not work again after {took:.0f} s"
            time.sleep(0.05)
        return time.monotonic() - begin

    def _works(self, group: int) -> bool:
        return all(self.set(group)) and self.exists(group) == BATCH and all(self.get(group))

    def keys(self, group: int) -> list[str]:
        return [f"{group:032x}{page:032x}" for page in range(BATCH)]

    def content(self, group: int, page: int) -> bytes:
        """What a page of a group holds."""
        return np.random.default_rng([self._seed, group, page]).bytes(self._nbytes)

    # -- calls ----------------------------------------------------------------------------------

    def _repeat(self, work: Any, number: int) -> None:
        try:
            turn = 0
            while not self._stop.is_set():
                work(number, turn % _SETS, turn)
                turn += 1
                # While a circuit is open, calls return at once.
                time.sleep(0.001)
        except BaseException as error:  # noqa: BLE001 - raised again by `check`
            self._errors.append(error)

    def _backup(self, owner: int, turn: int, count: int) -> None:
        known = count // 2 % self.groups
        self._set(owner, turn, next(self._unused) if count % 2 else known)

    def _prefetch(self, owner: int, turn: int, count: int) -> None:
        group = (count * 5 + owner) % self.groups
        self.exists(group)
        self._get(owner, turn, group)

    def _alone(self, owner: int, turn: int, count: int) -> None:
        group = _OWN + owner * self.groups + count // 2 % self.groups
        if count % 2:
            self.exists(group)
            self._get(owner, turn, group)
        else:
            self._set(owner, turn, group)

    def _set(self, owner: int, turn: int, group: int) -> list[bool]:
        places = self._take(owner, turn)
        for page, place in enumerate(places):
            self._write(place, self.content(group, page))
        with self._timed("set") as counts:
            flags: list[bool] = self.connector.batch_set_v1(self.keys(group), self._indices(places))
        self._reuse(owner, turn)
        assert len(flags) == BATCH
        with self._lock:
            counts["stored"] += sum(flags) if group >= _FRESH else 0
            if all(flags):
                self.stored.add(group)
        return flags

    def _get(self, owner: int, turn: int, group: int) -> list[bool]:
        places = self._take(owner, turn)
        with self._timed("get") as counts:
            flags: list[bool] = self.connector.batch_get_v1(self.keys(group), self._indices(places))
        assert len(flags) == BATCH
        for page, (place, good) in enumerate(zip(places, flags, strict=True)):
            if good:
                read = pools.page_bytes(self.pool, place)
                assert read == self.content(group, page), f"wrong bytes: group {group} page {page}"
        self._reuse(owner, turn)
        with self._lock:
            counts["read"] += sum(flags)
        return flags

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[Counter[str]]:
        """Time a call, and count it where the block is to count what comes of it."""
        counts, begin = self.counts, time.monotonic()
        yield counts
        took = time.monotonic() - begin
        with self._lock:
            counts[name] += 1
            if counts is self.counts:
                self.longest_s = max(self.longest_s, took)
        late = took - self._deadline_s
        assert late <= SLACK_S or late <= held_up.held_up_since(begin), (
            f"{name} took {took:.1f} s, {late:.1f} s beyond its deadline"
        )

    # -- host pages -----------------------------------------------------------------------------

    def _places(self, owner: int, turn: int) -> list[int]:
        first = (owner * _SETS + turn) * BATCH
        return list(range(first, first + BATCH))

    def _indices(self, places: list[int]) -> Any:
        return pools.token_indices(places, self.pool.page_size)

    def _take(self, owner: int, turn: int) -> list[int]:
        if self._watched.pop((owner, turn), False):
            self._look(owner, turn)
        return self._places(owner, turn)

    def _reuse(self, owner: int, turn: int) -> None:
        """The call is over: its host pages serve something else."""
        for place in self._places(owner, turn):
            self._write(place, bytes([_REUSED]) * self._nbytes)
        self._watched[owner, turn] = True

    def _look(self, owner: int, turn: int) -> None:
        for place in self._places(owner, turn):
            now = pools.page_bytes(self.pool, place)
            assert now == bytes([_REUSED]) * self._nbytes, f"host page {place} was written later"

    def _write(self, place: int, content: bytes) -> None:
        flat = np.frombuffer(content, np.uint8).copy()
        buffer = self.pool.kv_buffer
        half = self._nbytes // 2
        for part in range(2):
            target = buffer[part][place].reshape(-1).view(pools.torch.uint8).numpy()
            target[:] = flat[part * half : (part + 1) * half]


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    files: Counter[str]
    """Open descriptors, by what they refer to, without those of connections."""
    connections: int
    """Sockets, or the events that clients keep for each, whichever are more."""
    threads: Counter[str]
    resident_bytes: int

    @classmethod
    def now(cls) -> "Held":
        files: Counter[str] = Counter()
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target = str(descriptor.readlink())
                if not target.startswith("/proc/"):  # this listing itself
                    files[re.sub(r":\[\d+\]", "", target)] += 1
        connections = max(files.pop("socket", 0), files.pop("anon_inode:[eventfd]", 0))
        threads: Counter[str] = Counter()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                threads[(task / "comm").read_text().strip()] += 1
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(files, connections, threads, pages * os.sysconf("SC_PAGE_SIZE"))
