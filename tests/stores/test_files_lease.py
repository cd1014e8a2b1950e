"""Who sweeps: one at a time, also when hosts die, hang, or disagree about the time."""

import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_nixl.stores.files_layout import Owner
from hicache_nixl.stores.files_lease import Lease

EXPIRY_S = 30.0


class Host:
    """A process on a host of its own, with a clock that a test moves."""

    def __init__(self, directory: Path, name: str, now: float = 0.0) -> None:
        self.now = now
        self.owner = Owner(name, 1, 1, "0")
        self.lease = Lease(directory, self.owner, expiry_s=EXPIRY_S, monotonic=lambda: self.now)


def hosts(directory: Path, count: int) -> list[Host]:
    """Hosts whose clocks are far apart."""
    return [Host(directory, f"host-{n}", now=3600.0 * n) for n in range(count)]


def test_one_of_many(tmp_path: Path) -> None:
    """The first who asks gets it; the others do not, as long as it beats."""
    everybody = hosts(tmp_path, 4)
    for _ in range(100):
        assert [host.lease.renew() for host in everybody] == [True, False, False, False]
        for host in everybody:
            host.now += EXPIRY_S / 3
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("others", [1, 3])
def test_a_dead_holder_is_replaced(tmp_path: Path, others: int) -> None:
    """When the beat stops, exactly one takes over after the expiry by its own clock, not before."""
    first, *rest = hosts(tmp_path, 1 + others)
    assert first.lease.renew()
    for host in rest:
        host.lease.renew()
        host.now += EXPIRY_S - 1
        assert not host.lease.renew()
        host.now += 2
    assert sum(host.lease.renew() for host in rest) == 1
    assert sum(host.lease.renew() for host in rest) == 1


def test_a_holder_that_comes_back_steps_down(tmp_path: Path) -> None:
    """Who was held up long enough does not sweep before it looks, and then no longer."""
    first, second = hosts(tmp_path, 2)
    first.lease.renew()
    second.lease.renew()
    second.now += EXPIRY_S + 1
    first.now += EXPIRY_S + 1
    assert not first.lease.held, "somebody else may have taken over"
    assert second.lease.renew()
    assert not first.lease.renew()
    assert second.lease.held
    first.now += EXPIRY_S - 1
    second.now += EXPIRY_S - 1
    second.lease.renew()
    assert not first.lease.renew()


def test_a_holder_is_sure_for_half_the_expiry(tmp_path: Path) -> None:
    """Long before anybody takes over, a holder that cannot beat stops."""
    (host,) = hosts(tmp_path, 1)
    host.lease.renew()
    host.now += EXPIRY_S / 2 - 1
    assert host.lease.held
    host.now += 2
    assert not host.lease.held
    assert host.lease.renew()


def test_release_hands_over_at_once(tmp_path: Path) -> None:
    """After a release the next who asks gets it without waiting; releasing twice does nothing."""
    first, second, third = hosts(tmp_path, 3)
    first.lease.renew()
    assert not second.lease.renew()
    first.lease.release()
    assert not first.lease.held
    assert second.lease.renew()
    first.lease.release()
    assert not third.lease.renew()
    assert second.lease.renew()


def test_dead_process_on_this_host_is_replaced_at_once(tmp_path: Path) -> None:
    """A holder on the same host whose process has ended is not waited for; a live one is."""
    me = Owner.of_this_process("here")
    (tmp_path / "00000001").write_text(json.dumps({"holder": str(me), "beat": 1}))
    other = Lease(tmp_path, replace(me, instance="1"))
    assert not other.renew()
    dead = replace(me, started=me.started - 1)
    (tmp_path / "00000001").write_text(json.dumps({"holder": str(dead), "beat": 1}))
    assert other.renew()


@pytest.mark.parametrize("content", ["", "nonsense", "[]", '{"beat": 1}', "\udcff"])
def test_damaged_lease_expires(tmp_path: Path, content: str) -> None:
    """A file that says nothing counts as a holder that shows no sign of life."""
    (tmp_path / "00000007").write_text(content, errors="surrogateescape")
    (tmp_path / "notes").write_text("not ours")
    (host,) = hosts(tmp_path, 1)
    assert not host.lease.renew()
    host.now += EXPIRY_S + 1
    assert host.lease.renew()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000008", "notes"]


def test_lease_deleted_under_its_holder(tmp_path: Path) -> None:
    """A holder whose file is gone steps down, and somebody takes it again."""
    first, second = hosts(tmp_path, 2)
    first.lease.renew()
    for path in tmp_path.iterdir():
        path.unlink()
    assert [first.lease.renew(), second.lease.renew()].count(True) == 1


def test_race_for_a_free_lease(tmp_path: Path) -> None:
    """Many who see it free at the same instant: one gets it."""
    for number in range(20):
        directory = tmp_path / str(number)
        directory.mkdir()
        everybody = hosts(directory, 6)
        barrier = threading.Barrier(len(everybody))
        results: list[bool] = []

        def race(host: Host, barrier: threading.Barrier = barrier, results: list = results) -> None:
            barrier.wait()
            results.append(host.lease.renew())

        threads = [threading.Thread(target=race, args=(host,)) for host in everybody]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results.count(True) == 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_never_two_at_once(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Hosts that live, hang, die and return in any order: at each instant at most one is sure."""
    chooser = random.Random(seed)
    everybody = hosts(tmp_path_factory.mktemp("lease"), 3)
    for _ in range(120):
        passed = chooser.choice([0.5, 5.0, EXPIRY_S / 2, EXPIRY_S + 1])
        for host in everybody:
            host.now += passed
        host = chooser.choice(everybody)
        if chooser.random() < 0.1:
            host.lease.release()
        else:
            host.lease.renew()
        assert sum(host.lease.held for host in everybody) <= 1
    for _ in range(4):  # and when all are well again, somebody is
        for host in everybody:
            host.now += EXPIRY_S / 2 + 1
            host.lease.renew()
    assert sum(host.lease.renew() for host in everybody) == 1
