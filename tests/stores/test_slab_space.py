"""Space: budget, order of eviction, growth, full disks, and sizes side by side."""

import contextlib
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_nixl.errors import StoreError
from hicache_nixl.stores import slab_space
from hicache_nixl.stores.slab_segments import SegmentFile
from hicache_nixl.stores.slab_space import segment_size
from slabs import (
    KIB,
    MIB,
    Tenant,
    allocated,
    chain_keys,
    check_files,
    check_slots,
    in_threads,
    key,
    open_plain,
    open_tenant,
    query,
)

SIZE = 8 * KIB
SMALL: dict[str, Any] = {"segment": 16 * SIZE, "capacity": 64 * SIZE}
"""64 pages in four segments."""


# -- budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "segment"),
    [
        (MIB, MIB),
        (16 * MIB, 16 * MIB),
        (64 * MIB, 16 * MIB),
        (2 << 30, 32 * MIB),
        (64 << 30, 1 << 30),
        (10 << 40, 16 << 30),
    ],
)
def test_segment_size(capacity: int, segment: int) -> None:
    """About 64 segments, neither tiny nor huge, never above the budget."""
    assert segment_size(capacity) == segment


def test_budget_is_kept_on_disk(root: Path) -> None:
    """Whatever is stored, segment files take no more blocks than the budget."""
    how = {"segment": 1 * MIB, "capacity": 5 * MIB + 300 * KIB, "payload": 60 * KIB}
    with open_plain(root, **how) as tenant:
        for number in range(6):
            assert all(tenant.put(chain_keys(number, 30)))
            assert allocated([root]) <= how["capacity"]
        slots = check_slots(root)
        # 16 records fit into a segment, and the rest of the budget is worth a smaller one.
        assert slots.pages == how["capacity"] // (64 * KIB)
        assert allocated([root]) == slots.pages * 64 * KIB
        use = tenant.store.use()
        assert (use.pages, use.allocated_bytes) == (slots.pages, allocated([root]))
        assert use.evicted_pages == 180 - slots.pages
        check_files([root])


def test_segments_are_never_tiny(root: Path) -> None:
    """A rest of the budget below a sixteenth of a segment is left alone."""
    with open_plain(root, segment=64 * SIZE, capacity=67 * SIZE) as tenant:
        assert sum(tenant.put(chain_keys("a", 100))) == 64
        assert allocated([root]) == 64 * SIZE


def test_page_larger_than_a_segment(root: Path) -> None:
    """A record that is larger than a segment gets segments of its own size."""
    with open_plain(root, segment=64 * KIB, capacity=1 * MIB, payload=252 * KIB) as tenant:
        assert sum(tenant.put(chain_keys("a", 5))) == 4
        assert allocated([root]) == 1 * MIB


def test_lower_capacity_at_reopening(root: Path) -> None:
    """The coldest segments go until the budget is met; what was used last stays."""
    with open_plain(root, **SMALL) as tenant:
        for name in "abcd":
            tenant.put(chain_keys(name, 16))
        tenant.get(chain_keys("a", 16))
    with open_plain(root, segment=16 * SIZE, capacity=32 * SIZE) as tenant:
        assert allocated([root]) == 32 * SIZE
        assert [tenant.exists(chain_keys(name, 16)) for name in "abcd"] == [16, 0, 0, 16]
        check_files([root])
        check_slots(root)
    with open_plain(root, **SMALL) as tenant:
        assert all(tenant.put(chain_keys("e", 16)))
        assert allocated([root]) == 48 * SIZE


# -- order of eviction ------------------------------------------------------------------------


def test_least_recently_used_goes_first(root: Path) -> None:
    """Reading keeps pages, and the deepest of a prefix goes before what it needs."""
    with open_plain(root, **SMALL) as tenant:
        for name in "abcd":
            tenant.put(chain_keys(name, 16))
        tenant.get(chain_keys("a", 16))
        assert all(tenant.put(chain_keys("e", 20)))
        assert [tenant.exists(chain_keys(name, 16)) for name in "abcde"] == [16, 0, 12, 16, 16]
        assert tenant.readable(chain_keys("c", 16)) == 12


def test_a_call_does_not_evict_its_own(root: Path) -> None:
    """A call larger than the store stores what fits, from the front, and keeps its prefix."""
    with open_plain(root, **SMALL) as tenant:
        keys = chain_keys("a", 128)
        assert tenant.put(keys[:100]) == [True] * 64 + [False] * 36
        assert tenant.exists(keys) == 64
        assert not any(tenant.put(keys[64:], prefix=keys[:64]))
        assert tenant.put(keys[:80]) == [True] * 64 + [False] * 16
        assert all(tenant.get(keys[:64]))
        other = chain_keys("b", 10)
        assert all(tenant.put(other))
        assert tenant.exists(keys) == 54
        assert tenant.put(keys[54:64], prefix=keys[:54]) == [True] * 10
        assert tenant.exists(other) == 0


def test_prefix_of_a_used_page_is_used(root: Path) -> None:
    """The pages before those of a call stay at least as long as they do."""
    with open_plain(root, **SMALL) as tenant:
        keys = chain_keys("a", 32)
        tenant.put(keys[:16])
        tenant.put(chain_keys("b", 16))
        tenant.put(keys[16:], prefix=keys[:16])
        tenant.put(chain_keys("c", 16))
        tenant.put(chain_keys("d", 16))
        assert tenant.exists(chain_keys("b", 16)) == 0
        assert tenant.exists(keys) == 32
        tenant.get(keys[20:], prefix=keys[:20])
        tenant.put(chain_keys("e", 32))
        assert tenant.exists(keys) == 32


class Chains:
    """Prefixes that share their beginnings, and the keys of each."""

    def __init__(self, chooser: random.Random) -> None:
        self.chains: list[list[bytes]] = []
        for number in range(8):
            stem: list[bytes] = []
            if self.chains and chooser.random() < 0.7:
                other = chooser.choice(self.chains)
                stem = other[: chooser.randrange(len(other))]
            self.chains.append(stem + chain_keys(("tail", number), chooser.randrange(4, 40)))


def assert_no_holes(tenant: Tenant, root: Path, chains: list[list[bytes]]) -> None:
    """What is stored of each chain is its front."""
    stored = {row[0] for row in query(root, "SELECT key FROM pages")}
    for chain in chains:
        there = [page in stored for page in chain]
        assert there == sorted(there, reverse=True), "a prefix has a hole"
        assert tenant.exists(chain) == sum(there)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_prefixes_have_no_holes(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Chains that share beginnings, two users, any order of calls: only fronts are stored."""
    chooser = random.Random(seed)
    root = tmp_path_factory.mktemp("chains") / "store"
    chains = Chains(chooser).chains
    slots = chooser.choice([48, 64, 100])
    how: dict[str, Any] = {"segment": 16 * SIZE, "capacity": slots * SIZE}
    with open_plain(root, **how) as one, open_plain(root, **how) as two:
        for _ in range(30):
            tenant = chooser.choice([one, two])
            chain = chooser.choice(chains)
            there = tenant.exists(chain)
            start = chooser.randrange(min(there, len(chain) - 1) + 1)
            end = chooser.randrange(start, len(chain)) + 1
            keys, prefix = chain[start:end], chain[:start]
            if chooser.random() < 0.6:
                stored = tenant.put(keys, prefix)
                assert stored == sorted(stored, reverse=True)
                assert tenant.exists(chain) >= start + sum(stored)
            else:
                assert sum(tenant.get(keys, prefix)) == max(0, min(there, end) - start)
            assert_no_holes(tenant, root, chains)
            slots_now = check_slots(root)
            assert slots_now.claimed == 0
            assert allocated([root]) <= how["capacity"]
        for tenant in (one, two):
            for chain in chains:
                tenant.get(chain)  # raises for a wrong byte


def test_concurrent_puts_of_one_prefix_leave_no_hole(root: Path) -> None:
    """A page that two calls store at once counts as used by the later one."""
    with open_plain(root, **SMALL) as tenant:
        front, rest = chain_keys("a", 8), chain_keys("a", 8, 8)
        space = tenant.store._opening.space
        early = space.claim(8, SIZE, touches=(), namespace=1, in_use=(), deadline=float("inf"))
        assert all(tenant.put(chain_keys("b", 16)))
        assert all(tenant.put([*front, *rest]))
        space.publish(early, 1, [])
        (uses,) = query(
            root, "SELECT count(DISTINCT used) FROM pages WHERE key IN (?,?)", front[:2]
        )
        assert uses == (1,)


# -- sizes side by side -----------------------------------------------------------------------


def test_sizes_share_the_budget_by_use(root: Path) -> None:
    """A segment whose pages were all used longer ago goes for one of another size."""
    with (
        open_plain(root, **SMALL, model="small") as small,
        open_plain(root, **SMALL, model="big", payload=28 * KIB) as big,
    ):
        for name in "abcd":
            assert all(small.put(chain_keys(name, 16)))
        assert sum(big.put(chain_keys("big", 4))) == 4
        assert [small.exists(chain_keys(name, 16)) for name in "abcd"] == [0, 16, 16, 16]
        for name in "bcd":
            small.get(chain_keys(name, 16))
        small.store.namespaces()  # writes uses down
        assert all(big.put(chain_keys("more", 4)))
        assert [small.exists(chain_keys(name, 16)) for name in "bcd"] == [16] * 3
        assert big.exists(chain_keys("big", 4)) == 0, "what was used longest ago was of this size"
        for name in "ef":
            assert all(small.put(chain_keys(name, 16)))
        assert big.exists(chain_keys("more", 4)) in (0, 4)
        assert allocated([root]) <= SMALL["capacity"]
        check_slots(root)
        check_files([root])


def test_sizes_that_alternate(root: Path) -> None:
    """Whatever two sizes do, the budget holds, bytes are right and slots do not get lost."""
    chooser = random.Random(5)
    with (
        open_plain(root, **SMALL, model="small") as small,
        open_plain(root, **SMALL, model="big", payload=28 * KIB) as big,
    ):
        for number in range(60):
            tenant, most = chooser.choice([(small, 40), (big, 10)])
            keys = chain_keys((tenant.model, chooser.randrange(12)), chooser.randrange(1, most))
            if chooser.random() < 0.6:
                assert any(tenant.put(keys)), number
                assert tenant.get(keys)[0]
            else:
                tenant.get(keys)
            assert allocated([root]) <= SMALL["capacity"]
        check_slots(root)
        check_files([root])


def test_segment_that_is_being_written_is_not_dropped(root: Path) -> None:
    """Neither for another size nor for a smaller budget."""
    with open_plain(root, segment=16 * SIZE, capacity=16 * SIZE, model="small") as small:
        space = small.store._opening.space
        held = space.claim(4, SIZE, touches=(), namespace=1, in_use=(), deadline=float("inf"))
        with open_plain(
            root, segment=16 * SIZE, capacity=16 * SIZE, model="big", payload=28 * KIB
        ) as big:
            assert not any(big.put(chain_keys("big", 2)))
            space.give_back(held, held.slots)
            assert all(big.put(chain_keys("big", 2)))
        check_files([root])


# -- growth and full disks --------------------------------------------------------------------


def test_growth_fills_the_emptiest_directory(tmp_path: Path) -> None:
    """Directories keep in step, also after segments went."""
    directories = [tmp_path / "one", tmp_path / "two"]
    with open_plain(directories, segment=16 * SIZE, capacity=64 * SIZE) as tenant:
        tenant.put(chain_keys("a", 64))
        assert [allocated([d]) for d in directories] == [32 * SIZE] * 2
        for segment in tenant.store._opening.index.segments():
            if segment.directory == 1:
                assert tenant.store._opening.space.drop(segment)
        assert all(tenant.put(chain_keys("b", 32)))
        assert [allocated([d]) for d in directories] == [32 * SIZE] * 2
        check_files(directories)


@pytest.mark.parametrize("error", [28, 5, 13])
def test_directory_that_cannot_take_a_segment(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """A disk that is full or fails costs new pages only; the next attempt is made later."""
    with open_plain(root, **SMALL) as tenant:
        assert all(tenant.put(chain_keys("a", 16)))
        calls: list[SegmentFile] = []

        def fail(directories: object, segment: SegmentFile) -> None:
            calls.append(segment)
            raise OSError(error, os.strerror(error))

        with monkeypatch.context() as patch:
            patch.setattr(slab_space, "preallocate", fail)
            assert all(tenant.put(chain_keys("b", 10)))
            assert all(tenant.put(chain_keys("c", 10)))
            # Halves down to a sixteenth for a full disk, one attempt for anything else.
            assert [segment.slots for segment in calls] == (
                [16, 8, 4, 2, 1] if error == 28 else [16]
            )
        assert tenant.exists(chain_keys("a", 16)) == 0
        assert allocated([root]) == 16 * SIZE
        tenant.store._opening.space._no_growth_until = 0
        assert all(tenant.put(chain_keys("d", 32)))
        assert allocated([root]) == 48 * SIZE
        check_files([root])


def test_statvfs_that_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot be looked at is trouble, not a lack of room."""

    def fail(path: object) -> None:
        raise OSError(5, "Input/output error")

    with open_plain(root, **SMALL) as tenant:
        monkeypatch.setattr(slab_space.os, "statvfs", fail)
        with pytest.raises(StoreError, match=r"cannot grow: .*Input/output error"):
            tenant.put(chain_keys("a", 4))
        assert check_slots(root).claimed == 0


def fill(disk: Path, leave: int = 0) -> Path:
    """Take the blocks of a file system except for some bytes."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        free = os.statvfs(disk)
        nbytes = free.f_bavail * free.f_frsize - max(leave, MIB)
        os.posix_fallocate(file.fileno(), 0, nbytes)
        file.seek(nbytes)
        with contextlib.suppress(OSError):
            while leave == 0:
                os.write(file.fileno(), bytes(4096))
    return filler


def test_full_disk(small_disk: Callable[[int], Path]) -> None:
    """128 pages where about 40 fit: those are readable, the rest is False, later it all works."""
    disk = small_disk(200)
    filler = fill(disk, leave=76 * MIB)
    keys = chain_keys("a", 128)
    how: dict[str, Any] = {"capacity": 1 << 30, "segment": 64 * MIB, "payload": 1 * MIB}
    with open_tenant(disk / "store", **how, staging=32 * MIB) as tenant:
        stored = tenant.put(keys)
        fitting = sum(stored)
        assert 20 < fitting < 60
        assert stored == [True] * fitting + [False] * (128 - fitting)
        assert tenant.exists(keys) == fitting
        assert all(tenant.get(keys[:fitting]))
        assert tenant.put(keys) == stored, "nothing of the call is evicted for it"
        assert check_slots(disk / "store").claimed == 0
        check_files([disk / "store"])
        before = tenant.exists(chain_keys("b", 20))
        assert before == 0
        assert all(tenant.put(chain_keys("b", 20))), "older pages make room"
        filler.unlink()
        tenant.store._opening.space._no_growth_until = 0
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))
        check_files([disk / "store"])


def test_index_that_cannot_grow(small_disk: Callable[[int], Path]) -> None:
    """Without a block left for the index, puts fail and gets go on; nothing stays behind."""
    disk = small_disk(64)
    how: dict[str, Any] = {"capacity": 8 * MIB, "segment": 2 * MIB}
    with open_tenant(disk / "store", **how) as tenant:
        keys = chain_keys("a", 100)
        assert all(tenant.put(keys))
        filler = fill(disk)
        failed = 0
        for number in range(40):
            try:
                tenant.put(chain_keys(number, 100))
            except StoreError as error:
                failed += "full" in str(error)
        assert failed
        assert tenant.exists(keys) in (0, 100)
        for name in ["a", *range(40)]:
            tenant.get(chain_keys(name, 100))  # raises for a wrong byte
        filler.unlink()
        for number in range(40):
            assert all(tenant.put(chain_keys(("after", number), 100)))
            assert all(tenant.get(chain_keys(("after", number), 100)))
        assert check_slots(disk / "store").claimed == 0
        check_files([disk / "store"])
    with open_tenant(disk / "store", **how) as tenant:
        assert all(tenant.get(chain_keys(("after", 39), 100)))


# -- claims -----------------------------------------------------------------------------------


def test_claims_of_many_threads(root: Path) -> None:
    """No slot is handed out twice, and all come back."""
    with open_plain(root, segment=64 * SIZE, capacity=256 * SIZE) as tenant:
        space = tenant.store._opening.space
        held: set[tuple[int, int]] = set()
        lock = threading.Lock()

        def work(seed: int) -> None:
            chooser = random.Random(seed)
            for _ in range(30):
                claim = space.claim(
                    chooser.randrange(1, 40),
                    SIZE,
                    touches=(),
                    namespace=1,
                    in_use=(),
                    deadline=float("inf"),
                )
                with lock:
                    assert not held & set(claim.slots)
                    held.update(claim.slots)
                with lock:
                    held.difference_update(claim.slots)
                space.give_back(claim, claim.slots)

        in_threads(work, range(4))
        assert not space.holds_claims
        assert check_slots(root).claimed == 0


def test_claim_that_fails_half_way(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that were claimed before the index failed are not lost."""
    with open_plain(root, **SMALL) as tenant:
        tenant.put([key("one")])
        index, calls = tenant.store._opening.index, []
        claim = index.claim

        def second_fails(**named: Any) -> Any:
            calls.append(named)
            if len(calls) == 2:
                raise StoreError("disk I/O error")
            return claim(**named)

        monkeypatch.setattr(index, "claim", second_fails)
        with pytest.raises(StoreError, match="I/O"):
            tenant.put(chain_keys("a", 20))
        assert len(calls) == 2
        assert check_slots(root).claimed == 0
        assert not tenant.store._opening.space.holds_claims
