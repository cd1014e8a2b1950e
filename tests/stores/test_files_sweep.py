"""Sweeping: what is counted, what goes first, what is cleaned up, how little is looked at."""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from filestores import (
    CHANCE,
    leftovers,
    open_plain_files,
    page_file,
    page_files,
    stored_bytes,
    wait_for_a_round,
    wait_until,
)
from hicache_nixl.stores import files_sweep
from hicache_nixl.stores.files_clock import FileClock
from hicache_nixl.stores.files_crew import Crew
from hicache_nixl.stores.files_layout import FAN_OUT, FilesRoot, Owner, page_path, temporary_path
from hicache_nixl.stores.files_ledger import Ledger, Usage
from hicache_nixl.stores.files_sweep import HIGH_WATER, LOW_WATER, Sweeper
from slabs import KIB, MIB, chain_keys, key

HOUR_NS = 3600 * 10**9
SIZE = 1000
SPACES = ("0" * 64, "f" * 64)


class Rig:
    """A directory of pages without content, and a sweeper that does what it is told."""

    def __init__(self, directory: Path, crew: Crew, capacity: int = 1000 * SIZE) -> None:
        self.root = FilesRoot(directory)
        self.root.prepare()
        self.owner = Owner.of_this_process("here")
        self.clock = FileClock()
        self.clock.observe(time.time_ns())
        self.now = self.clock.now_ns()
        self.told: list[Usage] = []
        self.may_go_on = True
        self.ledger = Ledger(self.root, self.owner, capacity)
        self.sweeper = Sweeper(
            self.root,
            self.owner,
            self.ledger,
            capacity_bytes=capacity,
            clock=self.clock,
            crew=crew,
            may_go_on=lambda: self.may_go_on,
            stamp_uses=lambda: None,
        )

    def add(
        self, page_key: bytes, age_s: float, *, space: str = SPACES[0], size: int = SIZE
    ) -> Path:
        """A page that was used some seconds ago."""
        path = self.root.namespaces / space / page_path(page_key)
        return self._make(path, age_s, size)

    def leave(self, page_key: bytes, owner: Owner, age_s: float) -> Path:
        """What a writer left."""
        path = self.root.namespaces / SPACES[0] / temporary_path(page_key, owner, 1)
        return self._make(path, age_s, SIZE)

    def _make(self, path: Path, age_s: float, size: int) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
        mtime_ns = self.now - int(age_s * 1e9)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return path

    def sweep(self, seconds: float = 30) -> None:
        self.sweeper.round(seconds, told=self.told.append)


def known(rig: Rig) -> Usage:
    """What a sweeper that has seen everything tells."""
    usage = rig.sweeper.usage()
    assert usage is not None
    return usage


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew(4, "sweep")
    yield made
    made.close()


@pytest.fixture
def rig(root: Path, crew: Crew) -> Rig:
    return Rig(root, crew)


def test_counts_what_is_there(rig: Rig) -> None:
    """After a look at everything, bytes and pages of all namespaces are known exactly."""
    for number in range(300):
        rig.add(key(number), number, space=SPACES[number % 2], size=SIZE + number % 3)
    rig.sweeper.begin(None)
    rig.sweep(0)
    assert not rig.sweeper.is_known
    assert rig.sweeper.usage() is None
    rig.sweep()
    assert rig.sweeper.is_known
    usage = known(rig)
    assert (usage.used_bytes, usage.pages) == (stored_bytes(rig.root.directory), 300)


def test_a_look_is_cut_into_small_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round looks at as many directories as it has time for, the next goes on; once all were
    seen and nothing was added, it rests."""
    for number in range(600):
        rig.add(key(number), number)
    looked: list[str] = []
    real = FilesRoot.leaves

    def leaves(self: FilesRoot, first: str, namespace: bytes | None = None) -> list[str]:
        looked.append(first)
        return real(self, first, namespace)

    monkeypatch.setattr(FilesRoot, "leaves", leaves)
    rig.sweeper.begin(None)
    rig.sweep(0)
    assert len(looked) == 1
    for _ in range(255):
        rig.sweep(0)
    assert looked == list(FAN_OUT)
    for _ in range(5):
        rig.sweep(0)
    rest = looked[256:]
    assert len(rest) <= 5
    monkeypatch.setattr(files_sweep, "_IDLE_CYCLE_S", 0)
    for _ in range(256):
        rig.sweep(0)
    assert looked[256 : 256 + 256] == list(FAN_OUT)


@pytest.mark.parametrize("kept", [4, 256])
def test_the_oldest_go_first(rig: Rig, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the high mark, pages go from the oldest on until the low mark, of all namespaces, also
    where a directory holds more of them than are remembered."""
    monkeypatch.setattr(files_sweep, "_OLDEST_KEPT", kept)
    ages = list(range(2000))
    random.Random(1).shuffle(ages)
    paths = {
        age: rig.add(key(number), 10 + age, space=SPACES[number % 2])
        for number, age in enumerate(ages)
    }
    rig.sweeper.begin(None)
    rig.sweep()
    rig.sweep()
    left = [age for age, path in paths.items() if path.exists()]
    assert len(left) == int(LOW_WATER * 1000)
    assert set(left) == set(range(len(left)))
    usage = known(rig)
    assert (usage.used_bytes, usage.evicted_pages) == (len(left) * SIZE, 2000 - len(left))
    assert rig.told[-1].used_bytes == usage.used_bytes


def test_nothing_goes_below_the_high_mark(rig: Rig) -> None:
    """As long as there is room, nothing is removed."""
    for number in range(int(HIGH_WATER * 1000)):
        rig.add(key(number), number)
    rig.sweeper.begin(None)
    rig.sweep()
    assert len(page_files(rig.root.directory)) == HIGH_WATER * 1000
    assert rig.told == []


def test_what_was_used_since_stays(rig: Rig) -> None:
    """A page that is stamped after it was seen is not removed; the next oldest is."""
    paths = [rig.add(key(number), 5000 - number) for number in range(940)]
    rig.sweeper.begin(None)
    rig.sweep()
    for path in paths[:100]:
        path.touch()
    rig.ledger.settle(None, 20 * SIZE)
    rig.ledger.publish()
    rig.sweep()
    assert all(path.exists() for path in paths[:100])
    assert not any(path.exists() for path in paths[100:140])


def test_growth_that_was_told_counts(rig: Rig) -> None:
    """Pages that writers say they added make room necessary before they are seen."""
    for number in range(900):
        rig.add(key(number), 1000 - number)
    rig.sweeper.begin(None)
    rig.sweep()
    assert rig.sweeper.used_bytes() == 900 * SIZE
    rig.ledger.settle(None, 60 * SIZE)
    rig.ledger.publish()
    rig.sweep()
    assert len(page_files(rig.root.directory)) == 840
    assert rig.sweeper.used_bytes() == pytest.approx(900 * SIZE, abs=2 * SIZE)


def test_pages_that_others_removed_make_no_room(rig: Rig) -> None:
    """What others removed after it was seen makes room once, and is not evicted."""
    seen = [rig.add(key(number), 5000 - number) for number in range(900)]
    rig.sweeper.begin(None)
    rig.sweep()
    for path in seen:
        path.unlink()
    for number in range(980):
        rig.add(key("new", number), 1000 - number)
    rig.ledger.settle(None, 980 * SIZE)
    rig.ledger.publish()
    rig.sweep()
    left = len(page_files(rig.root.directory))
    assert left <= HIGH_WATER * 1000
    assert known(rig).evicted_pages == 980 - left


@pytest.mark.parametrize("looks", [0, 100, 256, 300])
def test_a_clear_is_counted_anew(rig: Rig, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was looked at while a clear went on, no page is thought to be gone twice, and after
    it everything is looked at, before another page is evicted."""
    old = [rig.add(key(number), 5000 - number) for number in range(400)]
    others = [rig.add(key("other", number), 9000, space=SPACES[1]) for number in range(200)]
    rig.sweeper.begin(None)
    rig.sweep()
    half = [path for path in old if path.name < "8"]
    for path in half:
        path.unlink()
    with monkeypatch.context() as restless:
        restless.setattr(files_sweep, "_IDLE_CYCLE_S", 0)
        for _ in range(looks):
            rig.sweep(0)
    for path in set(old) - set(half):
        path.unlink()
    assert rig.sweeper.used_bytes() >= stored_bytes(rig.root.directory)
    rig.ledger.cleared()
    for number in range(500):
        rig.add(key("new", number), 1)
    rig.ledger.settle(None, 500 * SIZE)
    rig.ledger.publish()
    rig.sweep()
    assert all(path.exists() for path in others)
    assert known(rig).used_bytes == stored_bytes(rig.root.directory) == 700 * SIZE


def test_clears_without_end_do_not_keep_pages_from_eviction(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one clear follows the other, a store that is too full is emptied all the same."""
    for number in range(1500):
        rig.add(key(number), number)
    looks = iter(range(3 * len(FAN_OUT)))
    real = Sweeper._look

    def look(self: Sweeper, number: int) -> None:
        rig.ledger.cleared()
        rig.may_go_on = next(looks, None) is not None
        real(self, number)

    monkeypatch.setattr(Sweeper, "_look", look)
    rig.ledger.publish()
    rig.sweeper.begin(None)
    while rig.may_go_on:
        rig.sweep()
    assert len(page_files(rig.root.directory)) <= HIGH_WATER * 1000


def test_wishes_make_room(rig: Rig) -> None:
    """A writer that found no room gets as much as it wanted."""
    for number in range(930):
        rig.add(key(number), 1000 - number)
    rig.sweeper.begin(None)
    rig.sweep()
    rig.ledger.publish()
    rig.sweep()
    rig.ledger.adopt(known(rig))
    granted = rig.ledger.take(300 * SIZE, SIZE, "a")
    assert granted == 70 * SIZE
    rig.ledger.publish()
    rig.sweep()
    rig.ledger.adopt(known(rig))
    assert granted + rig.ledger.take(300 * SIZE - granted, SIZE, "a") == 300 * SIZE


def test_a_time_in_the_future_is_old(rig: Rig) -> None:
    """Pages from before the file system's clock was set back do not stay for ever."""
    future = [rig.add(key(number), -30 - number) for number in range(60)]
    for number in range(60, 1000):
        rig.add(key(number), 1)
    rig.sweeper.begin(None)
    rig.sweep()
    assert not any(path.exists() for path in future)


def test_leftovers_go_when_their_writer_has(rig: Rig) -> None:
    """What is being written stays; leftovers of dead processes here go at once, those of others
    after an hour by the file system's time."""
    from dataclasses import replace

    me = rig.owner
    away = Owner("away", 1, 1, "0")
    stay = [rig.leave(key(1), me, 10), rig.leave(key(2), away, 3500)]
    go = [
        rig.leave(key(3), replace(me, started=me.started - 1), 10),
        rig.leave(key(4), away, 3700),
        rig.leave(key(5), me, 3700),
    ]
    rig.sweeper.begin(None)
    rig.sweep()
    assert all(path.exists() for path in stay)
    assert not any(path.exists() for path in go)
    assert rig.sweeper.used_bytes() == len(stay) * SIZE


def test_empty_directories_go_after_a_while(rig: Rig) -> None:
    """A directory without anything is removed once it was left alone for long; others stay."""
    old, new, used, foreign = (rig.add(key(number), 1).parent for number in range(4))
    for place in (old, new, foreign):
        for path in place.iterdir():
            path.unlink()
    (foreign / "notes").touch()
    for place in (old, used, foreign):
        os.utime(place, ns=(rig.now - 2 * HOUR_NS,) * 2)
    rig.sweeper.begin(None)
    rig.sweep()
    assert [place.is_dir() for place in (old, new, used, foreign)] == [False, True, True, True]


def test_nothing_is_removed_without_the_lease(rig: Rig) -> None:
    """A sweeper that is no longer sure to be the one removes nothing more."""
    for number in range(2000):
        rig.add(key(number), number)
    rig.sweeper.begin(None)
    rig.sweep(0)
    rig.may_go_on = False
    for _ in range(300):
        rig.sweep(0)
    assert rig.sweeper.is_known
    rig.sweep(5)
    assert len(page_files(rig.root.directory)) == 2000


def test_a_new_sweeper_relies_on_the_last_one(rig: Rig) -> None:
    """Until everything was seen, writers are told what the last sweeper knew and what has come;
    nothing is removed for it."""
    for number in range(100):
        rig.add(key(number), number)
    rig.ledger.settle(None, 3 * SIZE)
    rig.ledger.publish()
    rig.sweeper.begin(Usage(999 * SIZE, 999, 7, 1, {str(rig.owner): 1 * SIZE}))
    rig.ledger.settle(None, 5 * SIZE)
    rig.sweep(0)
    assert known(rig).used_bytes == (999 + 2 + 5) * SIZE
    rig.sweep()
    assert rig.sweeper.is_known
    assert len(page_files(rig.root.directory)) == 100
    assert known(rig).evicted_pages == 7
    assert rig.sweeper.used_bytes() <= 105 * SIZE


def test_a_directory_that_cannot_be_read_does_not_stop_the_rest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error costs a round; later rounds go on behind it."""
    for number in range(600):
        rig.add(key(number), number)
    real = files_sweep.entries_of

    def entries_of(leaf: str) -> Any:
        if "/10/" in leaf:
            raise OSError(5, "Input/output error")
        return real(leaf)

    monkeypatch.setattr(files_sweep, "entries_of", entries_of)
    rig.sweeper.begin(None)
    with pytest.raises(OSError, match="Input/output"):
        rig.sweep()
    rig.sweep()
    assert rig.sweeper.is_known


def test_a_listing_that_hangs_changes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known of a directory stays known while the file system does not answer."""
    for number in range(300):
        rig.add(key(number), number)
    rig.sweeper.begin(None)
    rig.sweep()
    go_on = threading.Event()
    monkeypatch.setattr(files_sweep, "_CALL_LIMIT_S", 0.01)
    monkeypatch.setattr(files_sweep, "entries_of", lambda leaf: go_on.wait())
    for number in range(256):
        if rig.root.leaves(FAN_OUT[number]):
            rig.sweeper._look(number)
            break
    assert rig.sweeper.used_bytes() == 300 * SIZE
    go_on.set()


# -- in a store --------------------------------------------------------------------------------


def sweep_when_asked(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let housekeeping go on within the calls that hurry it, so that it never comes between two."""
    house = store._house
    wait_until(lambda: house._sweeps and not house._sweeper.is_behind())
    sweep, idle = house._round, threading.Event()
    monkeypatch.setattr(house, "_round", idle.set)
    assert idle.wait(30)  # then the last round is over
    monkeypatch.setattr(house, "hurry", sweep)
    monkeypatch.setattr(house, "wait_for_news", lambda deadline: None)


def test_budget_is_kept(root: Path) -> None:
    """However much is put, the files take no more than the capacity, but for chance, and puts go
    on."""
    capacity = 300 * 8 * KIB
    most = 0
    with open_plain_files(root, capacity=capacity) as tenant:
        for number in range(40):
            assert all(tenant.put(chain_keys(number, 50)))
            most = max(most, stored_bytes(root))
        assert all(tenant.get(chain_keys(39, 50)))
        assert capacity // 2 < most <= CHANCE * capacity
        assert tenant.store.use().evicted_pages > 1000
        wait_until(lambda: stored_bytes(root) <= HIGH_WATER * capacity)


def test_prefixes_keep_their_front(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After evictions of all kinds, what is stored of a prefix is its front."""
    capacity = 400 * 8 * KIB
    chooser = random.Random(3)
    chains = [chain_keys(number, 40) for number in range(25)]
    with open_plain_files(root, capacity=capacity) as tenant:
        sweep_when_asked(tenant.store, monkeypatch)
        for _ in range(150):
            chain = chooser.choice(chains)
            start = chooser.choice([0, 10, 20])
            start = min(start, tenant.exists(chain))
            if chooser.random() < 0.5:
                tenant.put(chain[start : start + 20], prefix=chain[:start])
            else:
                tenant.get(chain[start : start + 20], prefix=chain[:start])
        stored = [tenant.store.present(tenant.namespace.digest, chain).tolist() for chain in chains]
        assert tenant.store.use().evicted_pages > 200
        assert 200 < sum(map(sum, stored)) <= 400
        for present in stored:
            assert present == sorted(present, reverse=True)


def test_used_pages_outlive_others(root: Path) -> None:
    """A prefix that is read all the time is there in the end, whatever passes through the store."""
    capacity = 300 * 8 * KIB
    keys = chain_keys("hot", 30)
    with open_plain_files(root, capacity=capacity) as tenant:
        tenant.put(keys)
        for number in range(60):
            assert all(tenant.get(keys[20:], prefix=keys[:20]))
            tenant.put(chain_keys(number, 20))
        assert all(tenant.get(keys))
        assert tenant.store.use().evicted_pages > 800


def test_pages_of_a_call_do_not_make_room_for_it(root: Path) -> None:
    """A call that asks for more than fits stores the first pages, and keeps what it uses."""
    capacity = 100 * 8 * KIB
    keys = chain_keys("a", 400)
    with open_plain_files(root, capacity=capacity, pages=400) as tenant:
        results = tenant.put(keys)
        count = sum(results)
        assert 60 <= count <= 95
        assert results == [True] * count + [False] * (400 - count)
        tenant.store._uses.grain_ns = 1
        more = tenant.put(keys[count:], prefix=keys[:count])
        assert tenant.exists(keys) >= count
        assert sum(more) <= 10
        assert all(tenant.put(chain_keys("b", 40)))
        wait_until(lambda: stored_bytes(root) <= capacity)
        assert tenant.exists(chain_keys("b", 40)) == 40


@pytest.mark.parametrize("who", ["the sweeper", "another writer", "administration"])
def test_clear_gives_room(root: Path, who: str) -> None:
    """After clear, a store that was full takes pages again without evicting others."""
    capacity = 300 * 8 * KIB
    with (
        open_plain_files(root, capacity=capacity, model="one") as one,
        open_plain_files(root, capacity=capacity, model="two") as two,
    ):
        assert all(two.put(chain_keys("b", 70)))
        assert all(one.put(chain_keys("a", 100)))
        if who == "the sweeper":
            assert one.store._house._sweeps
            one.store.clear(one.namespace.digest)
        elif who == "another writer":
            two.store.clear(one.namespace.digest)
            wait_for_a_round(two)
        else:
            with open_plain_files(root, capacity=capacity, keeps_house=False) as administration:
                administration.store.clear(one.namespace.digest)
        wait_until(lambda: all(two.put(chain_keys("c", 70))))
        assert two.exists(chain_keys("b", 70)) == 70


def test_sweeping_does_not_slow_calls_down_for_long(root: Path) -> None:
    """Housekeeping that hangs is not waited for."""
    with open_plain_files(root, capacity=2 * MIB, timeout_s=1) as tenant:
        tenant.put(chain_keys("a", 100))
        go_on = threading.Event()
        tenant.store._house._sweeper.round = lambda *_, **__: go_on.wait()
        tenant.store._house.hurry()
        time.sleep(0.1)
        start = time.monotonic()
        assert all(tenant.get(chain_keys("a", 100)))
        tenant.put(chain_keys("b", 100))
        tenant.put(chain_keys("c", 100))
        tenant.put(chain_keys("d", 100))
        assert time.monotonic() - start < 20
        go_on.set()
        del tenant.store._house._sweeper.round
    assert not leftovers(root)
    assert stored_bytes(root) <= 2 * MIB
    assert page_file(root, chain_keys("a", 1)[0]).exists()
