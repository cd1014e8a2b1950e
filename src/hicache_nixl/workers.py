"""Threads that do what may hang, for callers that wait no longer than they said.

A call takes a thread that is idle and waits for it; a caller that gives up leaves the thread to its
work, and it is stuck until that ends. The number of threads is bounded: when all are stuck, callers
hear so at once. What the work is, this module does not know.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_WAIT_S = 5.0


class OverdueError(TimeoutError):
    """Work that did not end in time, or could not begin."""


class _Task(Generic[T]):
    __slots__ = ("abandoned", "done", "error", "finished", "result", "work")

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.done = threading.Lock()
        self.done.acquire()
        self.finished = False
        self.abandoned = False
        self.error: BaseException | None = None
        self.result: T


class _Worker:
    """One thread. It sleeps on a lock of its own, which wakes faster than a condition."""

    __slots__ = ("task", "thread", "wake")

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.task: _Task[Any] | None = None
        self.thread: threading.Thread


class Workers:
    """Safe for threads. No thread is started before it is needed; idle ones end after a while.

    Args:
        limit: how many threads at most.
        name: of the threads.
        idle_s: seconds after which an idle thread ends.
    """

    def __init__(self, limit: int, name: str, *, idle_s: float = 5.0) -> None:
        self._limit = limit
        self._name = name
        self._idle_s = idle_s
        self._changed = threading.Condition(threading.Lock())
        self._threads: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._stuck = 0
        self._closed = False

    @property
    def stuck(self) -> int:
        """Threads whose callers have given up."""
        return self._stuck

    def run(self, work: Callable[[], T], deadline: float) -> T:
        """What `work` returns or raises; blocks until `deadline` (`time.monotonic`) at most.

        Raises OverdueError after it, and at once when every thread is stuck.
        """
        task = _Task(work)
        worker = self._take(deadline)
        worker.task = task
        worker.wake.release()
        try:
            ended = task.done.acquire(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException:
            self._give_up(task)
            raise
        if not ended and self._give_up(task):
            raise OverdueError("storage did not answer in time")
        if task.error is not None:
            raise task.error
        return task.result

    def close(self) -> None:
        """End the threads; those that do not end within 5 s are left to their work. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            threads = [worker.thread for worker in self._threads]
            self._changed.notify_all()
        for worker in idle:
            worker.wake.release()
        end = time.monotonic() + _CLOSE_WAIT_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _take(self, deadline: float) -> _Worker:
        with self._changed:
            if not self._idle and len(self._threads) >= self._limit:
                self._changed.wait_for(
                    lambda: self._idle or self._stuck >= self._limit or self._closed,
                    max(0.0, deadline - time.monotonic()),
                )
            if self._closed:
                raise OverdueError("the store is closed")
            if self._idle:
                return self._idle.pop()
            if len(self._threads) >= self._limit:
                raise OverdueError(f"{self._stuck} of {self._limit} calls of storage are stuck")
            worker = _Worker()
            worker.thread = threading.Thread(
                target=self._serve, args=(worker,), name=self._name, daemon=True
            )
            worker.thread.start()
            self._threads.add(worker)
            return worker

    def _give_up(self, task: _Task[Any]) -> bool:
        """Whether the work was still under way."""
        with self._changed:
            if task.finished:
                return False
            task.abandoned = True
            self._stuck += 1
            self._changed.notify_all()
            return True

    def _serve(self, worker: _Worker) -> None:
        while True:
            if not worker.wake.acquire(timeout=self._idle_s):
                with self._changed:
                    if worker in self._idle:
                        self._idle.remove(worker)
                        self._threads.discard(worker)
                        return
                continue  # work came at that moment
            task, worker.task = worker.task, None
            if task is None:
                return
            try:
                task.result = task.work()
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                task.error = error
            with self._changed:
                task.finished = True
                self._stuck -= task.abandoned
                if task.abandoned and task.error is not None:
                    logger.info("a call that was given up has failed: %s", task.error)
                if self._closed:
                    self._threads.discard(worker)
                else:
                    self._idle.append(worker)
                self._changed.notify()
            task.done.release()
            if self._closed and worker not in self._idle:
                return
