"""Where a leading run ends, found with few probes; and what was seen lately."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_nixl.stores.objects_search import WIDTH, Seen, leading_run
from slabs import chain_keys

SPACE = bytes(32)


class Things:
    """Some that are there, and how often was asked."""

    def __init__(self, there: list[bool]) -> None:
        self.there = there
        self.rounds: list[int] = []

    def probe(self, positions: list[int]) -> list[bool]:
        self.rounds.append(len(positions))
        return [self.there[position] for position in positions]


@given(st.integers(0, 700), st.integers(0, 700), st.integers(1, 40))
def test_the_end_of_a_run_is_found(count: int, run: int, width: int) -> None:
    """Without holes the answer is exact, with no more probes at once than wanted."""
    run = min(run, count)
    things = Things([i < run for i in range(count)])
    assert leading_run(count, things.probe, width=width) == run
    assert max(things.rounds, default=0) <= width


@given(st.lists(st.booleans(), max_size=200), st.integers(2, 40))
def test_a_hole_gives_the_end_of_some_run(there: list[bool], width: int) -> None:
    """With holes: what is before the answer is there, what is at it is not, and nothing counts
    when the first is missing."""
    run = leading_run(len(there), Things(there).probe, width=width)
    assert run == len(there) or not there[run]
    assert run == 0 or there[run - 1]
    assert run == 0 or there[0]


@pytest.mark.parametrize(
    ("run", "rounds"),
    [(512, 1), (0, 2), (200, 2), (511, 2), (1, 2)],
    ids=["all", "none", "some", "last", "one"],
)
def test_512_keys_take_two_rounds(run: int, rounds: int) -> None:
    """What a call of the engine asks for is answered in two round trips, one if all is there."""
    things = Things([i < run for i in range(512)])
    assert leading_run(512, things.probe) == run
    assert len(things.rounds) <= rounds
    assert sum(things.rounds) <= 2 * WIDTH


def test_what_is_known_is_not_asked_for() -> None:
    """Positions before `start` cost nothing."""
    things = Things([True] * 100)
    assert leading_run(100, things.probe, start=100) == 100
    assert not things.rounds


def test_what_was_seen_is_remembered_for_a_while() -> None:
    """For the life of an entry, per namespace, until it is forgotten."""
    keys = chain_keys("k", 4)
    seen = Seen(life_s=math.inf, limit=100)
    seen.add(SPACE, keys[:3])
    assert seen.which(SPACE, keys).tolist() == [True, True, True, False]
    assert not seen.which(bytes([1] * 32), keys).any()
    seen.forget(SPACE, keys[:1])
    assert seen.which(SPACE, keys).tolist() == [False, True, True, False]
    seen.forget(SPACE)
    assert not seen.which(SPACE, keys).any()


def test_what_was_seen_long_ago_is_not_believed() -> None:
    """An entry ends with its life."""
    seen = Seen(life_s=0.0, limit=100)
    seen.add(SPACE, chain_keys("k", 4))
    assert not seen.which(SPACE, chain_keys("k", 4)).any()


def test_the_oldest_go_first() -> None:
    """Memory is bounded; what is seen again is young again."""
    keys = chain_keys("k", 5)
    seen = Seen(life_s=math.inf, limit=3)
    seen.add(SPACE, keys[:3])
    seen.add(SPACE, keys[:1])
    seen.add(SPACE, keys[3:])
    assert len(seen) == 3
    assert seen.which(SPACE, keys).tolist() == [True, False, False, True, True]
