"""How long a prefix can be restored, against a plain model and against SGLang's file backend."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer, config, keys
from hicache_nixl.errors import RegistrationError
from hicache_nixl.hybrid import HitPolicy, Need, Verdict, restorable_prefixes

ALL, TRAILING, GROUPS = HitPolicy.ALL_PAGES, HitPolicy.TRAILING_PAGES, HitPolicy.BLOCK_GROUPS
SIDECARS = ("swa", "mamba", "draft", "indexer")


class Stored:
    """Flags of every pool, and a note of each question."""

    def __init__(self, **pools: Sequence[int]) -> None:
        self.pools = {name: np.array(flags, np.bool_) for name, flags in pools.items()}
        self.asked: list[str] = []

    def leading_run(self, pool: str, pages: int) -> int:
        self.asked.append(pool)
        flags = self.pools[pool][:pages]
        return int(np.append(flags, False).argmin())

    def present(self, pool: str, pages: int) -> npt.NDArray[np.bool_]:
        self.asked.append(pool)
        return self.pools[pool][:pages]


def judge(needs: Sequence[Need], anchor: str | None = "kv", **pools: Sequence[int]) -> Verdict:
    """The verdict on pools of equally many pages."""
    pages = len(next(iter(pools.values())))
    return restorable_prefixes(pages, anchor, needs, Stored(**pools))


def test_the_anchor_alone() -> None:
    """Without other pools every prefix up to the first missing page can be restored."""
    assert judge([], kv=[1, 1, 1, 0, 1]) == Verdict([1, 2, 3], {"kv": 3})
    assert judge([], kv=[0, 1]) == Verdict([], {})
    assert judge([], kv=[]).pages == 0


def test_all_pages() -> None:
    """A pool of all_pages cuts at its first missing page."""
    verdict = judge([Need("indexer")], kv=[1, 1, 1, 1, 0], indexer=[1, 1, 0, 1, 1])
    assert verdict == Verdict([1, 2], {"kv": 4, "indexer": 2})


def test_trailing_pages_leave_holes() -> None:
    """A window of two ends only where both of its pages are; the first page needs itself alone."""
    verdict = judge([Need("swa", TRAILING, 2)], kv=[1] * 6, swa=[1, 0, 1, 1, 0, 1])
    assert verdict == Verdict([1, 4], {"kv": 6, "swa": 4})


def test_pools_agree_on_a_member_of_each_set() -> None:
    """What two sparse pools have in common is restorable, not the smaller of their maxima."""
    needs = [Need("mamba", TRAILING), Need("draft", TRAILING)]
    verdict = judge(needs, kv=[1] * 5, mamba=[0, 1, 0, 0, 1], draft=[0, 1, 0, 1, 0])
    assert verdict == Verdict([2], {"kv": 5, "mamba": 5, "draft": 4})
    assert verdict.pages == 2


def test_a_pool_that_bears_nothing_ends_the_questions() -> None:
    """After a pool that bears no prefix the others are not asked and have no boundary."""
    stored = Stored(kv=[1, 1], mamba=[0, 0], indexer=[1, 1])
    verdict = restorable_prefixes(2, "kv", [Need("mamba", TRAILING), Need("indexer")], stored)
    assert verdict == Verdict([], {"kv": 2})
    assert stored.asked == ["kv", "mamba"]


def test_a_pool_is_asked_once() -> None:
    """Each pool is asked once, whatever its policy."""
    stored = Stored(kv=[1] * 4, swa=[1] * 4, indexer=[1] * 4, blocks=[1] * 4)
    needs = [Need("swa", TRAILING, 3), Need("indexer"), Need("blocks", GROUPS, 1, 2, 1)]
    restorable_prefixes(4, "kv", needs, stored)
    assert stored.asked == ["kv", "swa", "indexer", "blocks"]


def test_an_anchor_without_bytes_follows_its_sidecars() -> None:
    """The pools beside an anchor without bytes decide; without any that gates nothing is there."""
    assert judge([Need("c4")], None, c4=[1, 1, 0]) == Verdict([1, 2], {"c4": 2})
    assert judge([Need("state", TRAILING)], None, state=[0, 1, 0]).restorable == [2]
    assert judge([], None, c4=[1, 1]) == Verdict([], {})
    assert judge([Need("c4", GROUPS, 1, 1, 1)], None, c4=[1, 1]) == Verdict([], {"c4": 2})


@pytest.mark.parametrize(
    ("present", "block", "group", "covered"),
    [
        ([0, 1, 0, 1, 0, 1], 2, 1, 6),
        ([0, 1, 0, 0, 0, 1], 2, 1, 2),  # a later group does not count
        ([1, 0, 1, 0], 2, 1, 0),  # keys that do not end a block name no group
        ([0, 1, 1, 0, 1, 1, 1], 3, 2, 6),  # the block that is not full is left out
        ([0, 1, 1, 0, 0, 1], 3, 2, 3),
        ([1, 1], 3, 3, 0),
        ([], 2, 1, 0),
    ],
)
def test_block_groups(present: list[int], block: int, group: int, covered: int) -> None:
    """Leading groups that are whole cover their blocks, and nothing is cut by them."""
    kv = [1] * len(present)
    verdict = judge([Need("c4", GROUPS, 1, block, group)], kv=kv, c4=present)
    assert verdict.boundaries.get("c4", 0) == covered
    assert verdict.pages == len(present)


def test_block_groups_go_beyond_the_anchor() -> None:
    """Groups are a form of their own: they count where the anchor has no pages."""
    verdict = judge([Need("c4", GROUPS, 1, 2, 1)], kv=[0, 0, 0, 0], c4=[0, 1, 0, 1])
    assert verdict == Verdict([], {"c4": 4})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy": TRAILING, "trailing": 0}, "'x' needs 0 trailing pages"),
        ({"policy": GROUPS}, "'x' has groups of 0 pages in blocks of 0"),
        ({"policy": GROUPS, "block_pages": 2, "group_pages": 3}, "groups of 3 pages in blocks of"),
    ],
)
def test_needs_without_pages_are_refused(fields: dict[str, object], words: str) -> None:
    """A window or group without pages is one line that names the pool and the number."""
    with pytest.raises(RegistrationError, match=words) as caught:
        Need("x", **fields)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


# -- against a model and against SGLang -----------------------------------------------------------

needs_of_pools = st.lists(
    st.tuples(st.sampled_from(SIDECARS), st.sampled_from([ALL, TRAILING]), st.integers(1, 5)),
    max_size=4,
    unique_by=lambda need: need[0],
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, list[Need], dict[str, list[bool]]]:
    """A few pages, mostly stored, and what is needed of each pool."""
    pages = draw(st.integers(0, 12))
    flags = st.lists(st.sampled_from([True, True, True, False]), min_size=pages, max_size=pages)
    needs = [Need(pool, policy, n) for pool, policy, n in draw(needs_of_pools)]
    return pages, needs, {name: draw(flags) for name in ("kv", *SIDECARS)}


def modelled(pages: int, needs: list[Need], stored: dict[str, list[bool]]) -> list[int]:
    """The restorable prefixes, by the definition."""
    return [
        p
        for p in range(1, pages + 1)
        if all(stored["kv"][:p])
        and all(
            all(stored[n.pool][0 if n.policy is ALL else max(0, p - n.trailing) : p]) for n in needs
        )
    ]


@given(situations())
def test_agrees_with_the_definition(
    situation: tuple[int, list[Need], dict[str, list[bool]]],
) -> None:
    """Any subset of pages stored gives what the definition gives."""
    pages, needs, stored = situation
    verdict = restorable_prefixes(pages, "kv", needs, Stored(**stored))
    assert verdict.restorable == modelled(pages, needs, stored)
    assert verdict.pages == max(verdict.restorable, default=0)


@given(situations())
def test_agrees_with_sglang(situation: tuple[int, list[Need], dict[str, list[bool]]]) -> None:
    """Any subset of pages stored gives what SGLang's file backend gives: the longest prefix, all
    restorable ones and the boundary of each pool."""
    pages, needs, stored = situation
    names = keys(pages)
    with tempfile.TemporaryDirectory() as directory:
        backend = HiCacheFile(config(Path(directory)), directory)
        for pool, flags in stored.items():
            for name, there in zip(names, flags, strict=True):
                if there:
                    stem = backend._get_component_key(name, None if pool == "kv" else pool)
                    (Path(directory) / f"{stem}.bin").touch()
        transfers = [
            PoolTransfer(
                PoolName(need.pool),
                keys=["placeholder"] * need.trailing,
                hit_policy=PoolHitPolicy(need.policy),
            )
            for need in needs
        ]
        theirs = backend.batch_exists_v2(names, transfers)
    ours = restorable_prefixes(pages, "kv", needs, Stored(**stored))
    assert ours.pages == theirs.kv_hit_pages
    assert ours.restorable == (theirs.restorable_prefix_pages or [])
    assert ours.boundaries == theirs.extra_pool_hit_pages
