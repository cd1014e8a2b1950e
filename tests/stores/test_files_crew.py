"""Threads that make calls: order, help when calls are slow, deadlines, nothing lost."""

import threading
import time
from collections.abc import Iterator

import pytest

from filestores import wait_until
from hicache_nixl.stores import files_crew
from hicache_nixl.stores.files_crew import Crew, Job


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew(8, "crew-under-test")
    yield made
    made.close()


def soon() -> float:
    return time.monotonic() + 30


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100, 1000])
@pytest.mark.parametrize("pause", [0, 0.0005])
def test_results_are_in_order(crew: Crew, count: int, pause: float) -> None:
    """Each item has its own result, on fast and on slow calls."""

    def work(item: int) -> int:
        if pause and item < 20:
            time.sleep(pause)
        return item * 2

    assert crew.map(work, range(count), deadline=soon()) == [2 * item for item in range(count)]


def test_fast_calls_stay_on_one_thread(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that take no time are made by one thread."""
    monkeypatch.setattr(files_crew, "_SLOW_CALL_S", 10.0)
    assert crew.map(str, range(500), deadline=soon())[499] == "499"
    assert len(crew._threads) == 1


@pytest.mark.parametrize(("width", "most"), [(None, 8), (3, 3), (1, 1)])
def test_slow_calls_get_help(crew: Crew, width: int | None, most: int) -> None:
    """Slow calls go on at the same time, on as many threads as are allowed."""
    now, highest, lock = 0, 0, threading.Lock()
    all_there = threading.Event()

    def work(item: int) -> int:
        nonlocal now, highest
        with lock:
            now += 1
            highest = max(highest, now)
            if highest == most:
                all_there.set()
        time.sleep(0.005)
        if item > 1:  # the first two show that calls are slow
            all_there.wait(10)
        with lock:
            now -= 1
        return item

    assert crew.map(work, range(60), deadline=soon(), width=width) == list(range(60))
    assert highest == most


@pytest.mark.parametrize("gap", [0, 1, 17, 99])
@pytest.mark.parametrize("pause", [0, 0.001])
def test_leading_stops_at_the_first_gap(
    crew: Crew, pause: float, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `leading`, nothing behind the first None counts; what was made there is discarded."""
    made, discarded, told, leave = [], [], threading.Event(), Job._leave

    def leave_and_tell(job: Job, start: int, results: list) -> None:
        leave(job, start, results)
        if None in results:
            told.set()

    def work(item: int) -> int | None:
        time.sleep(pause)
        if item == gap:
            return None
        if pause and item > gap + 1:  # the next one may be the same thread's
            told.wait(10)
        made.append(item)
        return item

    monkeypatch.setattr(Job, "_leave", leave_and_tell)
    monkeypatch.setattr(files_crew, "_SLOW_CALL_S", 0.0 if pause else 10.0)
    results = crew.map(work, range(500), deadline=soon(), leading=True, discard=discarded.append)
    assert results == [*range(gap), *[None] * (500 - gap)]
    assert sorted(discarded) == sorted(item for item in made if item > gap)
    assert len(made) <= gap + 32


def test_deadline_ends_the_wait(crew: Crew) -> None:
    """Nobody waits longer than the deadline; late results are discarded, nothing more is begun."""
    go_on, discarded, begun = threading.Event(), [], []

    def work(item: int) -> int:
        begun.append(item)
        if item >= 10:
            go_on.wait()
        return item

    start = time.monotonic()
    results = crew.map(work, range(100), deadline=start + 0.2, discard=discarded.append)
    assert 0.15 < time.monotonic() - start < 10
    done = [item for item in results if item is not None]
    assert set(done) <= set(range(10))
    go_on.set()
    wait_until(lambda: len(discarded) == len(begun) - len(done))
    assert sorted([*done, *discarded]) == sorted(begun)
    assert len(begun) < 100


def test_all_the_same_goes_on_behind_the_deadline(crew: Crew) -> None:
    """With `all_the_same`, every item is done although nobody waits."""
    go_on, done = threading.Event(), []

    def work(item: int) -> int:
        go_on.wait()
        done.append(item)
        return item

    results = crew.map(work, range(50), deadline=time.monotonic() + 0.05, all_the_same=True)
    assert results == [None] * 50
    go_on.set()
    wait_until(lambda: len(done) == 50)


def test_errors_reach_the_caller(crew: Crew) -> None:
    """What a function raises is raised to who waits; what others made is discarded."""
    discarded: list[int] = []

    def work(item: int) -> int:
        if item == 30:
            raise OSError(5, "Input/output error")
        return item

    with pytest.raises(OSError, match="Input/output"):
        crew.map(work, range(100), deadline=soon(), discard=discarded.append)
    assert set(range(18)) <= set(discarded)
    assert crew.map(str, [1], deadline=soon()) == ["1"]


def test_stuck_threads_are_bounded(crew: Crew) -> None:
    """While calls hang there are no more threads than allowed, and others wait their deadline."""
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def hang(_: int) -> None:
        begun.release()
        go_on.wait()

    for _ in range(8):
        job = crew.start(hang, range(4))
        assert begun.acquire(timeout=10)
        assert job.results(time.monotonic()) == [None] * 4
    for _ in range(2):
        crew.map(hang, range(4), deadline=time.monotonic() + 0.01)
    assert not begun.acquire(blocking=False)
    assert crew.map(str, [1], deadline=time.monotonic() + 0.05) == [None]
    assert len(crew._threads) == 8
    go_on.set()
    assert crew.map(str, [1], deadline=soon()) == ["1"]


def test_closing() -> None:
    """Closing ends the threads and is idempotent; afterwards nothing is done and nobody waits."""
    crew = Crew(4, "closing")
    assert crew.map(str, [1], deadline=soon()) == ["1"]
    crew.close()
    crew.close()
    assert not any(thread.name == "closing" for thread in threading.enumerate())
    assert crew.map(str, [1, 2], deadline=soon()) == [None, None]
    done: list[int] = []
    crew.map(done.append, [1, 2], deadline=soon(), all_the_same=True)
    assert done == [1, 2], "what must be done is done by who waits for it"


def test_closing_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that nobody has begun is given up when the crew closes; a stuck thread is left."""
    monkeypatch.setattr("hicache_nixl.stores.files_crew._CLOSE_WAIT_S", 0.1)
    crew = Crew(1, "stuck")
    go_on, results = threading.Event(), []
    stuck = threading.Thread(
        target=crew.map, args=(lambda _: go_on.wait(), [1]), kwargs={"deadline": soon()}
    )
    stuck.start()
    wait_until(lambda: crew._idle == 0 and bool(crew._threads))
    waiting = threading.Thread(target=lambda: results.append(crew.map(str, [1], deadline=soon())))
    waiting.start()
    wait_until(lambda: bool(crew._tickets))
    crew.close()
    waiting.join(10)
    assert results == [[None]]
    go_on.set()
    stuck.join(10)
