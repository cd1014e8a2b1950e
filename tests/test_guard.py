"""Calls of a store that hangs, fails and recovers: what callers see, and when."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_nixl.batch import Batch
from hicache_nixl.errors import RegistrationError, StagingShortageError, StoreError
from hicache_nixl.guard import Guard

NAMESPACE = bytes(32)
HANG_GUARD_S = 20.0
BACKOFF_S = (0.02, 0.05)


class Store:
    """Answers, fails or hangs as it is told; notes what it was asked."""

    def __init__(self) -> None:
        self.trouble: Exception | None = None
        self.hangs = False
        self.go_on = threading.Event()
        self.asked: list[str] = []
        self.checks = 0
        self.deadlines: list[float] = []
        self.touched: list[str] = []
        self.ended = threading.Semaphore(0)

    def _answer(self, what: str, answer: Any) -> Any:
        self.asked.append(what)
        hangs, trouble = self.hangs, self.trouble
        if hangs:
            self.go_on.wait()
        if trouble is not None:
            raise trouble
        return answer

    def _move(self, what: str, batch: Batch, deadline: float) -> Any:
        self.deadlines.append(deadline)
        try:
            flags = self._answer(what, np.ones(len(batch.keys), np.bool_))
            with batch.loan.using() as may:
                self.touched.append(f"{what} {'may' if may else 'may not'}")
            return flags
        finally:
            self.ended.release()

    def get(self, mover: Any, batch: Batch, prefix: Any, *, deadline: float) -> Any:
        return self._move("get", batch, deadline)

    def put(self, mover: Any, batch: Batch, prefix: Any, *, deadline: float) -> Any:
        return self._move("put", batch, deadline)

    def exists(self, namespace: bytes, keys: Any) -> int:
        return int(self._answer("exists", len(keys)))

    def present(self, namespace: bytes, keys: Any) -> Any:
        return self._answer("present", np.ones(len(keys), np.bool_))

    def clear(self, namespace: bytes, *, deadline: float) -> int:
        return int(self._answer("clear", 5))

    def open_namespace(self, namespace: Any) -> None:
        self._answer("open_namespace", None)

    def check(self, direction: str, *, deadline: float) -> None:
        self.checks += 1
        self._answer(f"check {direction}", None)


@pytest.fixture
def store() -> Iterator[Store]:
    one = Store()
    yield one
    one.go_on.set()


@pytest.fixture
def guarded(store: Store) -> Iterator[Callable[..., Guard]]:
    """Makes guards of `store`, which are closed at the end."""
    guards: list[Guard] = []

    def make(deadline_s: float = HANG_GUARD_S, **how: Any) -> Guard:
        given: Any = store
        guards.append(Guard(given, deadline_s=deadline_s, backoff_s=BACKOFF_S, **how))
        return guards[-1]

    yield make
    store.hangs = False
    store.go_on.set()
    for guard in guards:
        guard.close()


def pages(count: int = 4) -> Batch:
    geometry: Any = SimpleNamespace(payload_bytes=1000)
    return Batch(geometry, np.arange(count), [bytes([i]) for i in range(count)], NAMESPACE)


KEYS = [b"a", b"b", b"c"]


def call(guard: Guard, name: str, seconds: float | None = None, batch: Batch | None = None) -> Any:
    """One call, with its deadline in `seconds`; how many pages it had."""
    seconds = guard._deadline_s if seconds is None else seconds
    deadline = time.monotonic() + seconds
    mover: Any = "mover"
    if name in ("get", "put"):
        move = getattr(guard, name)
        return int(move(mover, batch or pages(), [], deadline=deadline).sum())
    return int(np.sum(getattr(guard, name)(NAMESPACE, KEYS, deadline=deadline)))


def wait_until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + HANG_GUARD_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.002)


class OwnThreads:
    """The threads that guards have made since this was; those of earlier tests may end late."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def names(self) -> list[str]:
        names = ("hicache-nixl-call", "hicache-nixl-check", "hicache-nixl-watch")
        now = set(threading.enumerate()) - self._before
        return [thread.name for thread in now if thread.name in names]


READS = ("get", "exists", "present")
CALLS = pytest.mark.parametrize(
    ("name", "pages_there"), [("get", 4), ("put", 4), ("exists", 3), ("present", 3)]
)


@CALLS
def test_answers_pass_through(
    store: Store, guarded: Callable[..., Guard], name: str, pages_there: int
) -> None:
    """A store that is well answers as if nobody stood before it, with a little less time."""
    guard = guarded()
    began = time.monotonic()
    assert call(guard, name) == pages_there
    assert store.asked == [name]
    for deadline in store.deadlines:
        assert began + HANG_GUARD_S - 0.51 < deadline < time.monotonic() + HANG_GUARD_S
    state = guard.state()
    assert (state.read.state, state.write.state) == ("closed", "closed")
    assert (state.overdue_calls, state.stuck_threads) == (0, 0)


def test_no_thread_before_the_first_call(guarded: Callable[..., Guard]) -> None:
    """A guard costs nothing until it is used, and nothing afterwards."""
    own = OwnThreads()
    guard = guarded()
    assert own.names() == []
    call(guard, "exists")
    assert own.names() == ["hicache-nixl-call"]
    guard.close()
    assert own.names() == []
    assert call(guard, "exists") == 0


@CALLS
def test_calls_that_hang(
    store: Store, guarded: Callable[..., Guard], name: str, pages_there: int
) -> None:
    """A call ends by its deadline as a miss, the next ones at once; then it works again by itself,
    and the host pages of the call that hung are not touched when it goes on."""
    guard = guarded(1.0)
    store.hangs = True
    batch = pages()
    began = time.monotonic()
    assert call(guard, name, batch=batch) == 0
    assert 1.0 <= time.monotonic() - began < HANG_GUARD_S
    began = time.perf_counter()
    for _ in range(100):
        assert call(guard, name) == 0
    assert (time.perf_counter() - began) / 100 < 0.05
    assert store.asked.count(name) == 1
    circuit = guard.state().read if name in READS else guard.state().write
    assert (circuit.skipped, circuit.opened) == (100, 1)
    assert (guard.state().overdue_calls, guard.state().stuck_threads) == (1, 1)
    other = guard.state().write if name in READS else guard.state().read
    assert other.state == "closed"
    store.hangs = False
    store.go_on.set()
    wait_until(lambda: guard.state().stuck_threads == 0)
    assert store.touched == ([f"{name} may not"] if name in ("get", "put") else [])
    wait_until(lambda: call(guard, name) == pages_there)
    assert guard.state().read.state == guard.state().write.state == "closed"


@CALLS
def test_calls_that_fail(
    store: Store,
    guarded: Callable[..., Guard],
    name: str,
    pages_there: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three errors in a row open the circuit; it closes when a check works, with no call made."""
    guard = guarded()
    store.trouble = StoreError("the index is gone")
    for _ in range(5):
        assert call(guard, name) == 0
    assert store.asked.count(name) == 3
    assert "became a miss: the index is gone" in caplog.text
    assert caplog.text.count("is suspended") == 1
    wait_until(lambda: store.checks >= 3)
    circuit = guard.state().read if name in READS else guard.state().write
    assert circuit.state in ("open", "half-open")
    assert set(store.asked[3:]) == {f"check {'read' if name in READS else 'write'}"}
    store.trouble = None
    wait_until(lambda: guard.state().read.state == guard.state().write.state == "closed")
    checks = store.checks
    assert call(guard, name) == pages_there
    time.sleep(3 * BACKOFF_S[1])
    assert store.checks == checks, "nobody checks a store that works"


def test_misuse_is_raised(store: Store, guarded: Callable[..., Guard]) -> None:
    """What is not trouble with storage reaches the caller, and opens nothing."""
    guard = guarded()
    for error in (RegistrationError("not open"), ZeroDivisionError("a bug")):
        store.trouble = error
        for _ in range(4):
            with pytest.raises(type(error), match=str(error)):
                call(guard, "get")
    assert guard.state().read.opened == 0


def test_a_deadline_that_has_passed(store: Store, guarded: Callable[..., Guard]) -> None:
    """A call without time is a miss that says nothing of the store."""
    guard = guarded()
    for name in ("get", "put", "exists"):
        for _ in range(4):
            assert call(guard, name, seconds=-1.0) == 0
    assert store.asked == []
    assert guard.state().read.state == guard.state().write.state == "closed"


def test_a_call_with_little_time_left(store: Store, guarded: Callable[..., Guard]) -> None:
    """That it was late says nothing of the store; that the store failed in the little time does."""
    guard = guarded(10.0)
    store.hangs = True
    for _ in range(4):
        assert call(guard, "exists", seconds=0.05) == 0
    assert guard.state().read.opened == 0
    assert guard.state().overdue_calls == 4
    store.hangs = False
    store.trouble = StoreError("refused")
    for opened in (0, 0, 1):
        assert call(guard, "exists", seconds=4.0) == 0
        assert guard.state().read.opened == opened


def test_nothing_moved_until_the_deadline(
    store: Store, guarded: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that keeps its deadline, but had nothing by then, hangs all the same; one that had
    something is slow, and one that has nothing at once is well."""
    answers = {"slow": [True, False], "hangs": [False, False], "missing": [False, False]}

    def get(mover: Any, batch: Batch, prefix: Any, *, deadline: float) -> Any:
        if how != "missing":
            time.sleep(max(0.0, deadline - time.monotonic()))
        return np.array(answers[how], np.bool_)

    monkeypatch.setattr(store, "get", get)
    monkeypatch.setattr("hicache_nixl.guard._RESERVE", (0.9, HANG_GUARD_S))
    guard = guarded(10.0)
    for how, opened in (("missing", 0), ("slow", 0), ("hangs", 1)):
        assert call(guard, "get", batch=pages(2)) == sum(answers[how])
        assert guard.state().read.opened == opened


def test_a_bounded_number_of_calls_hang(store: Store, guarded: Callable[..., Guard]) -> None:
    """When all threads are stuck, calls of either direction are misses at once."""
    guard = guarded(3.0, threads=4)
    store.hangs = True
    callers = [threading.Thread(target=call, args=(guard, "get")) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert guard.state().stuck_threads == 4
    before = len(store.asked)
    assert call(guard, "put") == 0
    assert store.asked[before:].count("put") == 0
    store.hangs = False
    store.go_on.set()
    wait_until(lambda: call(guard, "get") == call(guard, "put") == 4)


def test_a_loan_in_use_is_waited_for(guarded: Callable[..., Guard], store: Store) -> None:
    """Host pages that the kernel may still write are not handed back, whatever the deadline; the
    circuit is open meanwhile."""
    guard = guarded(1.0)
    batch = pages()
    released = threading.Event()
    inside = threading.Event()

    def get(mover: Any, batch: Batch, prefix: Any, *, deadline: float) -> Any:
        with batch.loan.using():
            inside.set()
            released.wait()
        return np.ones(len(batch.keys), np.bool_)

    store.get = get  # type: ignore[method-assign]
    store.trouble = StoreError("does not answer")  # for checks: the circuit stays open
    answers: list[int] = []
    caller = threading.Thread(
        target=lambda: answers.append(call(guard, "get", batch=batch)), daemon=True
    )
    caller.start()
    inside.wait(HANG_GUARD_S)
    wait_until(lambda: batch.loan.is_over)
    assert caller.is_alive()
    assert guard.state().read.opened == 1, "so that no other call hangs like it"
    assert call(guard, "get", batch=pages()) == 0
    released.set()
    caller.join(HANG_GUARD_S)
    assert answers == [0]


def test_a_late_check_closes_the_circuit(store: Store, guarded: Callable[..., Guard]) -> None:
    """A check that hung longer than it was waited for has shown, too, that storage works."""
    guard = guarded(0.5)
    store.hangs = True
    assert call(guard, "exists") == 0
    wait_until(lambda: store.checks >= 2)
    checks = store.checks
    store.go_on.set()  # those that hang now go on; later ones would fail
    store.trouble = StoreError("still")
    wait_until(lambda: guard.state().read.state == "closed")
    assert checks >= 2


@pytest.mark.parametrize("name", ["clear", "open_namespace"])
def test_administration_has_a_deadline(
    store: Store, guarded: Callable[..., Guard], name: str
) -> None:
    """Clearing and opening raise by the deadline, and go through while a circuit is open."""
    guard = guarded(1.0)
    store.trouble = StoreError("no")
    for _ in range(3):
        call(guard, "exists")
    assert guard.state().read.state != "closed"
    store.trouble = None
    method = getattr(guard, name)
    assert method(NAMESPACE) in (5, None)
    store.hangs = True
    with pytest.raises(StoreError, match="did not answer in time; see whether"):
        method(NAMESPACE)
    store.hangs, store.trouble = False, RegistrationError("too large")
    with pytest.raises(RegistrationError, match="too large"):
        method(NAMESPACE)


def test_close_while_calls_hang(
    store: Store, guarded: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing does not wait for ever; threads end as soon as their calls do."""
    monkeypatch.setattr("hicache_nixl.guard.CLOSE_WAIT_S", 0.05)
    own = OwnThreads()
    guard = guarded(0.5)
    store.hangs = True
    call(guard, "get")
    wait_until(lambda: store.checks)
    began = time.monotonic()
    guard.close()
    assert time.monotonic() - began < HANG_GUARD_S / 2
    store.go_on.set()
    wait_until(lambda: not own.names())


def test_no_thread_is_to_be_had(
    store: Store, guarded: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has no thread left, calls are misses; the circuit closes once it has."""
    guard = guarded()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    refused = ["hicache-nixl-call"]
    assert call(guard, "exists") == 0
    assert guard.state().read.state == "closed"
    refused = ["hicache-nixl-watch"]
    store.trouble = StoreError("refused")
    for name in ("exists",) * 5:
        assert call(guard, name) == 0
    assert guard.state().read.state == "open"
    store.trouble, refused = None, []
    assert call(guard, "exists") == 0, "it only makes the check be tried again"
    wait_until(lambda: guard.state().read.state == "closed")
    assert call(guard, "exists") > 0


def test_a_lack_of_staging_is_no_trouble_of_the_store(
    store: Store, guarded: Callable[..., Guard]
) -> None:
    """Calls without memory to move pages through are misses, and open no circuit."""
    guard = guarded()
    store.trouble = StagingShortageError("no staging came free")
    for name in ("get", "put") * 4:
        assert call(guard, name) == 0
    assert guard.state().read.opened == guard.state().write.opened == 0
