"""Staging: who may use which bytes until when."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_nixl.memory import allocate
from hicache_nixl.record import ALIGNMENT
from hicache_nixl.staging import Lease, StagingArena


def arena_of(blocks: int) -> StagingArena:
    return StagingArena(allocate(blocks * ALIGNMENT))


def test_a_lease_is_aligned_and_its_view_is_its_memory() -> None:
    """A lease is rounded up to whole blocks; address, offset and view are the same bytes."""
    arena = arena_of(8)
    with arena.lease(1, timeout=0) as first, arena.lease(ALIGNMENT + 1, timeout=0) as second:
        assert (first.nbytes, second.nbytes) == (ALIGNMENT, 2 * ALIGNMENT)
        for lease in (first, second):
            assert lease.address % ALIGNMENT == 0
            assert lease.address == arena.address + lease.offset == lease.view.ctypes.data
            assert lease.view.shape == (lease.nbytes,)
        assert arena.in_use_bytes == 3 * ALIGNMENT
    assert arena.in_use_bytes == 0
    assert arena.peak_bytes == 3 * ALIGNMENT


def test_only_whole_blocks_of_the_buffer_are_used() -> None:
    """A budget that is no multiple of 4 KiB is rounded down."""
    assert StagingArena(allocate(3 * ALIGNMENT - 1)).nbytes == 2 * ALIGNMENT


@pytest.mark.parametrize("nbytes", [0, 4 * ALIGNMENT + 1])
def test_what_can_never_be_had_is_an_error(nbytes: int) -> None:
    """Nothing, and more than the arena has, is refused at once instead of being waited for."""
    with pytest.raises(ValueError, match="cannot come from"):
        arena_of(4).lease(nbytes, timeout=10)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**6)), max_size=60))
def test_leases_never_overlap_and_coalesce(steps: list[tuple[int, int]]) -> None:
    """In any order of leases and releases: disjoint, within the budget, refused only if no gap is
    large enough, and one range again in the end."""
    arena = arena_of(16)
    held: list[Lease] = []
    for blocks, choice in steps:
        if held and choice % 3 == 0:
            held.pop(choice % len(held)).release()
        lease = arena.lease(blocks * ALIGNMENT, timeout=0)
        taken = np.zeros(16, np.int64)
        for other in held:
            taken[other.offset // ALIGNMENT : (other.offset + other.nbytes) // ALIGNMENT] += 1
        if lease is None:
            gaps = "".join("x" if t else "." for t in taken).split("x")
            assert max(map(len, gaps)) < blocks
            continue
        where = slice(lease.offset // ALIGNMENT, (lease.offset + lease.nbytes) // ALIGNMENT)
        assert not taken[where].any()
        held.append(lease)
        assert arena.in_use_bytes == sum(other.nbytes for other in held) <= arena.nbytes
    for lease in held:
        lease.release()
    assert arena.in_use_bytes == 0
    assert arena.lease(arena.nbytes, timeout=0) is not None


def test_release_is_idempotent() -> None:
    """A second release does not give back what somebody else holds by now."""
    arena = arena_of(2)
    first = arena.lease(2 * ALIGNMENT, timeout=0)
    assert first is not None
    first.release()
    second = arena.lease(2 * ALIGNMENT, timeout=0)
    first.release()
    assert second is not None
    assert arena.in_use_bytes == 2 * ALIGNMENT
    assert arena.lease(ALIGNMENT, timeout=0) is None


def test_quarantine_is_counted_until_the_release() -> None:
    """Bytes that late transfers hold are told apart from those in use, each once."""
    arena = arena_of(4)
    with arena.lease(ALIGNMENT, timeout=0), arena.lease(2 * ALIGNMENT, timeout=0) as late:
        assert arena.quarantined_bytes == 0
        late.quarantine()
        late.quarantine()
        assert (arena.quarantined_bytes, arena.in_use_bytes) == (2 * ALIGNMENT, 3 * ALIGNMENT)
        late.release()
        assert (arena.quarantined_bytes, arena.in_use_bytes) == (0, ALIGNMENT)
        late.quarantine()
        assert arena.quarantined_bytes == 0


def test_a_wait_ends_with_its_timeout() -> None:
    """Where nothing comes free, the caller is told so after its timeout and not much later."""
    arena = arena_of(1)
    with arena.lease(1, timeout=0):
        start = time.monotonic()
        assert arena.lease(1, timeout=0.05) is None
        assert 0.05 <= time.monotonic() - start < 5
    assert arena.lease(1, timeout=0) is not None  # the one who gave up is not waited for


def test_a_waiting_caller_gets_what_is_released() -> None:
    """A release wakes the one who waits."""
    arena = arena_of(1)
    held = arena.lease(1, timeout=0)
    assert held is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(arena.lease, 1, timeout=30)
        time.sleep(0.02)
        held.release()
        assert waiting.result(timeout=30) is not None


def test_small_leases_do_not_starve_a_large_one() -> None:
    """Who came first is served first: later callers, also those who do not wait, come behind."""
    arena = arena_of(4)
    held = [arena.lease(ALIGNMENT, timeout=0) for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(arena.lease, 4 * ALIGNMENT, timeout=30)
        while not arena._waiting:
            time.sleep(0.001)
        assert arena.lease(ALIGNMENT, timeout=0) is None
        for lease in held:
            assert lease is not None
            lease.release()
        taken = large.result(timeout=30)
    assert taken is not None
    assert taken.nbytes == 4 * ALIGNMENT


def test_many_threads_never_share_a_byte() -> None:
    """Under load each lease keeps what its holder wrote, and everything comes back."""
    arena = arena_of(12)
    stop = time.monotonic() + 1.0

    def work(number: int) -> int:
        chance = random.Random(number)
        leases = 0
        while time.monotonic() < stop:
            lease = arena.lease(chance.randint(1, 6) * ALIGNMENT, timeout=30)
            assert lease is not None
            with lease:
                lease.view[:] = number
                if chance.random() < 0.3:
                    time.sleep(0.0005)
                assert (lease.view == number).all()
                assert arena.in_use_bytes <= arena.nbytes
            leases += 1
        return leases

    with ThreadPoolExecutor(8) as pool:
        assert min(pool.map(work, range(1, 9))) > 0
    assert arena.in_use_bytes == 0
    assert arena.peak_bytes <= arena.nbytes
    assert arena.lease(arena.nbytes, timeout=0) is not None


def test_a_release_from_many_threads_counts_once() -> None:
    """Threads that release the same lease at once give it back once."""
    arena = arena_of(4)
    for _ in range(50):
        lease = arena.lease(ALIGNMENT, timeout=0)
        other = arena.lease(ALIGNMENT, timeout=0)
        assert lease is not None
        assert other is not None
        start = threading.Barrier(4)

        def release(lease: Lease = lease, start: threading.Barrier = start) -> None:
            start.wait(30)
            lease.release()

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(release) for _ in range(4)]:
                done.result(timeout=30)
        assert arena.in_use_bytes == ALIGNMENT
        other.release()
    assert arena.lease(arena.nbytes, timeout=0) is not None
