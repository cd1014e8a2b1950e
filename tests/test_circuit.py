"""When a circuit opens, how long it waits and when it closes, with a clock of the test's own."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_nixl.circuit import BACKOFF_S, Circuit


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def circuit(clock: Clock | None = None, rand: float = 0.5) -> Circuit:
    """A circuit without jitter, unless `rand` is another number than 0.5."""
    return Circuit("read", clock=clock or Clock(), rand=lambda: rand)


def opened(clock: Clock | None = None, rand: float = 0.5) -> Circuit:
    one = circuit(clock, rand)
    assert one.failed("get", "no answer", at_once=True)
    return one


def test_three_failures_in_a_row_open_it() -> None:
    """Failures of one kind of call count, in a row; the third one opens the circuit."""
    one = circuit()
    assert not one.failed("get", "a")
    assert not one.failed("get", "b")
    one.succeeded("get")
    for reason in "cd":
        assert not one.failed("get", reason)
    one.succeeded("exists")  # an index that answers says nothing of reads that fail
    assert not one.failed("exists", "e")
    assert one.is_closed
    assert one.failed("get", "f")
    assert not one.is_closed
    assert one.state().reason == "f"
    assert one.state().opened == 1


def test_a_timeout_opens_it_at_once() -> None:
    """One call in which nothing moved is enough."""
    one = circuit()
    assert one.failed("set", "no answer", at_once=True)
    assert one.state().state == "open"


def test_open_calls_are_counted_and_change_nothing() -> None:
    """While it is open, calls are skipped and counted; late results of earlier ones are ignored."""
    one = opened()
    assert [one.allows() for _ in range(3)] == [False] * 3
    one.succeeded("get")
    assert not one.failed("get", "late", at_once=True)
    state = one.state()
    assert (state.state, state.skipped, state.opened, state.reason) == ("open", 3, 1, "no answer")


def test_delays_double_up_to_the_most() -> None:
    """The first check comes after a second; each that fails doubles the delay, up to ten."""
    one = opened()
    delays = []
    for _ in range(6):
        delays.append(one.delay_s())
        one.checking()
        assert one.state().state == "half-open"
        assert not one.allows()
        one.check_failed("still")
        assert one.state().state == "open"
    assert delays == [1, 2, 4, 8, 10, 10]


@pytest.mark.parametrize(("rand", "factor"), [(0.0, 0.8), (1.0, 1.2)])
def test_jitter(rand: float, factor: float) -> None:
    """A fifth more or less, so that many servers do not ask at the same moment."""
    assert opened(rand=rand).delay_s() == pytest.approx(factor * BACKOFF_S[0])


def test_a_check_that_works_closes_it() -> None:
    """Calls go through again, and counting starts anew."""
    one = opened()
    one.checking()
    one.recovered()
    assert one.allows()
    assert one.state().failures == 0
    one.recovered()  # a second check that was late
    assert not one.failed("get", "a")
    one.check_failed("a third one")
    assert one.is_closed


@pytest.mark.parametrize(("calm_s", "delay_s"), [(29.0, 4.0), (31.0, 1.0)])
def test_one_that_opens_again_soon_waits_longer(calm_s: float, delay_s: float) -> None:
    """Checks that work although calls fail must not let calls hang every second."""
    clock = Clock()
    one = opened(clock)
    one.check_failed("a")
    one.recovered()
    clock.now += calm_s
    one.failed("get", "b", at_once=True)
    assert one.delay_s() == delay_s


def test_changes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line when it opens, with the reason, and one when it closes, with what it cost."""
    clock = Clock()
    with caplog.at_level(logging.INFO):
        one = opened(clock)
        for _ in range(5):
            one.allows()
            one.checking()
            one.check_failed("still")
        clock.now += 12
        one.recovered()
        one.recovered()
    told = [record for record in caplog.records if record.name == "hicache_nixl.circuit"]
    assert [record.message for record in told] == [
        "storage: reading is suspended until it works again: no answer",
        "storage: reading works again after 12.0 s; 5 calls were misses meanwhile",
    ]


STEPS = st.sampled_from(
    ["good", "bad", "timeout", "call", "checking", "check fails", "check works"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_whatever_happens_its_state_follows(steps: list[str]) -> None:
    """Closed until three failures in a row or a timeout, then open until a check works."""
    one, closed, row, skipped = circuit(), True, 0, 0
    for step in steps:
        if step == "good":
            one.succeeded("get")
            row = 0 if closed else row
        elif step in ("bad", "timeout"):
            opens = closed and (step == "timeout" or row == 2)
            assert one.failed("get", step, at_once=step == "timeout") == opens
            row, closed = row + closed, closed and not opens
        elif step == "call":
            assert one.allows() == closed
            skipped += not closed
        elif step == "checking":
            one.checking()
        elif step == "check fails":
            one.check_failed(step)
        else:
            one.recovered()
            row, closed = (row if closed else 0), True
        assert one.is_closed == closed
        assert one.state().skipped == skipped
        assert 0.8 * BACKOFF_S[0] <= one.delay_s() <= 1.2 * BACKOFF_S[1]
