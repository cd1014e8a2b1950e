"""What writers tell the sweeper, and what it tells them."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hicache_nixl.errors import StoreError
from hicache_nixl.stores.files_layout import FilesRoot, Owner
from hicache_nixl.stores.files_ledger import (
    Ledger,
    Said,
    Usage,
    WriterFiles,
    read_usage,
    write_usage,
)

CAPACITY = 64_000


@pytest.fixture
def files(root: Path) -> FilesRoot:
    made = FilesRoot(root)
    made.prepare()
    return made


def owner(host: str = "host") -> Owner:
    return Owner.of_this_process(host)


def watching(files: FilesRoot, me: Owner | None = None) -> WriterFiles:
    """What a sweeper looks at."""
    me = me or owner("me")
    return WriterFiles(files, me, Ledger(files, me, CAPACITY), CAPACITY)


def usage(used: int, included: dict[str, int] | None = None) -> Usage:
    return Usage(used, 1, 2, 3, included or {})


@pytest.mark.parametrize(
    "damage",
    [
        {"used_bytes": -1},
        {"pages": -1},
        {"grain_ns": 0},
        {"used_bytes": float("inf")},
        {"pages": "x"},
    ],
)
def test_usage_that_cannot_be(files: FilesRoot, damage: dict[str, object]) -> None:
    """Counts below zero, without end or of no number are as good as no usage."""
    write_usage(files.usage, usage(1))
    assert read_usage(files.usage) == usage(1)
    files.usage.write_text(json.dumps(json.loads(files.usage.read_text()) | damage))
    assert read_usage(files.usage) is None


def add(ledger: Ledger, nbytes: int) -> None:
    """Pages of `nbytes` are stored."""
    if ledger.usage is None:
        ledger.adopt(usage(0))
    assert ledger.take(nbytes, 1, "adding") == nbytes
    ledger.settle("adding", nbytes)


def test_room_is_what_nobody_uses(files: FilesRoot) -> None:
    """A writer may add up to the capacity, its own additions and reservations counted once."""
    me = owner()
    ledger = Ledger(files, me, CAPACITY)
    assert ledger.take(10_000, 1000, "a") == 0, "nobody knows yet"
    ledger.adopt(usage(0))
    assert ledger.take(10_000, 1000, "a") == 10_000
    ledger.adopt(usage(40_000, {str(me): 0}))
    assert ledger.take(20_000, 3000, "b") == 12_000
    assert ledger.take(3000, 3000, "c") == 0
    ledger.settle("a", 10_000)
    ledger.adopt(usage(50_000, {str(me): 10_000}))
    assert ledger.take(3000, 1000, "c") == 2000
    ledger.adopt(usage(99_000))
    assert ledger.take(1000, 1000, "d") == 0


def test_each_writer_has_its_share(files: FilesRoot) -> None:
    """Writers that know the same of the store stay within the capacity together, whatever each of
    them takes; the same when one of them is new."""
    owners = [owner(f"host-{n}") for n in range(4)]
    told = usage(40_000, {str(each): 0 for each in owners[:3]})
    taken = []
    for each in owners:
        ledger = Ledger(files, each, CAPACITY)
        ledger.adopt(told)
        taken.append(ledger.take(CAPACITY, 1, "a"))
        assert ledger.take(CAPACITY, 1, "b") == 0
    assert taken == [8000, 8000, 8000, 6000]


def test_what_was_not_used_is_given_back(files: FilesRoot) -> None:
    """Room that was reserved and not used can be had again; what was wanted is wanted no more."""
    ledger = Ledger(files, owner(), CAPACITY)
    ledger.adopt(usage(0))
    assert ledger.take(100_000, 1000, "a") == CAPACITY
    assert ledger.take(5000, 1000, "b") == 0
    assert ledger.state() == Said(wanted=CAPACITY + 41_000)
    ledger.want_no_more("b")
    assert ledger.state() == Said(wanted=CAPACITY + 36_000)
    ledger.want_no_more("a")
    assert ledger.state() == Said()
    ledger.settle("a", 10_000)
    assert ledger.state() == Said(added=10_000)
    assert ledger.take(100_000, 1000, "b") == CAPACITY - 10_000


def test_growth_is_what_all_writers_added(files: FilesRoot) -> None:
    """Each byte is counted once, and each clear, of writers that come, go on and end."""
    one, two = (Ledger(files, owner(host), CAPACITY) for host in ("one", "two"))
    writers = watching(files)
    assert writers.growth(time.time_ns()) == 0
    add(one, 5000)
    one.publish()
    assert writers.growth(time.time_ns()) == 5000
    add(two, 1000)
    add(one, 500)
    two.publish()
    one.publish()
    assert writers.growth(time.time_ns()) == 1500
    assert writers.growth(time.time_ns()) == 0
    one.cleared()
    one.publish()
    assert (writers.growth(time.time_ns()), writers.clears) == (0, 1)
    add(two, 7)
    two.cleared()
    two.publish(closed=True)
    assert writers.growth(time.time_ns()) == 7
    assert [path.name for path in files.writers.iterdir()] == [one._owner]
    assert writers.growth(time.time_ns()) == 0
    assert (writers.included, writers.clears) == ({one._owner: 5500}, 2)


def test_files_of_the_dead_are_removed(files: FilesRoot) -> None:
    """Those of a dead process on this host at once, of other hosts after an hour of silence by the
    file system's time; what is not ours stays."""
    me = owner("here")
    Ledger(files, me, CAPACITY).publish()
    dead = replace(me, started=me.started - 1, instance="dead")
    silent, alive = owner("far"), owner("away")
    for each in (dead, silent, alive):
        Ledger(files, each, CAPACITY).publish()
    path = files.writers / str(silent)
    now = path.stat().st_mtime_ns
    os.utime(path, ns=(now - 3700 * 10**9,) * 2)
    (files.writers / "notes").write_text("not ours")
    watching(files, me).growth(now)
    names = {path.name for path in files.writers.iterdir()}
    assert names == {str(me), str(alive), "notes"}


def test_wishes_of_the_dead_are_forgotten(
    files: FilesRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a writer found no room for counts for a moment only, unless it asks again."""
    ledger = Ledger(files, owner(), CAPACITY)
    writers = watching(files)
    add(ledger, CAPACITY - 3000)
    ledger.take(8000, 1000, "a")
    ledger.publish()
    writers.growth(time.time_ns())
    assert writers.wanted == 8000
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6)
    writers.growth(time.time_ns())
    assert writers.wanted == 0
    ledger.take(7000, 1000, "b")
    ledger.publish()
    writers.growth(time.time_ns())
    assert writers.wanted == 15_000
    Ledger(files, owner("two"), CAPACITY).publish()
    writers.growth(time.time_ns())
    assert writers.wanted == 30_000
    Ledger(files, owner("three"), CAPACITY).publish()
    writers.growth(time.time_ns())
    assert writers.wanted == CAPACITY // 2


def test_files_are_written_for_news_only(files: FilesRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without news there is a sign of life once in a while; much news is due at once."""
    ledger = Ledger(files, owner(), CAPACITY)
    assert ledger.publish() is not None
    assert ledger.publish() is None
    add(ledger, 999)
    assert not ledger.is_due()
    add(ledger, 2)
    assert ledger.is_due()
    mtime_ns = ledger.publish()
    assert mtime_ns == (files.writers / ledger._owner).stat().st_mtime_ns
    assert not ledger.is_due()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert ledger.publish() is not None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"used_bytes": 1}', '{"added": "x"}', "\udcff"]
)
def test_damaged_files_are_no_news(files: FilesRoot, content: str) -> None:
    """Files that are just being written, or damaged, say nothing."""
    files.usage.write_text(content, errors="surrogateescape")
    assert read_usage(files.usage) is None
    (files.writers / str(owner())).write_text(content, errors="surrogateescape")
    assert watching(files).growth(time.time_ns()) == 0


def test_usage_round_trip(files: FilesRoot) -> None:
    """What the sweeper writes is what writers read; nothing before it wrote."""
    assert read_usage(files.usage) is None
    write_usage(files.usage, usage(5, {"a": 1}))
    assert read_usage(files.usage) == usage(5, {"a": 1})
    assert json.loads(files.usage.read_text())["used_bytes"] == 5


def test_ledger_without_its_directory(files: FilesRoot) -> None:
    """A ledger that cannot be written is a StoreError that names it."""
    files.writers.rmdir()
    with pytest.raises(StoreError, match="writers"):
        Ledger(files, owner(), CAPACITY).publish()
