"""Threads that make file system calls, so that their callers wait no longer than they want to.

A call on a shared file system takes a microsecond or a millisecond, and for ever while its server
is away. A job starts on one thread, which is fastest as long as calls are fast: they hold Python's
lock more than the kernel's. When they turn out to be slow, more threads join, up to a limit.

This module knows nothing of files: it runs functions over items.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

_SLOW_CALL_S = 100e-6
_FIRST_SPAN = 2
_FAST_SPAN = 16
_CLOSE_WAIT_S = 5.0


class _Work(Protocol):
    def work(self) -> None: ...

    def cancel(self) -> None: ...


class Crew:
    """A bounded number of daemon threads, started when they are needed first.

    Args:
        size: how many at most.
        name: of the threads.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._changed = threading.Condition()
        self._tickets: deque[_Work] = deque()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def map(
        self,
        function: Callable[[Item], Result | None],
        items: Sequence[Item],
        *,
        deadline: float,
        leading: bool = False,
        discard: Callable[[Result], object] | None = None,
        width: int | None = None,
        all_the_same: bool = False,
    ) -> list[Result | None]:
        """`function` of each item, on at most `width` threads; blocks until `deadline` at most.

        None for items that were not done by `deadline` (`time.monotonic`). With `leading`, nothing
        behind the first None is a result, and little of it is done at all. `discard` gets results
        that nobody will see. With `all_the_same`, every item is done, be it after `deadline`.
        Raises what `function` raised. Once the crew is closed, nothing else is done.
        """
        job = self.start(
            function,
            items,
            leading=leading,
            discard=discard,
            width=width,
            all_the_same=all_the_same,
        )
        return job.results(deadline)

    def start(
        self,
        function: Callable[[Item], Result | None],
        items: Sequence[Item],
        *,
        leading: bool = False,
        discard: Callable[[Result], object] | None = None,
        width: int | None = None,
        all_the_same: bool = False,
    ) -> "Job[Item, Result]":
        """As `map`, without waiting: the results are those of the job, once."""
        width = min(width or self._size, self._size)
        job = Job(self, function, items, leading, discard, width, all_the_same)
        if items:
            self.post(job, 1)
        return job

    def post(self, work: _Work, threads: int) -> None:
        """Let up to `threads` threads do `work`. Never blocks."""
        with self._changed:
            if self._closed:
                work.cancel()
                return
            self._tickets.extend([work] * threads)
            while len(self._threads) < self._size and self._idle < len(self._tickets):
                self._idle += 1
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify(threads)

    def close(self) -> None:
        """End the threads. Those in a call that does not return are left to it. Idempotent."""
        with self._changed:
            self._closed = True
            waiting = list(self._tickets)
            self._tickets.clear()
            self._changed.notify_all()
        for work in waiting:
            work.cancel()
        end = time.monotonic() + _CLOSE_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            logger.warning("%d threads are still in a call of the file system", stuck)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._tickets:
                    if self._closed:
                        return
                    self._changed.wait()
                self._idle -= 1
                work = self._tickets.popleft()
            work.work()
            with self._changed:
                self._idle += 1


class Job(Generic[Item, Result]):
    """One function over many items. Its lock is held only to take items and to leave results."""

    def __init__(
        self,
        crew: Crew,
        function: Callable[[Item], Result | None],
        items: Sequence[Item],
        leading: bool,
        discard: Callable[[Result], object] | None,
        width: int,
        all_the_same: bool,
    ) -> None:
        self._all_the_same = all_the_same
        self._crew = crew
        self._function = function
        self._items = items
        self._leading = leading
        self._discard = discard
        self._width = width
        self._lock = threading.Lock()
        self._results: list[Result | None] = [None] * len(items)
        self._next = 0
        self._limit = len(items)
        self._working = 0
        self._span = _FIRST_SPAN
        self._abandoned = False
        self._cancelled = False
        self._error: BaseException | None = None
        self._done = threading.Event()
        if not items:
            self._done.set()

    def work(self) -> None:
        """Do items until none is left."""
        with self._lock:
            self._working += 1
        try:
            while (span := self._take()) is not None:
                start, end = span
                began = time.perf_counter()
                results = [self._function(item) for item in self._items[start:end]]
                self._measure(time.perf_counter() - began, end - start)
                self._leave(start, results)
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits for it
            with self._lock:
                self._error = error
                self._limit = 0
        finally:
            with self._lock:
                self._working -= 1
                if self._working == 0 and self._next >= self._limit:
                    self._done.set()

    def results(self, deadline: float) -> list[Result | None]:
        """The results there are by `deadline`; what comes later is discarded. Once; see `map`."""
        self._done.wait(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
        if self._cancelled and self._all_the_same:
            self.work()  # the crew was closed before it was done
        with self._lock:
            self._abandoned = True
            if not self._all_the_same:
                self._limit = 0
            results, error = self._results, self._error
        if error is not None:
            self._throw_away(results)
            raise error
        if self._leading and None in results:
            run = results.index(None)
            self._throw_away(results[run:])
            results[run:] = [None] * (len(results) - run)
        return results

    def cancel(self) -> None:
        """Let nobody wait for it."""
        self._cancelled = True
        self._done.set()

    def _take(self) -> tuple[int, int] | None:
        with self._lock:
            start = self._next
            end = self._next = max(start, min(start + self._span, self._limit))
        return (start, end) if start < end else None

    def _measure(self, seconds: float, count: int) -> None:
        if self._span != _FIRST_SPAN:
            return
        slow = seconds > count * _SLOW_CALL_S
        with self._lock:
            self._span = 1 if slow else _FAST_SPAN
            helpers = min(self._width - 1, self._limit - self._next) if slow else 0
        if helpers > 0:
            self._crew.post(self, helpers)

    def _leave(self, start: int, results: list[Result | None]) -> None:
        with self._lock:
            if not self._abandoned:
                self._results[start : start + len(results)] = results
                if self._leading and None in results:
                    self._limit = min(self._limit, start + results.index(None))
                return
        self._throw_away(results)

    def _throw_away(self, results: Sequence[Result | None]) -> None:
        if self._discard is not None:
            for result in results:
                if result is not None:
                    self._discard(result)
