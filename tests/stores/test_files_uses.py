"""Last uses: which pages are stamped, with what, and that no prefix loses its front."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from filestores import open_plain_files, page_file, wait_until
from hicache_nixl.stores.files_clock import FileClock
from hicache_nixl.stores.files_crew import Crew
from hicache_nixl.stores.files_layout import FilesRoot, page_path
from hicache_nixl.stores.files_uses import (
    COARSEST_GRAIN_NS,
    FINEST_GRAIN_NS,
    Uses,
    grain_for,
    stamp,
)
from slabs import KIB, chain_keys

SPACE = bytes(32)
S = 10**9


class Clock(FileClock):
    """A clock that a test moves."""

    now = 1_000_000 * S

    def now_ns(self) -> int:
        return self.now


class Rig:
    """Uses of pages that are files without content."""

    def __init__(self, directory: Path, crew: Crew) -> None:
        self.root = FilesRoot(directory)
        self.root.prepare()
        self.clock = Clock()
        self.uses = Uses(self.root, self.clock, crew)
        self.uses.grain_ns = 10 * S

    def path(self, key: bytes) -> Path:
        return self.root.namespace_directory(SPACE) / page_path(key)

    def time(self, key: bytes) -> int:
        return self.path(key).stat().st_mtime_ns

    def use(self, keys: list[bytes], prefix: list[bytes], uses: Uses | None = None) -> None:
        """A call: uses pages that are there, adds the others; what is behind it is done, too."""
        import os

        uses = uses or self.uses
        there = [
            (key, depth, self.time(key))
            for depth, key in enumerate(keys, len(prefix))
            if self.path(key).exists()
        ]
        used_ns = uses.note(SPACE, prefix, there)
        new = [key for key in keys if not self.path(key).exists()]
        for key in new:
            self.path(key).parent.mkdir(parents=True, exist_ok=True)
            self.path(key).touch()
            mtime_ns = stamp(used_ns, len(prefix) + keys.index(key))
            os.utime(self.path(key), ns=(mtime_ns, mtime_ns))
        uses.added(SPACE, new, used_ns)
        uses.flush()


@pytest.fixture
def rig(root: Path) -> Iterator[Rig]:
    crew = Crew(4, "uses")
    yield Rig(root, crew)
    crew.close()


def test_pages_of_a_call_are_ordered_by_depth(rig: Rig) -> None:
    """New pages get the time of the call, the deepest the oldest."""
    keys = chain_keys("a", 5)
    rig.use(keys, [])
    assert [rig.time(key) for key in keys] == [rig.clock.now - 1000 * i for i in range(5)]


def test_a_page_is_stamped_once_a_grain(rig: Rig) -> None:
    """A use within the grain changes nothing; one after it stamps pages and their prefix."""
    keys = chain_keys("a", 6)
    rig.use(keys, [])
    before = [rig.time(key) for key in keys]
    rig.clock.now += 9 * S
    rig.uses.note(SPACE, keys[:4], [(key, 4, rig.time(key)) for key in keys[4:]])
    assert not rig.uses._waiting, "nobody is asked"
    rig.use(keys[4:], keys[:4])
    assert [rig.time(key) for key in keys] == before
    rig.clock.now += 2 * S
    rig.use(keys[4:], keys[:4])
    assert [rig.time(key) for key in keys] == [rig.clock.now - 1000 * i for i in range(6)]


def test_prefix_used_by_another_call_keeps_up(rig: Rig) -> None:
    """What is used behind a prefix that was stamped a moment ago is not younger than it."""
    front, one, two = chain_keys("front", 4), chain_keys("one", 4), chain_keys("two", 4)
    rig.use(front + one, [])
    rig.clock.now += 5 * S
    rig.use(two, front)
    assert min(map(rig.time, front)) > max(map(rig.time, two))


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_older_than_one_behind_it(rig: Rig, processes: int, seed: int) -> None:
    """Whatever is used in whatever order by however many processes, the front is youngest."""
    chooser = random.Random(seed)
    crew = rig.uses._crew
    others = [Uses(rig.root, rig.clock, crew) for _ in range(processes)]
    front = chain_keys("front", 3)
    chains = [front + chain_keys(n, 6) for n in range(4)]
    for _ in range(60):
        for uses in others:
            uses.grain_ns = chooser.choice([1, 5, 20]) * S
        rig.clock.now += chooser.choice([0, 1, 7 * S, 30 * S])
        chain = chooser.choice(chains)
        start = chooser.choice([0, 0, 3, 5])
        if start and not rig.path(chain[start - 1]).exists():
            start = 0
        rig.use(chain[start : start + 4], chain[:start], chooser.choice(others))
        for each in chains:
            times = [rig.time(key) for key in each if rig.path(key).exists()]
            assert times == sorted(times, reverse=True)


def test_times_never_go_back(rig: Rig) -> None:
    """A page that another process has stamped later keeps that time."""
    import os

    keys = chain_keys("a", 3)
    rig.use(keys, [])
    later = rig.clock.now + 100 * S
    os.utime(rig.path(keys[1]), ns=(later, later))
    rig.clock.now += 50 * S
    rig.use(keys[2:], keys[:2])
    assert rig.time(keys[1]) == later


def test_memory_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses that cannot be stamped do not fill memory."""
    monkeypatch.setattr("hicache_nixl.stores.files_uses._LIMIT", 100)
    for number in range(20):
        rig.uses.note(SPACE, chain_keys(number, 60), [])
    assert len(rig.uses._waiting) <= 100
    assert len(rig.uses._known) <= 160
    rig.uses.flush()
    assert not rig.uses._waiting


@pytest.mark.parametrize(
    ("span_ns", "grain_ns"),
    [(0, FINEST_GRAIN_NS), (160 * S, 10 * S), (10**7 * S, COARSEST_GRAIN_NS)],
)
def test_grain_is_a_sixteenth_of_the_span(span_ns: int, grain_ns: int) -> None:
    """The grain follows the age of the oldest page, within bounds."""
    assert grain_for(span_ns) == grain_ns


def test_uses_reach_the_files(root: Path) -> None:
    """A get and a put of stored pages stamp them and their prefix, at the latest when closing."""
    keys = chain_keys("a", 10)
    with open_plain_files(root, payload=4 * KIB) as tenant:
        tenant.put(keys)
        first = [page_file(root, key).stat().st_mtime_ns for key in keys]
    for call in ("get", "put"):
        time.sleep(0.1)  # more than the finest grain, which the sweeper may set again
        with open_plain_files(root, payload=4 * KIB) as tenant:
            wait_until(lambda store=tenant.store: store._house._sweeps)
            tenant.store._uses.grain_ns = 1
            assert all(getattr(tenant, call)(keys[5:], prefix=keys[:5]))
        second = [page_file(root, key).stat().st_mtime_ns for key in keys]
        assert all(after > before for before, after in zip(first, second, strict=True))
        assert second == sorted(second, reverse=True)
        first = second
