"""Work on other threads: results, deadlines, how many threads there are and when they end."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache_nixl import workers as workers_module
from hicache_nixl.workers import OverdueError, Workers

SOON_S = 0.05
HANG_GUARD_S = 20.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging work waits for; open at the end."""
    event = threading.Event()
    yield event
    event.set()


def later(seconds: float = HANG_GUARD_S) -> float:
    return time.monotonic() + seconds


def wait_until(is_true: Callable[[], bool]) -> None:
    end = later()
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_results_and_errors() -> None:
    """What the work returns or raises reaches the caller; one thread serves call after call."""
    workers = Workers(4, "results")
    assert "results" not in names(), "none before it is needed"

    def fail() -> None:
        raise ZeroDivisionError("of the work")

    assert [workers.run(lambda i=i: i * i, later()) for i in range(50)] == [
        i * i for i in range(50)
    ]
    with pytest.raises(ZeroDivisionError, match="of the work"):
        workers.run(fail, later())
    assert names().count("results") == 1
    workers.close()
    assert "results" not in names()


def test_late_work_is_left(gate: threading.Event) -> None:
    """A caller waits until its deadline; the thread is stuck until the work ends, then of use."""
    workers = Workers(1, "late")
    began = time.monotonic()
    with pytest.raises(OverdueError, match="did not answer in time"):
        workers.run(gate.wait, began + SOON_S)
    assert SOON_S <= time.monotonic() - began < HANG_GUARD_S
    assert workers.stuck == 1
    began = time.monotonic()
    with pytest.raises(OverdueError, match="1 of 1 calls of storage are stuck"):
        workers.run(gate.wait, later())  # at once
    assert time.monotonic() - began < HANG_GUARD_S / 2
    gate.set()
    wait_until(lambda: workers.stuck == 0)
    assert workers.run(lambda: 7, later()) == 7
    workers.close()


def test_more_callers_than_threads(gate: threading.Event) -> None:
    """Callers wait for a thread, in time or not; never more than the limit run."""
    workers = Workers(2, "few")
    running, most = [0], [0]
    lock = threading.Lock()

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.002)
        with lock:
            running[0] -= 1

    callers = [
        threading.Thread(target=lambda: [workers.run(work, later()) for _ in range(20)])
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert most[0] == 2
    assert names().count("few") == 2
    holders = [threading.Thread(target=workers.run, args=(gate.wait, later())) for _ in range(2)]
    for holder in holders:
        holder.start()
    wait_until(lambda: not workers._idle)
    with pytest.raises(OverdueError):
        workers.run(lambda: None, later(SOON_S))
    gate.set()
    for holder in holders:
        holder.join()
    workers.close()


def test_idle_threads_end() -> None:
    """Threads that nobody needs go; work that comes then starts one again."""
    workers = Workers(4, "idle", idle_s=0.02)
    for _ in range(5):
        assert workers.run(lambda: 1, later()) == 1
        wait_until(lambda: "idle" not in names())
    for _ in range(200):  # at the moment when one ends
        time.sleep(0.0199)
        assert workers.run(lambda: 2, later()) == 2
    workers.close()


def test_close(gate: threading.Event) -> None:
    """Closing ends threads, leaves those that hang to their work, and is final."""
    workers = Workers(4, "closing")
    with pytest.raises(OverdueError):
        workers.run(gate.wait, later(SOON_S))
    assert workers.run(lambda: 1, later()) == 1
    workers.close(wait_s=SOON_S)
    workers.close(wait_s=SOON_S)
    wait_until(lambda: names().count("closing") == 1)
    with pytest.raises(OverdueError, match="closed"):
        workers.run(lambda: 1, later())
    gate.set()
    wait_until(lambda: "closing" not in names())


def test_work_that_was_taken_before_the_end_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was given work just when everything was closed does it."""
    workers = Workers(1, "last")
    answered, go_on = threading.Event(), threading.Event()
    make = workers_module._Task.__init__

    class HeldUp:
        """A lock whose release returns late, once the caller has gone on."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self.acquire = self._lock.acquire

        def release(self) -> None:
            self._lock.release()
            if not answered.is_set():
                answered.set()
                go_on.wait(HANG_GUARD_S)

    def init(task: Any, work: Callable[[], Any]) -> None:
        make(task, work)
        task.done = HeldUp()
        task.done.acquire()

    monkeypatch.setattr(workers_module._Task, "__init__", init)
    assert workers.run(lambda: 1, later()) == 1
    answered.wait(HANG_GUARD_S)
    results: list[int] = []
    second = threading.Thread(target=lambda: results.append(workers.run(lambda: 2, later())))
    second.start()
    wait_until(lambda: not workers._idle)
    workers.close(wait_s=0.0)
    go_on.set()
    second.join(HANG_GUARD_S)
    assert results == [2]
    assert workers.stuck == 0
    wait_until(lambda: "last" not in names())
