"""Keeps a files store within its budget: looks at a few directories at a time, evicts, cleans up.

Keys are hashes, so each of the 256 first-level directories (of all namespaces together: a bucket)
holds about as much as any other. The sweeper goes through them in turn and remembers of each how
much it held and the pages used longest ago. What comes between two visits it takes from what the
writers say they added; after a `clear` it goes through all of them at once. When the store is
nearly full it removes the oldest of the pages it remembers, after asking the file system whether
they were used since, and looks again at a bucket whose oldest pages are all gone. So evicting a
page costs a few calls, however many are stored, and what is evicted are the pages used longest ago,
the deepest of a prefix first (`files_uses.py`).

This module knows directories and times. Who sweeps, it does not decide.
"""

import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hicache_nixl.errors import StoreError
from hicache_nixl.stores.files_clock import FileClock
from hicache_nixl.stores.files_crew import Crew
from hicache_nixl.stores.files_layout import FAN_OUT, Entry, FilesRoot, Owner, entries_of
from hicache_nixl.stores.files_ledger import Ledger, Usage, WriterFiles
from hicache_nixl.stores.files_uses import FINEST_GRAIN_NS, grain_for

logger = logging.getLogger(__name__)

HIGH_WATER = 0.95
LOW_WATER = 0.90
_OLDEST_KEPT = 256
_EVICT_TOGETHER = 64
_LOOK_TOGETHER = 16
_WIDTH = 16
_CALL_LIMIT_S = 60.0
_IDLE_CYCLE_S = 60.0
_REST = 20
"""How many times as long as looking at everything took the sweeper rests before it starts again,
where something was added; where nothing was, it rests `_IDLE_CYCLE_S`."""
_LEFTOVER_NS = 3600 * 10**9
"""Longer than any deadline: what is being written for so long has lost its writer."""
_FUTURE_NS = 10 * 10**9
"""Hosts see the file system's time alike, but for the duration of a call."""
_REMOVED, _GONE = -1, -2


@dataclass
class _Bucket:
    """What one first-level directory of all namespaces held when it was looked at."""

    nbytes: int = 0
    pages: int = 0
    growth_before: int = 0
    oldest: list[Entry] = field(default_factory=list)
    horizon: int = 0
    """Pages used before this are all in `oldest`."""


@dataclass
class _Cycle:
    """One look at everything."""

    growth: int = -1
    """What had been added when it began."""
    worked_s: float = 0.0
    ended_at: float | None = None
    """When this one ended, or the one before it."""


class Sweeper:
    """Counts and evicts. Belongs to one thread; blocks as long as it was given time for.

    Args:
        capacity_bytes: budget of all page records together.
        crew: threads that make the calls.
        may_go_on: asked before anything is removed.
        stamp_uses: called before pages are, so that those used a moment ago are not.
    """

    def __init__(
        self,
        root: FilesRoot,
        owner: Owner,
        ledger: Ledger,
        *,
        capacity_bytes: int,
        clock: FileClock,
        crew: Crew,
        may_go_on: Callable[[], bool],
        stamp_uses: Callable[[], object],
    ) -> None:
        self._root = root
        self._owner = owner
        self._ledger = ledger
        self._capacity = capacity_bytes
        self._clock = clock
        self._crew = crew
        self._may_go_on = may_go_on
        self._stamp_uses = stamp_uses
        self._writers = WriterFiles(root, owner, ledger, capacity_bytes)
        self._buckets = [_Bucket() for _ in FAN_OUT]
        self._cursor = 0
        self._growth = 0
        self._inherited: int | None = None
        self._cycle = _Cycle()
        self._clears = 0
        self._counts_anew = False
        self._may_count_anew = True
        self._making_room = False
        self._grain_ns = FINEST_GRAIN_NS
        self._evicted = 0

    def begin(self, before: Usage | None) -> None:
        """Start anew, because this process has just become the sweeper. `before` is what the last
        one told. Raises OSError."""
        self._writers = WriterFiles(self._root, self._owner, self._ledger, self._capacity)
        self._writers.growth(self._clock.now_ns())
        self._root.remove_drafts(self._clock.now_ns() - _LEFTOVER_NS)
        self._buckets = [_Bucket() for _ in FAN_OUT]
        self._growth = 0
        self._cursor = 0
        self._clears = self._writers.clears
        self._counts_anew, self._may_count_anew = False, True
        self._inherited = None
        self._evicted = 0
        if before is not None:
            since = [
                added - before.included.get(name, 0)
                for name, added in self._writers.included.items()
            ]
            self._inherited = before.used_bytes + sum(since)
            self._evicted = before.evicted_pages
        self._cycle = _Cycle()

    # -- how full ---------------------------------------------------------------------------------

    @property
    def is_known(self) -> bool:
        """Whether every directory was looked at once."""
        return self._cycle.ended_at is not None

    def used_bytes(self) -> int:
        """Bytes of all records that were seen or told of since this process sweeps."""
        counted = sum(bucket.nbytes for bucket in self._buckets)
        grown = sum(self._growth - bucket.growth_before for bucket in self._buckets)
        return max(0, counted + grown // len(self._buckets))

    def usage(self) -> Usage | None:
        """What the writers are told. Until everything was seen, it relies on the last sweeper; None
        if there was none."""
        used = self.used_bytes()
        if not self.is_known:
            if self._inherited is None:
                return None
            used = max(used, self._inherited + self._growth)
        return Usage(
            used,
            sum(bucket.pages for bucket in self._buckets),
            self._evicted,
            self._grain_ns,
            self._writers.included,
        )

    def _set_grain(self) -> None:
        first = min((e.mtime_ns for b in self._buckets for e in b.oldest[:1]), default=None)
        self._grain_ns = (
            FINEST_GRAIN_NS if first is None else grain_for(self._clock.now_ns() - first)
        )

    # -- one round --------------------------------------------------------------------------------

    def round(self, seconds: float, *, told: Callable[[Usage | None], None]) -> None:
        """Work for about `seconds`, or longer by one directory. Raises OSError.

        Looks at directories that are due, and evicts while the store is too full; `told` gets the
        usage whenever room was made.
        """
        end = time.monotonic() + seconds
        self._set_grain()
        while True:
            self._growth += self._writers.growth(self._clock.now_ns())
            self._note_clears()
            if self.is_known and not self._counts_anew and self._is_too_full():
                self._make_room(end, told)
            elif not self._is_due():
                return
            else:
                self._look_at_next()
            if time.monotonic() >= end or not self._may_go_on():
                return

    def is_behind(self) -> bool:
        """Whether there is work that should not wait."""
        return not self.is_known or self._counts_anew or self._is_too_full()

    def _note_clears(self) -> None:
        """After a `clear`, look at everything before more is evicted; then evict what is to be
        before the next time, so that clears without end do not keep the store too full."""
        is_free = self.is_known and not self._counts_anew and self._may_count_anew
        if is_free and self._clears != self._writers.clears:
            self._clears = self._writers.clears
            self._counts_anew, self._may_count_anew = True, False
            self._begin_cycle()

    def _is_due(self) -> bool:
        cycle, now = self._cycle, time.monotonic()
        if self._cursor or cycle.ended_at is None or self._counts_anew:
            return True
        rest = _REST * cycle.worked_s if self._growth != cycle.growth else _IDLE_CYCLE_S
        if now - cycle.ended_at < min(rest, _IDLE_CYCLE_S):
            return False
        self._begin_cycle()
        return True

    def _begin_cycle(self) -> None:
        self._cursor = 0
        self._cycle = _Cycle(self._growth, ended_at=self._cycle.ended_at)

    def _is_too_full(self) -> bool:
        """From the high mark, or a writer that finds no room, down to the low mark."""
        used, wanted = self.used_bytes(), self._writers.wanted
        self._making_room = used > self._target() and (
            self._making_room
            or used > HIGH_WATER * self._capacity
            or used + wanted > self._capacity
        )
        self._may_count_anew |= not self._making_room
        return self._making_room

    def _target(self) -> int:
        return min(int(LOW_WATER * self._capacity), self._capacity - self._writers.wanted)

    # -- looking ----------------------------------------------------------------------------------

    def _look(self, number: int) -> None:
        """Count one bucket and remember its oldest pages."""
        leaves = self._root.leaves(FAN_OUT[number])
        began_ns = self._clock.now_ns()
        deadline = time.monotonic() + _CALL_LIMIT_S
        listings = self._crew.map(entries_of, leaves, deadline=deadline, width=_WIDTH)
        now = self._clock.now_ns()
        pages: list[Entry] = []
        writing = 0
        for leaf, entries in zip(leaves, listings, strict=True):
            if entries is None:
                return  # the file system hangs; what was known of it stays
            for entry in entries:
                if entry.owner is None:
                    pages.append(entry)
                elif not self._remove_leftover(entry, now):
                    writing += entry.nbytes
            if not entries:
                self._remove_empty(leaf, now)
        oldest = heapq.nsmallest(_OLDEST_KEPT, pages, key=lambda entry: _used(entry, now))
        self._buckets[number] = _Bucket(
            nbytes=sum(entry.nbytes for entry in pages) + writing,
            pages=len(pages),
            growth_before=self._growth,
            oldest=oldest,
            # What comes after the look may carry a time that is older by a grain.
            horizon=_used(oldest[-1], now)
            if len(oldest) < len(pages)
            else began_ns - self._grain_ns,
        )

    def _look_at_next(self) -> None:
        number, began = self._cursor, time.monotonic()
        self._cursor = (number + 1) % len(self._buckets)
        try:
            self._look(number)
        finally:
            self._cycle.worked_s += time.monotonic() - began
            if self._cursor == 0:
                self._cycle.ended_at = time.monotonic()
                self._counts_anew = False

    def _remove_leftover(self, entry: Entry, now: int) -> bool:
        """Remove what a dead writer left; by the file system's time, or because its process on this
        host has ended."""
        dead = entry.mtime_ns < now - _LEFTOVER_NS or self._owner.knows_dead(str(entry.owner))
        if dead and self._may_go_on():
            try:
                Path(entry.path).unlink()
            except OSError:
                return False
        return dead

    def _remove_empty(self, leaf: str, now: int) -> None:
        """Remove a directory without pages. A writer that needs it makes it again."""
        try:
            if Path(leaf).stat().st_mtime_ns < now - _LEFTOVER_NS and self._may_go_on():
                Path(leaf).rmdir()
        except OSError:
            pass  # it is in use again, or holds what is not ours

    # -- evicting ---------------------------------------------------------------------------------

    def _make_room(self, end: float, told: Callable[[Usage | None], None]) -> None:
        """Evict the oldest pages until there is enough room or `end` has come, or look where older
        ones may be."""
        known = self._oldest()
        target, start = self._target(), 0
        while (excess := self.used_bytes() - target) > 0:
            if time.monotonic() >= end or not self._may_go_on():
                return
            victims: list[tuple[int, Entry]] = []
            for number, entry in known[start : start + _EVICT_TOGETHER]:
                victims.append((number, entry))
                excess -= entry.nbytes
                if excess <= 0:
                    break
            if not victims:
                self._look_for_older(end)
                return
            start += len(victims)
            self._stamp_uses()
            self._evict(victims)
            told(self.usage())

    def _oldest(self) -> list[tuple[int, Entry]]:
        """The oldest pages of all, with their buckets: those before which no other can be."""
        now = self._clock.now_ns()
        horizon = min(bucket.horizon for bucket in self._buckets)
        found = [
            (used, number, entry)
            for number, bucket in enumerate(self._buckets)
            for entry in bucket.oldest
            if (used := _used(entry, now)) <= horizon
        ]
        return [item[1:] for item in sorted(found, key=lambda item: item[0])]

    def _look_for_older(self, end: float) -> None:
        """What was known is gone: look again where unknown pages may be the oldest."""
        numbers = range(len(self._buckets))
        for number in heapq.nsmallest(_LOOK_TOGETHER, numbers, key=self._horizon):
            self._look(number)
            if time.monotonic() >= end:
                return

    def _horizon(self, number: int) -> int:
        return self._buckets[number].horizon

    def _evict(self, victims: list[tuple[int, Entry]]) -> None:
        deadline = time.monotonic() + _CALL_LIMIT_S
        entries = [entry for _, entry in victims]
        fates = self._crew.map(_remove_if_unused, entries, deadline=deadline, width=_WIDTH)
        if all(fate is None for fate in fates):
            raise StoreError(f"pages in {self._root.directory} cannot be removed")
        for (number, entry), fate in zip(victims, fates, strict=True):
            if fate is None:
                continue
            bucket = self._buckets[number]
            bucket.oldest.remove(entry)
            if fate in (_REMOVED, _GONE):
                bucket.nbytes -= entry.nbytes
                bucket.pages -= 1
                self._evicted += fate == _REMOVED
            else:  # it was used since
                bucket.oldest.append(replace(entry, mtime_ns=fate))


def _used(entry: Entry, now: int) -> int:
    """When a page was used last. A time far ahead is from before the clock was set back."""
    return entry.mtime_ns if entry.mtime_ns <= now + _FUTURE_NS else 0


def _remove_if_unused(entry: Entry) -> int | None:
    """Remove a page that was not used since it was seen.

    _REMOVED, _GONE if it was not there, its new time if it was used, None if it cannot be told or
    removed.
    """
    path = Path(entry.path)
    try:
        mtime_ns = path.lstat().st_mtime_ns
        if mtime_ns != entry.mtime_ns:
            return mtime_ns
        path.unlink()
    except FileNotFoundError:
        return _GONE
    except OSError:
        return None
    return _REMOVED
