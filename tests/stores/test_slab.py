"""The slab store through and through: real files, real transfers, several stores and processes."""

import gc
import json
import logging
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_nixl.batch import Outcome, Outcomes
from hicache_nixl.errors import RegistrationError, StoreError
from hicache_nixl.stores import slab_segments
from hicache_nixl.stores.slab import SlabStore
from slabs import (
    KIB,
    MIB,
    PlainMover,
    allocated,
    chain_keys,
    check_after_crash,
    check_files,
    check_slots,
    finish,
    in_threads,
    key,
    lose_index,
    namespace,
    open_files,
    open_plain,
    open_tenant,
    query,
    start_child,
)

# -- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "segments", "aligned"),
    [
        (4 * KIB, 1, True),
        (64 * KIB, 2, True),
        (64 * KIB, 16, True),
        (256 * KIB, 8, True),
        (256 * KIB, 64, True),
        (2 * MIB, 32, True),
        (256 * KIB, 8, False),
        (3 * 1300, 3, True),
    ],
)
@pytest.mark.parametrize("direct_io", [True, False], ids=["direct", "buffered"])
def test_round_trip(
    root: Path, payload: int, segments: int, aligned: bool, direct_io: bool
) -> None:
    """Pages of any size, in place and staged, come back byte for byte, also after a reopening."""
    count = 24 if payload >= MIB else 100
    keys = chain_keys("a", count)
    how: dict[str, Any] = {
        "capacity": 128 * MIB,
        "payload": payload,
        "segments": segments,
        "aligned": aligned,
        "pages": count,
        "direct_io": direct_io,
    }
    with open_tenant(root, **how) as tenant:
        assert all(tenant.put(keys))
        assert tenant.exists(keys) == count
        assert all(tenant.get(keys))
    with open_tenant(root, **how) as tenant:
        assert tenant.exists(keys) == count
        assert all(tenant.get(keys))
    assert check_slots(root).pages == count
    check_files([root])


def test_trailer_checks_alone(root: Path) -> None:
    """Without payload checksums, pages come back as well."""
    keys = chain_keys("a", 50)
    with open_tenant(root, checks_payload=False) as tenant:
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_stored_pages_are_not_written_again(root: Path) -> None:
    """A put of stored and new pages says True for all and takes slots for the new ones only."""
    keys = chain_keys("a", 40)
    with open_plain(root) as tenant:
        assert all(tenant.put(keys[:30]))
        before = query(root, "SELECT key, segment, slot FROM pages")
        assert all(tenant.put(keys))
        assert set(before) < set(query(root, "SELECT key, segment, slot FROM pages"))
        assert all(tenant.put(keys))
        assert check_slots(root).pages == 40


def test_key_named_twice(root: Path) -> None:
    """A call that names a key twice stores it once, and reads it into both pages."""
    one, two = chain_keys("a", 2)
    with open_tenant(root) as tenant:
        assert tenant.put([one, two, one]) == [True] * 3
        assert check_slots(root).pages == 2
        assert tenant.get([one, one, two]) == [True] * 3


def test_get_reads_the_leading_run(root: Path) -> None:
    """Pages behind the first missing one are not read."""
    keys = chain_keys("a", 10)
    with open_tenant(root) as tenant:
        tenant.put(keys[:4])
        tenant.put(keys[6:])
        assert tenant.get(keys) == [True] * 4 + [False] * 6
        assert tenant.get(keys[4:]) == [False] * 6
        assert tenant.get([]) == []
        assert tenant.put([]) == []


def test_exists_stops_at_the_first_gap(root: Path) -> None:
    """Of 512 pages without page 200, 200 exist."""
    keys = chain_keys("aaaa", 512)
    with open_plain(root, pages=512) as tenant:
        tenant.put(keys[:200])
        tenant.put(keys[201:])
        assert tenant.exists(keys) == 200
        assert tenant.exists(keys[:200]) == 200
        assert tenant.exists(keys[200:]) == 0
        assert tenant.exists(keys[201:]) == 311
        assert tenant.exists([]) == 0


def test_present_tells_each_page(root: Path) -> None:
    """Every key is told by itself, also behind a gap, twice named, or of another namespace."""
    keys = chain_keys("aaaa", 300)
    with open_plain(root, pages=300) as tenant, open_plain(root, model="two") as other:
        tenant.put(keys[:150] + keys[151:])
        digest = tenant.namespace.digest
        assert tenant.store.present(digest, keys).tolist() == [i != 150 for i in range(300)]
        assert tenant.store.present(digest, [keys[150], keys[0], keys[0]]).tolist() == [
            False,
            True,
            True,
        ]
        assert tenant.store.present(digest, []).tolist() == []
        assert not other.store.present(other.namespace.digest, keys).any()


def test_namespaces_do_not_share_pages(root: Path) -> None:
    """The same key under another identity is another page, whatever the record size."""
    keys = chain_keys("a", 20)
    with (
        open_plain(root, model="one") as one,
        open_plain(root, model="two") as two,
        open_plain(root, model="three", payload=16 * KIB) as three,
    ):
        assert all(one.put(keys))
        assert two.exists(keys) == three.exists(keys) == 0
        assert all(two.put(keys[:10]))
        assert all(three.put(keys[:15]))
        assert (one.exists(keys), two.exists(keys), three.exists(keys)) == (20, 10, 15)
        assert all(one.get(keys))
        assert all(two.get(keys[:10]))
        assert all(three.get(keys[:15]))
        used = {use.namespace.manifest["model_name"]: use for use in one.store.namespaces()}
        pages = {name: use.pages for name, use in used.items()}
        assert pages == {"one": 20, "two": 10, "three": 15}
        assert used["three"].record_bytes == 15 * 20 * KIB
        assert 0 < used["one"].oldest_use_ns <= used["one"].newest_use_ns


def test_unopened_namespace(root: Path) -> None:
    """A namespace that was not opened is wrong use, and said in one line."""
    with open_plain(root) as tenant:
        other = namespace(4 * KIB, "other")
        with pytest.raises(RegistrationError, match="open_namespace first"):
            tenant.store.exists(other.digest, [key(1)])
        with pytest.raises(RegistrationError, match="raise capacity"):
            tenant.store.open_namespace(namespace(128 * MIB))


def test_more_page_sizes_than_segments_are_warned_of(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hybrid model whose pools cannot all have a segment is told that they are displaced."""
    store = SlabStore([root], capacity_bytes=32 * MIB, segment_bytes=16 * MIB)
    with closing(store):
        for pages in (1, 2):
            store.open_namespace(namespace(pages * 4 * KIB))
        store.open_namespace(namespace(4 * KIB, "another of a known size"))
        assert "displace" not in caplog.text
        store.open_namespace(namespace(3 * 4 * KIB))
    assert "pages of 3 sizes" in caplog.text
    assert "lower segment" in caplog.text


def test_small_budgets_are_refused(root: Path) -> None:
    """A budget below one segment, or segments without number, are errors that say what to set."""
    with pytest.raises(StoreError, match="raise capacity or lower segment"):
        SlabStore([root], capacity_bytes=1 * MIB, segment_bytes=2 * MIB)
    with pytest.raises(StoreError, match="raise segment"):
        SlabStore([root], capacity_bytes=1 << 40, segment_bytes=1 * MIB)
    assert not root.exists()


# -- damage -----------------------------------------------------------------------------------


def damage(directory: Path, page_key: bytes, how: str) -> None:
    """Change the record of one page on the medium."""
    ((segment, slot, size),) = query(
        directory, "SELECT segment, slot, record_bytes FROM pages WHERE key=?", (page_key,)
    )
    (path,) = directory.glob(f"segment-{segment:08d}-*")
    with path.open("r+b") as file:
        file.seek(slot * size)
        block = bytearray(file.read(size))
        if how == "payload bit":
            block[5] ^= 1
        elif how == "trailer bit":
            block[-4096 + 70] ^= 1
        elif how == "empty":
            block[:] = bytes(size)
        elif how == "half":
            block[size // 2 :] = bytes(size - size // 2)
        file.seek(slot * size)
        file.write(block)


@pytest.mark.parametrize("how", ["payload bit", "trailer bit", "empty", "half"])
def test_damaged_page_is_a_miss(root: Path, how: str) -> None:
    """A page that is not what was written is not read and forgotten; all others are right."""
    keys = chain_keys("a", 128)
    with open_tenant(root, payload=8 * KIB) as tenant:
        tenant.put(keys)
        damage(root, keys[3], how)
        assert tenant.get(keys) == [True] * 3 + [False] + [True] * 124
        assert tenant.exists(keys) == 3
        assert check_slots(root).pages == 127
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_missing_segment_file(root: Path) -> None:
    """A segment that was deleted behind the store's back costs its pages and nothing else."""
    keys = chain_keys("a", 60)
    how: dict[str, Any] = {"segment": 20 * 8 * KIB, "capacity": 60 * 8 * KIB}
    with open_plain(root, **how) as tenant:
        tenant.put(keys)
    sorted(root.glob("segment-*"))[1].unlink()
    with open_plain(root, **how) as tenant:
        assert tenant.exists(keys) == 20
        assert tenant.get(keys).count(True) == 20
        assert tenant.readable(keys) == 40
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))
        check_files([root])


def test_segment_file_deleted_while_running(root: Path) -> None:
    """A process that finds a segment gone forgets it: space comes back without a restart."""
    keys = chain_keys("a", 60)
    how: dict[str, Any] = {"segment": 20 * 8 * KIB, "capacity": 60 * 8 * KIB}
    with open_plain(root, **how) as writer:
        writer.put(keys)
    with open_plain(root, **how) as tenant:
        sorted(root.glob("segment-*"))[0].unlink()
        assert not any(tenant.get(keys))
        assert tenant.exists(keys) == 0
        assert tenant.readable(keys) == 40
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))
        check_slots(root)
        check_files([root])


@pytest.mark.parametrize("keep", [0, 4096, 5 * 8 * KIB, 5 * 8 * KIB + 100])
def test_segment_file_cut_short(root: Path, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    """What was cut off is forgotten at the next opening, and the length is restored."""
    keys = chain_keys("a", 20)
    with open_plain(root, segment=20 * 8 * KIB, capacity=20 * 8 * KIB) as tenant:
        tenant.put(keys)
    (path,) = root.glob("segment-*")
    with path.open("r+b") as file:
        file.truncate(keep)
    with open_plain(root, segment=20 * 8 * KIB, capacity=20 * 8 * KIB) as tenant:
        assert "short" in caplog.text
        check_files([root])
        whole = keep // (8 * KIB)
        assert tenant.exists(keys) == whole
        assert tenant.readable(keys) == whole
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_segment_full_of_garbage(root: Path) -> None:
    """Garbage in place of records is a miss, with and without the index."""
    keys = chain_keys("a", 20)
    with open_plain(root) as tenant:
        tenant.put(keys)
    (path,) = root.glob("segment-*")
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
    with open_plain(root) as tenant:
        assert tenant.readable(keys) == 0
    lose_index(root)
    with open_plain(root) as tenant:
        assert tenant.exists(keys) == 0
        check_slots(root)


# -- transfers that fail or are late ----------------------------------------------------------


class TroubledMover(PlainMover):
    """Fails, or leaves late, the rows that a test names."""

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.late: set[int] = set()
        self.raises: Exception | None = None
        self.delay_s = 0.0
        self.ended: list[Callable[[], None]] = []

    def _trouble(self, outcomes: Outcomes, on_late: Any, late: Outcome) -> Outcomes:
        time.sleep(self.delay_s)
        for row in self.failing:
            outcomes[row] = Outcome.FAILED
        if self.late:
            self.ended.append(on_late(np.array(sorted(self.late))))
            outcomes[sorted(self.late)] = late
        if self.raises:
            raise self.raises
        return outcomes

    def write(self, *arguments: Any, **named: Any) -> Outcomes:
        return self._trouble(super().write(*arguments, **named), named["on_late"], Outcome.LATE)

    def read(self, *arguments: Any, **named: Any) -> Outcomes:
        return self._trouble(super().read(*arguments, **named), named["on_late"], Outcome.FAILED)


def test_late_writes_keep_their_slots(root: Path) -> None:
    """A slot whose write is late is nobody's until it has ended, also after closing."""
    keys = chain_keys("a", 10)
    how: dict[str, Any] = {"segment": 10 * 8 * KIB, "capacity": 10 * 8 * KIB}
    with open_plain(root, **how) as tenant:
        mover = tenant.mover = TroubledMover()
        mover.late = {2, 5}
        assert tenant.put(keys) == [i not in (2, 5) for i in range(10)]
        assert check_slots(root).claimed == 2
        mover.late = set()
        # Nothing but the two late slots could hold them.
        assert tenant.put([keys[2], keys[5]], prefix=keys) == [False, False]
        mover.ended.pop()()
        assert check_slots(root).claimed == 0
        assert tenant.put([keys[2], keys[5]], prefix=keys) == [True, True]
        assert all(tenant.get(keys))
        mover.late = {0}
        assert tenant.put(chain_keys("b", 1)) == [False]
    with open_plain(root, **how) as tenant:
        assert check_slots(root).claimed == 1, "the write may still be under way"
        tenant.put(chain_keys("c", 20))
        assert check_slots(root).claimed == 1
    mover.ended.pop()()


def test_late_reads_keep_their_files_open(root: Path) -> None:
    """A segment that is dropped under a late read is closed when the read has ended."""
    keys = chain_keys("a", 10)
    with open_plain(root, capacity=16 * MIB) as tenant:
        mover = tenant.mover = TroubledMover()
        tenant.put(keys)
        before = open_files("segment-")
        mover.late = {1}
        assert tenant.get(keys).count(True) == 9
        mover.late = set()
        with open_plain(root, capacity=1 * MIB):
            pass
        tenant.store._next_housekeeping = 0
        tenant.put(keys)
        assert open_files("segment-") == before + 1
        mover.ended.pop()()
        assert open_files("segment-") == before


def test_failed_writes(root: Path) -> None:
    """Each page has its own result, and a slot that cannot be written is not tried again and again.

    When nothing can be written, or time is up, it is not the slots; the one is raised.
    """
    keys = chain_keys("a", 10)
    with open_plain(root) as tenant:
        mover = tenant.mover = TroubledMover()
        mover.failing = set(range(10))
        with pytest.raises(StoreError, match=r"10 pages in .* cannot be written"):
            tenant.put(keys)
        assert check_slots(root).claimed == 0
        mover.failing = {0, 9}
        tenant.deadline_s = 0.01
        mover.delay_s = 0.02
        assert tenant.put(keys) == [False] + [True] * 8 + [False]
        slots = check_slots(root)
        assert (slots.pages, slots.claimed) == (8, 0)
        tenant.deadline_s = 10
        assert tenant.put(chain_keys("b", 10)) == [False] + [True] * 8 + [False]
        assert check_slots(root).claimed == 2
        mover.failing = set()
        assert all(tenant.put([*keys, *chain_keys("b", 10)]))
        slots = check_slots(root)
        assert (slots.pages, slots.claimed) == (20, 2)
    with open_plain(root) as tenant:
        assert check_slots(root).claimed == 0
        assert all(tenant.get([*keys, *chain_keys("b", 10)]))


def test_mover_that_raises(root: Path) -> None:
    """An exception in the middle loses no slot, and keeps those that are still being written."""
    with open_plain(root) as tenant:
        mover = tenant.mover = TroubledMover()
        mover.raises, mover.late = RuntimeError("broken"), {1}
        with pytest.raises(RuntimeError, match="broken"):
            tenant.put(chain_keys("b", 5))
        slots = check_slots(root)
        assert (slots.pages, slots.vacant, slots.claimed) == (0, 4, 1)
        mover.ended.pop()()
        assert check_slots(root).claimed == 0


def test_failed_reads_are_forgotten_only_beside_good_ones(root: Path) -> None:
    """Pages are forgotten for what is wrong with them, not because storage fails as a whole."""
    keys = chain_keys("a", 10)
    with open_plain(root) as tenant:
        mover = tenant.mover = TroubledMover()
        tenant.put(keys)
        mover.failing = set(range(10))
        with pytest.raises(StoreError, match=r"10 pages in .* cannot be read"):
            tenant.get(keys)
        assert tenant.exists(keys) == 10
        mover.failing = {4}
        assert tenant.get(keys) == [i != 4 for i in range(10)]
        assert tenant.exists(keys) == 4


@pytest.mark.parametrize("is_open", [False, True])
def test_segment_dropped_under_a_reader(
    root: Path, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that another process evicts after they were located are misses, not trouble."""
    keys = chain_keys("a", 8)
    with open_plain(root) as tenant:
        assert all(tenant.put(keys))
        opening = tenant.store._opening
        if not is_open:
            opening.segments.drop(opening.segments.known())
        locate = opening.index.locate

        def then_drop(*arguments: Any) -> Any:
            found = locate(*arguments)
            for segment in opening.index.segments():
                opening.index.drop_segment(segment)
                slab_segments.remove([root], segment)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(opening.index, "locate", then_drop)
            assert not any(tenant.get(keys))
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_missing_segment_that_another_thread_takes_note_of(root: Path) -> None:
    """Whoever else found it missing is a miss too, before its pages are forgotten."""
    keys = chain_keys("a", 8)
    with open_plain(root) as tenant:
        tenant.put(keys)
        segments = tenant.store._opening.segments
        segments.drop(segments.known())
        next(root.glob("segment-*")).unlink()
        taken = []

        class Beside(PlainMover):
            def read(self, *arguments: Any, **named: Any) -> Outcomes:
                taken.extend(segments.take_missing())
                return super().read(*arguments, **named)

        tenant.mover = Beside()
        assert not any(tenant.get(keys))
        assert len(taken) == 1


def test_segment_that_cannot_be_opened(root: Path) -> None:
    """That is trouble: its pages are still in the index."""
    keys = chain_keys("a", 8)
    with open_plain(root) as tenant:
        tenant.put(keys)
        segments = tenant.store._opening.segments
        segments.drop(segments.known())
        (path,) = root.glob("segment-*")
        path.rename(root / "aside")
        path.mkdir()
        with pytest.raises(StoreError, match=r"8 pages in .* cannot be read"):
            tenant.get(keys)
        path.rmdir()
        (root / "aside").rename(path)
        assert all(tenant.get(keys))


def test_slot_reused_under_a_reader(root: Path) -> None:
    """Without payload checksums, a page whose slot was taken during the read is no hit."""
    keys = chain_keys("a", 10)
    with open_plain(root, segment=10 * 8 * KIB, capacity=10 * 8 * KIB) as tenant:

        class Raced(PlainMover):
            checks_payload = False

            def read(self, *arguments: Any, **named: Any) -> Outcomes:
                outcomes = super().read(*arguments, **named)
                tenant.mover = PlainMover()
                tenant.put(chain_keys("b", 3), at=20)
                return outcomes

        tenant.put(keys)
        tenant.mover = Raced()
        assert tenant.get(keys) == [True] * 7 + [False] * 3


def test_index_in_trouble_leaves_no_claims(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of a put whose publication failed are given back by a later call."""
    keys = chain_keys("a", 10)
    with open_plain(root) as tenant:
        index = tenant.store._opening.index

        def fail(*arguments: Any, **named: Any) -> None:
            raise StoreError("the index failed: disk I/O error")

        with monkeypatch.context() as patch:
            patch.setattr(index, "publish", fail)
            patch.setattr(index, "release", fail)
            with pytest.raises(StoreError, match="disk I/O error"):
                tenant.put(keys)
        assert check_slots(root).claimed == 10
        assert all(tenant.put(chain_keys("b", 1)))
        assert check_slots(root).claimed == 0
        with monkeypatch.context() as patch:
            patch.setattr(index, "touch", fail)
            tenant.store._next_housekeeping = 0
            assert all(tenant.get(chain_keys("b", 1))), "a use that is not noted is no failure"


# -- use --------------------------------------------------------------------------------------


def test_clear_is_scoped(root: Path) -> None:
    """Clearing one model's pages leaves the other's."""
    keys = chain_keys("a", 30)
    with open_plain(root, model="one") as one, open_plain(root, model="two") as two:
        one.put(keys)
        two.put(keys)
        assert one.store.clear(one.namespace.digest) == 30
        assert one.exists(keys) == 0
        assert all(two.get(keys))
        assert one.store.clear(one.namespace.digest) == 0
        assert one.store.clear(bytes(32)) == 0
        assert check_slots(root).vacant == 30
        assert all(one.put(keys))
        assert all(one.get(keys))


def test_clear_of_many_pages(root: Path) -> None:
    """Clearing goes in several transactions and ends."""
    with open_plain(root, pages=512) as tenant:
        for number in range(5):
            assert all(tenant.put(chain_keys(number, 512)))
        assert tenant.store.clear(tenant.namespace.digest) == 2560
        assert check_slots(root).pages == 0


def test_uses_are_written_behind(root: Path) -> None:
    """A get counts as a use for other processes, at the latest when the store is closed."""
    keys = chain_keys("a", 10)
    with open_plain(root) as tenant:
        tenant.put(keys)
        (first,) = query(root, "SELECT DISTINCT used FROM pages")
        tenant.get(keys[5:], prefix=keys[:5])
    (second,) = query(root, "SELECT DISTINCT used FROM pages")
    assert second > first


def test_buffered_uses_are_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses that cannot be written down do not fill memory."""
    with open_plain(root) as tenant:
        tenant.put(chain_keys("a", 2))

        def fail(*arguments: Any, **named: Any) -> None:
            raise StoreError("locked")

        monkeypatch.setattr(tenant.store._opening.index, "touch", fail)
        for number in range(40):
            tenant.put(chain_keys("a", 2), prefix=chain_keys(number, 4000))
        assert len(tenant.store._opening.uses) < 80_000
        monkeypatch.undo()


def test_clock_set_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations and uses go on growing, so that neither order nor checks suffer."""
    how: dict[str, Any] = {"segment": 20 * 8 * KIB, "capacity": 20 * 8 * KIB}
    with open_plain(root, **how) as tenant:
        tenant.put(chain_keys("a", 10))
        tenant.put(chain_keys("b", 10))
        monkeypatch.setattr("time.time_ns", lambda: 1000)
        tenant.get(chain_keys("a", 10))
        assert all(tenant.put(chain_keys("c", 10)))
        assert tenant.exists(chain_keys("a", 10)) == 10
        assert tenant.exists(chain_keys("b", 10)) == 0
        assert tenant.store.clear(tenant.namespace.digest) == 20
    lose_index(root)
    with open_plain(root, **how) as tenant:
        assert tenant.exists(chain_keys("c", 1)) == tenant.exists(chain_keys("a", 1)) == 0


def test_clock_set_back_between_openings(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages used before the clock was set back can be evicted after it."""
    how: dict[str, Any] = {"segment": 20 * 8 * KIB, "capacity": 20 * 8 * KIB}
    with open_plain(root, **how) as tenant:
        tenant.put(chain_keys("a", 20))
        tenant.get(chain_keys("a", 20))
    monkeypatch.setattr("time.time_ns", lambda: 1000)
    with open_plain(root, **how) as tenant:
        assert all(tenant.put(chain_keys("b", 20)))
        assert all(tenant.get(chain_keys("b", 20)))


def test_index_held_by_another_process(root: Path) -> None:
    """Puts give up at their deadline; gets and exists do not care."""
    keys = chain_keys("a", 10)
    with open_plain(root) as tenant:
        tenant.put(keys)
        with closing(sqlite3.connect(root / "index.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            tenant.deadline_s = 0.3
            start = time.monotonic()
            with pytest.raises(StoreError, match="locked"):
                tenant.put(chain_keys("b", 10))
            assert 0.25 < time.monotonic() - start < 8
            tenant.store._next_housekeeping = 0
            start = time.monotonic()
            assert all(tenant.get(keys))
            assert tenant.exists(keys) == 10
            assert time.monotonic() - start < 8
        assert all(tenant.put(chain_keys("b", 10)))


def test_closed_in_the_middle_of_a_put(root: Path) -> None:
    """Slots of a put that is still going on are not given to others when the store is closed."""
    with open_plain(root) as tenant:

        class Slow(PlainMover):
            def write(self, *arguments: Any, **named: Any) -> Outcomes:
                tenant.store.close()
                with open_plain(root):
                    assert check_slots(root).claimed == 5
                return super().write(*arguments, **named)

        tenant.mover = Slow()
        with pytest.raises(StoreError, match="closed"):
            tenant.put(chain_keys("a", 5))


def test_index_cut_under_a_running_store(root: Path) -> None:
    """An index that somebody truncates is an error or goes unnoticed; the process lives on."""
    with open_plain(root) as tenant, open_plain(root) as other:
        for number in range(20):
            tenant.put(chain_keys(number, 128))
        other.store._opening.index._database._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        path = root / "index.sqlite"
        os.truncate(path, path.stat().st_size // 2 // 1024 * 1024)
        for user in (tenant, other):
            for number in range(20):
                with suppress(StoreError):
                    user.get(chain_keys(number, 128))
                with suppress(StoreError):
                    user.put(chain_keys(("new", number), 20))
    with open_plain(root) as tenant:
        for number in range(20):
            assert all(tenant.put(chain_keys(number, 128)))
            assert all(tenant.get(chain_keys(number, 128)))
        check_slots(root)


def test_a_call_that_goes_on_while_the_store_is_closed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens no segment again: nothing of the store is open afterwards."""
    keys, before = chain_keys("a", 5), open_files(str(root))
    with open_plain(root) as tenant:
        tenant.put(keys)
        close = tenant.store._opening.index.close

        def close_later() -> None:  # as where it waits for a transaction
            with pytest.raises(StoreError, match="cannot be read"):
                tenant.get(keys)
            close()

        monkeypatch.setattr(tenant.store._opening.index, "close", close_later)
        tenant.store.close()
        assert open_files(str(root)) == before


def test_closed_store(root: Path) -> None:
    """Closing is idempotent; calls after it are a StoreError and change nothing."""
    keys = chain_keys("a", 3)
    with open_plain(root) as tenant:
        tenant.put(keys)
        before = open_files()
        tenant.store.close()
        tenant.store.close()
        assert open_files() < before
        with pytest.raises(StoreError, match="closed"):
            tenant.get(keys)
        with pytest.raises(StoreError, match="closed"):
            tenant.put(keys)
    assert not list((root / "writers").iterdir())


def test_descriptors_do_not_leak(root: Path) -> None:
    """Opening, using and closing a store again and again leaves nothing open."""
    with open_plain(root):
        pass
    gc.collect()
    before = open_files()
    for number in range(5):
        with open_plain(root, segment=1 * MIB, capacity=4 * MIB) as tenant:
            tenant.put(chain_keys(number, 128))
            tenant.get(chain_keys(number, 128))
        assert open_files() <= before


def test_striping(tmp_path: Path) -> None:
    """Two directories share the pages of one call, and the order they are named in matters."""
    directories = [tmp_path / "one", tmp_path / "two"]
    keys = chain_keys("a", 100)
    with open_tenant(directories, capacity=32 * MIB, segment=4 * MIB) as tenant:
        assert all(tenant.put(keys))
        counts = query(
            directories[0],
            "SELECT directory, count(*) FROM pages JOIN segments s ON s.id=segment"
            " GROUP BY directory",
        )
        assert counts == [(0, 50), (1, 50)]
        for number in range(60):
            assert all(tenant.put(chain_keys(number, 128)))
        assert all(tenant.get(chain_keys(59, 128)))
        assert allocated(directories) <= 32 * MIB
        assert allocated(directories[:1]) == allocated(directories[1:])
        check_files(directories)
    with pytest.raises(StoreError, match="same order"):
        SlabStore(directories[::-1], capacity_bytes=32 * MIB)
    with pytest.raises(StoreError, match="same directories"):
        SlabStore(directories[:1], capacity_bytes=32 * MIB)
    lose_index(directories[0])
    with open_tenant(directories, capacity=32 * MIB, segment=4 * MIB) as tenant:
        assert all(tenant.get(chain_keys(59, 128)))


# -- crashes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_while_putting(root: Path, seed: int) -> None:
    """SIGKILL at any instant: every page that is reported is right, unfinished slots come back."""
    chooser = random.Random(seed)
    how: dict[str, Any] = {"segment": 4 * 68 * KIB * 16, "payload": 64 * KIB, "segments": 2}
    capacity = 4 * how["segment"]
    told: list[tuple[Any, int]] = []
    for _ in range(2):
        child = start_child("put_for_ever", root, chooser.randrange(1 << 30), capacity, how)
        assert child.stdout is not None
        calls = chooser.randrange(1, 25)
        for _ in range(calls):
            name, count = json.loads(child.stdout.readline())
            told.append((tuple(name), count))
        time.sleep(chooser.random() * 0.02)
        child.send_signal(signal.SIGKILL)
        for line in child.stdout:  # what it had said until then
            name, count = json.loads(line)
            told.append((tuple(name), count))
        child.wait()
    check_after_crash(root, told, capacity, **how)


SPACE = "hicache_nixl.stores.slab_space"
INDEX = "hicache_nixl.stores.slab_index:SlabIndex"
ROOT = "hicache_nixl.stores.slab_root"


@pytest.mark.parametrize(
    ("point", "when", "action"),
    [
        (f"{SPACE}:preallocate", "after", "put"),
        (f"{INDEX}.reserve_segment_id", "after", "put"),
        (f"{INDEX}.add_segment", "after", "put"),
        (f"{INDEX}.drop_segment", "after", "open smaller"),
        (f"{SPACE}:remove", "before", "open smaller"),
        ("os:truncate", "after", "open smaller"),
        (f"{INDEX}.claim", "after", "put"),
        ("slabs:PlainMover.write", "before", "put"),
        ("slabs:PlainMover.write", "after", "put"),
        (f"{INDEX}.publish", "after", "put"),
        (f"{INDEX}.clear", "before", "clear"),
        (f"{ROOT}:rebuild", "before", "rebuild"),
        (f"{INDEX}.restore", "before", "rebuild"),
        (f"{INDEX}.restore", "after", "rebuild"),
        ("pathlib:Path.rename", "after", "rebuild"),
    ],
)
def test_death_at_a_point(root: Path, point: str, when: str, action: str) -> None:
    """A process that dies at the worst of moments leaves a store that opens and is right."""
    how: dict[str, Any] = {"segment": 32 * 8 * KIB, "capacity": 96 * 8 * KIB}
    with open_plain(root, **how) as tenant:
        tenant.put(chain_keys("a", 32))
        tenant.put(chain_keys("b", 32))
    if action == "rebuild":
        lose_index(root)
    smaller = how | {"capacity": 32 * 8 * KIB} if action == "open smaller" else how
    finish(start_child("die", point, when, action, [root], smaller))
    with open_plain(root, **how) as tenant:
        assert check_slots(root).claimed == 0
        check_files([root])
        whole = [tenant.exists(chain_keys(name, 32)) for name in "ab"]
        assert all(whole[i] == sum(tenant.get(chain_keys(name, 32))) for i, name in enumerate("ab"))
        if action == "rebuild":
            assert whole == [32, 32]
        elif action == "put":
            assert whole[1] == 32, "what was used last is evicted last"
        elif action == "open smaller":
            assert whole in ([0, 32], [32, 32])
        for number in range(4):
            assert all(tenant.put(chain_keys(("after", number), 32)))
        assert check_slots(root).pages == 96
        check_files([root])


def test_clear_is_remembered_by_a_rebuild(root: Path) -> None:
    """Neither cleared pages nor pages that were overwritten come back when the index is lost."""
    how: dict[str, Any] = {"segment": 40 * 8 * KIB, "capacity": 40 * 8 * KIB}
    with open_plain(root, model="one", **how) as one, open_plain(root, model="two", **how) as two:
        one.put(chain_keys("cleared", 10))
        two.put(chain_keys("cleared", 10))
        one.store.clear(one.namespace.digest)
        one.put(chain_keys("later", 5))
        two.put(chain_keys("later", 5))
        for number in range(3):
            two.put(chain_keys(number, 10))
    lose_index(root)
    with open_plain(root, model="one", **how) as one, open_plain(root, model="two", **how) as two:
        assert one.exists(chain_keys("cleared", 10)) == 0
        assert sum(one.get(chain_keys("later", 5))) == 5
        assert two.exists(chain_keys("later", 5)) == 5
        assert all(two.get(chain_keys(1, 10)))
        assert two.exists(chain_keys("cleared", 10)) == 0
        check_slots(root)


# -- several processes ------------------------------------------------------------------------


def test_processes_share_one_root(root: Path) -> None:
    """Three processes on one small store: no wrong byte, no lost slot, budget kept."""
    capacity = 300 * 20 * KIB
    how = {"payload": 16 * KIB, "segment": 50 * 20 * KIB}
    children = [start_child("use", root, seed, 60, capacity, how) for seed in range(3)]
    reports = [json.loads(finish(child)) for child in children]
    assert all(report["stored"] > 0 for report in reports)
    assert sum(report["right"] for report in reports) > 0
    assert allocated([root]) <= capacity
    with open_tenant(root, capacity=capacity, **how) as tenant:
        assert check_slots(root).claimed == 0
        assert all(page.good for page in tenant.store.verify())
        check_files([root])


def test_segments_dropped_while_others_read(root: Path) -> None:
    """A process that shrinks the store under a reader turns hits into misses, frees the disk."""
    keys = chain_keys("a", 128)
    before = open_files("segment-")
    with open_tenant(root, capacity=8 * MIB, segment=256 * KIB) as reader:
        reader.put(keys)
        assert all(reader.get(keys))
        assert open_files("segment-") == before + 4
        with open_tenant(root, capacity=512 * KIB, segment=256 * KIB) as other:
            assert allocated([root]) <= 512 * KIB
            assert reader.get(keys).count(True) <= 64
            assert other.exists(keys) == reader.exists(keys)
        reader.store._next_housekeeping = 0
        reader.get(keys)
        assert open_files("segment-") == before + 2
        assert all(reader.put(keys))
        assert all(reader.get(keys))


def test_threads_put_and_get_the_same_keys(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Concurrent puts and gets of one set of keys: no error, no wrong byte, one slot a page."""
    keys = chain_keys("same", 64)
    caplog.set_level(logging.WARNING)
    with open_tenant(root, pages=4 * 64, payload=16 * KIB) as tenant:

        def work(number: int) -> None:
            for _ in range(15):
                if number % 2:
                    tenant.get(keys, at=64 * number)
                else:
                    assert all(tenant.put(keys, at=64 * number))

        in_threads(work, range(4))
        assert all(tenant.get(keys))
        slots = check_slots(root)
        assert (slots.pages, slots.claimed) == (64, 0)
    assert not [record for record in caplog.records if record.name.startswith("hicache_nixl")]
