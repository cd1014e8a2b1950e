"""Records between host pages and files: exact bytes, one result a page, nothing left behind."""

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_nixl import FakeAgent, Fate, fake_engine
from hicache_nixl import record
from hicache_nixl.batch import Batch, Extents, Outcome, WriteStamp
from hicache_nixl.errors import RegistrationError
from hicache_nixl.loan import Loan
from hicache_nixl.memory import allocate
from hicache_nixl.mover import MoverCounters, RecordMover
from hicache_nixl.record import ALIGNMENT, TRAILER_BYTES
from hicache_nixl.staging import StagingArena
from support import Bytes, HostPool, Rig, host_pool, make_mover, page_keys

Numbers = npt.NDArray[np.int64]

NAMESPACE = b"n" * 32
BIG = 128 * 1024
"""Segments of this length move in place."""
GOOD, FAILED, FOREIGN, LATE = Outcome.GOOD, Outcome.FAILED, Outcome.FOREIGN, Outcome.LATE


@dataclass
class Holding:
    """What a store does for late transfers: keeps their rows until they have ended."""

    held: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    def __call__(self, rows: Numbers) -> Callable[[], None]:
        self.held.extend(rows.tolist())
        return lambda: self.freed.extend(rows.tolist())


@dataclass
class Records:
    """`count` records of one pool, back to back in one file."""

    mover: RecordMover
    pool: HostPool
    descriptor: int
    count: int
    generation: int = 5

    @property
    def size(self) -> int:
        return record.record_bytes(self.pool.geometry.payload_bytes)

    def _extents(self, count: int) -> Extents:
        return Extents(
            np.full(count, self.descriptor, np.int64), np.arange(count, dtype=np.int64) * self.size
        )

    def _batch(self, numbers: Numbers, keys: list[bytes] | None, loan: Loan | None) -> Batch:
        keys = keys or page_keys(len(numbers))
        return Batch(self.pool.geometry, numbers, keys, NAMESPACE, loan or Loan())

    def write(
        self,
        numbers: Numbers,
        *,
        seconds: float = 30.0,
        holding: Holding | None = None,
        keys: list[bytes] | None = None,
        loan: Loan | None = None,
    ) -> list[int]:
        outcomes: list[int] = self.mover.write(
            self._batch(numbers, keys, loan),
            self._extents(len(numbers)),
            WriteStamp(self.generation, b"w" * 16, np.arange(len(numbers))),
            deadline=time.monotonic() + seconds,
            on_late=holding or Holding(),
        ).tolist()
        return outcomes

    def read(
        self,
        numbers: Numbers,
        *,
        seconds: float = 30.0,
        holding: Holding | None = None,
        keys: list[bytes] | None = None,
        loan: Loan | None = None,
    ) -> list[int]:
        outcomes: list[int] = self.mover.read(
            self._batch(numbers, keys, loan),
            self._extents(len(numbers)),
            np.full(len(numbers), self.generation, np.uint64),
            deadline=time.monotonic() + seconds,
            on_late=holding or Holding(),
        ).tolist()
        return outcomes


@contextmanager
def records_of(
    tmp_path: Path, pool: HostPool, count: int, **options: object
) -> Iterator[tuple[Records, Rig, Path]]:
    with make_mover(pool, **options) as rig:  # type: ignore[arg-type]
        size = record.record_bytes(pool.geometry.payload_bytes)
        path = tmp_path / "records"
        yield Records(rig.mover, pool, rig.open_file(path, count * size), count), rig, path
        assert rig.staging.in_use_bytes == 0


def shuffled(count: int, seed: int) -> Numbers:
    return np.random.default_rng(seed).permutation(count)


# -- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["uring", "aio"])
@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize(
    ("segments", "segment_bytes", "aligned"),
    [
        (1, 256 * 1024, True),
        (4, BIG, True),
        (4, BIG, False),
        (2, 2 * BIG + 300, False),
        (3, 1300, True),
        (3, 1300, False),
        (8, ALIGNMENT, True),
    ],
)
def test_pages_come_back_byte_for_byte(
    tmp_path: Path, segments: int, segment_bytes: int, aligned: bool, direct_io: bool, queue: str
) -> None:
    """In place and through staging, aligned and not, with and without O_DIRECT: what was written
    from some host pages is read into others, and the pages that were not named do not change."""
    pool = host_pool(1, 40, segments, segment_bytes, aligned)
    source, target = np.split(shuffled(40, 2)[:34], 2)
    expected = pool.pages(source)
    with records_of(tmp_path, pool, 17, direct_io=direct_io, queue=queue) as (records, _, _):
        assert records.write(source) == [GOOD] * 17
        pool.fill(3)
        others = np.setdiff1d(np.arange(40), target)
        unchanged = pool.pages(others)
        assert records.read(target) == [GOOD] * 17
        assert pool.pages(target) == expected
        assert pool.pages(others) == unchanged
        counters = records.mover.counters
        moved = 17 * pool.geometry.payload_bytes
        assert (counters.written_bytes, counters.read_bytes) == (moved, moved)
        assert (counters.failed_pages, counters.foreign_pages, counters.retried_pages) == (0, 0, 0)


def test_payloads_that_are_no_multiple_of_4_kib_go_through_staging(tmp_path: Path) -> None:
    """A page of 3 x 1300 bytes with O_DIRECT: the record on disk is payload, zeros, trailer."""
    pool = host_pool(1, 8, 3, 1300)
    with records_of(tmp_path, pool, 8) as (records, rig, path):
        assert not rig.mover.placement(pool.geometry).in_place
        assert records.write(np.arange(8)) == [GOOD] * 8
        on_disk = np.fromfile(path, np.uint8).reshape(8, 8192)
        assert [row[:3900].tobytes() for row in on_disk] == pool.pages(np.arange(8))
        assert not on_disk[:, 3900:4096].any()
        for i, (row, key) in enumerate(zip(on_disk, page_keys(8), strict=True)):
            trailer = record.parse_trailer(row[-TRAILER_BYTES:])
            assert trailer is not None
            assert (trailer.namespace, trailer.key, trailer.depth) == (NAMESPACE, key, i)
            assert (trailer.payload_bytes, trailer.generation) == (3900, 5)
            assert trailer.payload_hash == record.payload_hash(row[:3900])


@pytest.mark.parametrize("segments", [1, 4])
def test_the_record_is_the_same_in_place_and_through_staging(tmp_path: Path, segments: int) -> None:
    """How a page travels does not show on disk."""
    on_disk = []
    for aligned in (True, False):
        pool = host_pool(1, 6, segments, BIG, aligned)
        with records_of(tmp_path, pool, 6) as (records, rig, path):
            assert rig.mover.placement(pool.geometry).in_place == aligned
            assert records.write(np.arange(6)) == [GOOD] * 6
            on_disk.append(np.fromfile(path, np.uint8).reshape(6, -1)[:, : segments * BIG].copy())
    assert np.array_equal(*on_disk)


@pytest.mark.parametrize("segment_bytes", [6 * ALIGNMENT, 1300])
def test_a_batch_far_larger_than_staging(tmp_path: Path, segment_bytes: int) -> None:
    """200 pages move through staging for 8 of them."""
    pool = host_pool(1, 400, 3, segment_bytes)
    budget = 8 * record.record_bytes(3 * segment_bytes)
    source, target = np.split(shuffled(400, 5), 2)
    expected = pool.pages(source)
    with records_of(tmp_path, pool, 200, staging_bytes=budget) as (records, rig, _):
        assert records.write(source) == [GOOD] * 200
        pool.fill(2)
        assert records.read(target) == [GOOD] * 200
        assert pool.pages(target) == expected
        assert 0 < rig.staging.peak_bytes <= rig.staging.nbytes == budget


def test_a_page_that_fills_the_staging_alone(tmp_path: Path) -> None:
    """One record is all the staging there is: pages go one by one."""
    pool = host_pool(1, 6, 3, 1300)
    with records_of(tmp_path, pool, 6, staging_bytes=8192) as (records, _, _):
        assert records.write(np.arange(6)) == [GOOD] * 6
        expected = pool.pages(np.arange(6))
        pool.fill(2)
        assert records.read(np.arange(6)) == [GOOD] * 6
        assert pool.pages(np.arange(6)) == expected


# -- one result a page --------------------------------------------------------------------------


def cut_short(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[: 11 * size + size // 2])


def flip_a_payload_bit(path: Path, size: int) -> None:
    content = bytearray(path.read_bytes())
    content[6 * size + 777] ^= 1
    path.write_bytes(content)


def flip_a_trailer_bit(path: Path, size: int) -> None:
    content = bytearray(path.read_bytes())
    content[7 * size - 1] ^= 128
    path.write_bytes(content)


def swap_two(path: Path, size: int) -> None:
    content = bytearray(path.read_bytes())
    content[3 * size : 5 * size] = content[4 * size : 5 * size] + content[3 * size : 4 * size]
    path.write_bytes(content)


def wipe_one(path: Path, size: int) -> None:
    content = bytearray(path.read_bytes())
    content[0:size] = bytes(size)
    path.write_bytes(content)


@pytest.mark.parametrize("segments", [3, 4])
@pytest.mark.parametrize("queue", ["uring", "aio"])
@pytest.mark.parametrize(
    ("damage", "bad"),
    [
        (cut_short, {11: FAILED}),
        (flip_a_payload_bit, {6: FOREIGN}),
        (flip_a_trailer_bit, {6: FOREIGN}),
        (swap_two, {3: FOREIGN, 4: FOREIGN}),
        (wipe_one, {0: FOREIGN}),
    ],
)
def test_one_bad_record_does_not_spoil_the_others(
    tmp_path: Path,
    damage: Callable[[Path, int], None],
    bad: dict[int, Outcome],
    queue: str,
    segments: int,
) -> None:
    """Damage on the medium costs exactly the pages that it hit."""
    pool = host_pool(1, 24, segments, BIG if segments == 4 else 1300)
    numbers = np.arange(12)
    expected = pool.pages(numbers)
    with records_of(tmp_path, pool, 12, queue=queue) as (records, rig, path):
        assert rig.mover.placement(pool.geometry).in_place == (segments == 4)
        assert records.write(numbers) == [GOOD] * 12
        damage(path, records.size)
        pool.fill(2)
        outcomes = records.read(numbers)
        assert outcomes == [bad.get(i, GOOD) for i in range(12)]
        after = pool.pages(numbers)
        assert [after[i] for i in range(12) if i not in bad] == [
            expected[i] for i in range(12) if i not in bad
        ]
        counters = rig.mover.counters
        assert counters.failed_pages == list(bad.values()).count(FAILED)
        assert counters.foreign_pages == list(bad.values()).count(FOREIGN)
        # The engine still works.
        assert records.write(numbers) == [GOOD] * 12
        assert records.read(numbers) == [GOOD] * 12


def test_pages_that_failed_the_check_are_not_copied(tmp_path: Path) -> None:
    """Through staging, a host page is touched only by a record that was found to be right."""
    pool = host_pool(1, 12, 3, 1300)
    numbers = np.arange(12)
    with records_of(tmp_path, pool, 12) as (records, _, path):
        assert records.write(numbers) == [GOOD] * 12
        swap_two(path, records.size)
        pool.fill(2)
        before = pool.pages(numbers)
        records.read(numbers)
        after = pool.pages(numbers)
        assert (after[3], after[4]) == (before[3], before[4])


@pytest.mark.parametrize(("checks_payload", "outcome"), [(True, FOREIGN), (False, GOOD)])
@pytest.mark.parametrize("segment_bytes", [BIG, 1300])
def test_what_the_two_ways_of_checking_notice(
    tmp_path: Path, checks_payload: bool, outcome: Outcome, segment_bytes: int
) -> None:
    """A wrong payload bit is noticed by the full check alone, a wrong trailer bit by both."""
    pool = host_pool(1, 12, 3, segment_bytes)
    options = {"checks_payload": checks_payload}
    with records_of(tmp_path, pool, 12, **options) as (records, _, path):
        for damage, found in ((flip_a_payload_bit, outcome), (flip_a_trailer_bit, FOREIGN)):
            assert records.write(np.arange(12)) == [GOOD] * 12
            damage(path, records.size)
            assert records.read(np.arange(12)) == [found if i == 6 else GOOD for i in range(12)]


@pytest.mark.parametrize("segment_bytes", [BIG, 1300])
def test_records_of_another_write_are_foreign(tmp_path: Path, segment_bytes: int) -> None:
    """Another key, generation or payload size is not the page that was asked for."""
    pool = host_pool(1, 6, 3, segment_bytes)
    with records_of(tmp_path, pool, 6) as (records, _, _):
        assert records.write(np.arange(6)) == [GOOD] * 6
        assert records.read(np.arange(6), keys=page_keys(6, seed=9)) == [FOREIGN] * 6
        records.generation += 1
        assert records.read(np.arange(6)) == [FOREIGN] * 6


def test_a_file_that_cannot_be_written_fails_each_page(tmp_path: Path) -> None:
    """When every extent is bad, every page has failed, and nothing is raised."""
    pool = host_pool(1, 6, 3, 1300)
    with records_of(tmp_path, pool, 6) as (records, _, _):
        records.descriptor += 1000
        assert records.write(np.arange(6)) == [FAILED] * 6
        assert records.read(np.arange(6)) == [FAILED] * 6


def test_nothing_is_started_after_the_deadline(tmp_path: Path) -> None:
    """A call whose time is up fails its pages without touching host pages or the medium."""
    pool = host_pool(1, 6, 3, 1300)
    with records_of(tmp_path, pool, 6) as (records, _, path):
        content, memory = path.read_bytes(), pool.memory.copy()
        assert records.write(np.arange(6), seconds=0) == [FAILED] * 6
        assert records.read(np.arange(6), seconds=0) == [FAILED] * 6
        assert path.read_bytes() == content
        assert np.array_equal(pool.memory, memory)


def test_a_call_that_gets_no_staging_fails_its_pages(tmp_path: Path) -> None:
    """While others hold all the staging, a call waits until its deadline and gives up."""
    pool = host_pool(1, 6, 3, 1300)
    with records_of(tmp_path, pool, 6) as (records, rig, _):
        with rig.staging.lease(rig.staging.nbytes, timeout=0):
            start = time.monotonic()
            assert records.write(np.arange(6), seconds=0.1) == [FAILED] * 6
            assert 0.1 <= time.monotonic() - start < 20
        assert records.write(np.arange(6)) == [GOOD] * 6


# -- unexpected errors --------------------------------------------------------------------------


@pytest.mark.parametrize("segment_bytes", [BIG, 1300])
@pytest.mark.parametrize(
    ("name", "at"), list(itertools.product(["write_trailers", "check_trailers"], [1, 2, 4]))
)
def test_an_unexpected_error_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int, name: str, at: int
) -> None:
    """Whatever is raised while parts are in flight: no lease and no transfer is left."""
    pool = host_pool(1, 20, 3, segment_bytes)
    original = getattr(record, name)
    calls = itertools.count(1)

    def fails(*args: object, **options: object) -> object:
        if next(calls) >= at:
            raise ZeroDivisionError(name)
        return original(*args, **options)

    with records_of(tmp_path, pool, 20) as (records, rig, _):
        assert records.write(np.arange(20)) == [GOOD] * 20
        with monkeypatch.context() as patch:
            patch.setattr(record, name, fails)
            with pytest.raises(ZeroDivisionError):
                (records.write if name == "write_trailers" else records.read)(np.arange(20))
        assert rig.staging.in_use_bytes == 0
        assert rig.reader.drain(wait_s=0)
        assert rig.writer.drain(wait_s=0)


def test_pages_outside_of_the_pool_leave_nothing_behind(tmp_path: Path) -> None:
    """A page number that the pool does not have is an error, not a leak."""
    pool = host_pool(1, 8, 3, 1300)
    numbers = np.array([0, 1, 2, 3, 4, 5, 6, 8])
    with records_of(tmp_path, pool, 8) as (records, rig, _):
        with pytest.raises(RegistrationError, match="page 8 is outside"):
            records.write(numbers)
        assert rig.staging.in_use_bytes == 0
        assert records.write(np.arange(8)) == [GOOD] * 8


# -- late transfers -----------------------------------------------------------------------------


@dataclass
class Simulated:
    """A mover over two engines on fake agents that share one file."""

    records: Records
    staging: StagingArena
    file: Bytes
    agents: list[FakeAgent]

    def let_go(self) -> None:
        for agent in self.agents:
            agent.let_go()

    def wait_for_late(self) -> None:
        for engine in (self.records.mover.reader, self.records.mover.writer):
            stop = time.monotonic() + 30
            while engine.late_transfers and time.monotonic() < stop:
                time.sleep(0.001)


@contextmanager
def simulated(
    pool: HostPool,
    count: int,
    *,
    writes: Callable[[], Fate] = Fate,
    reads: Callable[[], Fate] = Fate,
    staging_records: int | None = None,
    direct_io: bool = True,
) -> Iterator[Simulated]:
    size = record.record_bytes(pool.geometry.payload_bytes)
    file = np.zeros(count * size, np.uint8)
    with ExitStack() as stack:
        reader, reading = stack.enter_context(fake_engine({3: file}, reads))
        writer, writing = stack.enter_context(fake_engine({3: file}, writes))
        staging = StagingArena(allocate((staging_records or count) * size))
        mover = RecordMover(
            reader=reader,
            writer=writer,
            staging=staging,
            direct_io=direct_io,
            checks_payload=True,
        )
        for engine in (reader, writer):
            engine.register_memory(staging.address, staging.nbytes)
            engine.register_file(3, file.size)
            for region in pool.geometry.regions:
                engine.register_memory(region.address, region.nbytes)
        simulation = Simulated(Records(mover, pool, 3, count), staging, file, [reading, writing])
        yield simulation
        simulation.let_go()
        simulation.wait_for_late()
        assert staging.in_use_bytes == 0


def in_turn(*fates: Fate) -> Callable[[], Fate]:
    """These fates, then good ones."""
    rest = itertools.chain(fates, itertools.repeat(Fate()))
    return lambda: next(rest)


HANGS = Fate("hang")


def test_a_late_write_keeps_its_staging_and_its_extents_until_it_ends() -> None:
    """LATE are the pages of the part that hangs and no others; what the transfer uses comes back
    when it has ended, without another call."""
    pool = host_pool(1, 20, 3, 1300)
    with simulated(pool, 20, writes=in_turn(Fate(), HANGS)) as sim:
        holding = Holding()
        start = time.monotonic()
        outcomes = sim.records.write(np.arange(20), seconds=0.5, holding=holding)
        assert time.monotonic() - start < 20
        assert outcomes == [GOOD] * 5 + [LATE] * 5 + [GOOD] * 10
        assert (holding.held, holding.freed) == ([5, 6, 7, 8, 9], [])
        assert sim.staging.in_use_bytes == 5 * sim.records.size
        assert sim.records.mover.counters.late_transfers == 1
        sim.let_go()
        sim.wait_for_late()
        assert holding.freed == [5, 6, 7, 8, 9]
        assert sim.staging.in_use_bytes == 0
        assert sim.records.read(np.arange(20)) == [GOOD] * 20


def test_a_late_read_through_staging_never_reaches_host_pages() -> None:
    """The pages have failed; when the bytes arrive at last, they stay in staging."""
    pool = host_pool(1, 20, 3, 1300)
    with simulated(pool, 20, reads=in_turn(Fate(), HANGS, HANGS)) as sim:
        assert sim.records.write(np.arange(20)) == [GOOD] * 20
        expected = pool.pages(np.arange(20))
        pool.fill(2)
        holding = Holding()
        outcomes = sim.records.read(np.arange(20), seconds=0.5, holding=holding)
        assert outcomes[:5] == [GOOD] * 5
        assert outcomes[5:15] == [FAILED] * 10
        assert pool.pages(np.arange(5)) == expected[:5]
        before = pool.memory.copy()
        sim.let_go()
        sim.wait_for_late()
        assert np.array_equal(pool.memory, before)
        assert holding.held == holding.freed == list(range(5, 15))


def test_an_overdue_read_in_place_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel writes into host pages, so the call returns only when the read has ended, with
    its pages read; that is counted and logged."""
    pool = host_pool(1, 4, 2, BIG)
    with simulated(pool, 4, reads=in_turn(HANGS)) as sim:
        assert sim.records.write(np.arange(4)) == [GOOD] * 4
        expected = pool.pages(np.arange(4))
        pool.fill(2)
        counters = sim.records.mover.counters
        with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as executor:
            reading = executor.submit(sim.records.read, np.arange(4), seconds=0.5)
            end = time.monotonic() + 30
            while not counters.overdue_reads and time.monotonic() < end:
                time.sleep(0.005)
            time.sleep(0.1)
            assert not reading.done()
            sim.let_go()
            outcomes = reading.result(timeout=30)
        assert outcomes[0] == GOOD
        assert pool.page(0) == expected[0]
        assert counters.overdue_reads == 1
        assert "waiting, because the kernel may still write into host pages" in caplog.text


def test_late_transfers_that_hold_all_staging_cost_misses_until_they_end() -> None:
    """Nobody waits for them, and nothing is needed for it to go on when they have ended."""
    pool = host_pool(1, 4, 3, 1300)
    with simulated(pool, 4, writes=in_turn(*[HANGS] * 4), staging_records=4) as sim:
        assert sim.records.write(np.arange(4), seconds=0.5) == [LATE] * 3 + [FAILED]
        assert sim.records.write(np.arange(4), seconds=0.5).count(GOOD) == 0
        assert sim.staging.in_use_bytes == sim.staging.nbytes
        assert sim.records.write(np.arange(4), seconds=30) == [FAILED] * 4
        sim.let_go()
        end = time.monotonic() + 30
        while sim.staging.in_use_bytes and time.monotonic() < end:
            time.sleep(0.005)
        assert sim.records.write(np.arange(4)) == [GOOD] * 4


# -- loans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_bytes", [BIG, 1300])
def test_a_call_whose_loan_is_over_touches_nothing(tmp_path: Path, segment_bytes: int) -> None:
    """Neither host pages nor the medium, in place and through staging."""
    pool = host_pool(1, 12, 3, segment_bytes)
    with records_of(tmp_path, pool, 6) as (records, _, path):
        assert records.write(np.arange(6)) == [GOOD] * 6
        pool.fill(2)
        content, memory = path.read_bytes(), pool.memory.copy()
        loan = Loan()
        loan.end()
        assert records.write(np.arange(6), loan=loan) == [FAILED] * 6
        assert records.read(np.arange(6, 12), loan=loan) == [FAILED] * 6
        assert path.read_bytes() == content
        assert np.array_equal(pool.memory, memory)


@pytest.mark.parametrize(("segment_bytes", "outcome"), [(BIG, FAILED), (1300, GOOD)])
def test_a_write_whose_loan_ends_on_the_way(segment_bytes: int, outcome: Outcome) -> None:
    """In place, host pages may have changed before they were read: the page is not GOOD. Through
    staging it was copied while it was on loan: it is, and holds those bytes. Nothing is begun
    afterwards."""
    pool = host_pool(1, 32, 2, segment_bytes)
    expected = pool.pages(np.arange(16))
    with simulated(pool, 16, writes=in_turn(*[HANGS] * 3)) as sim:
        loan = Loan()
        writing_agent = sim.agents[1]
        with ThreadPoolExecutor(1) as executor:
            writing = executor.submit(sim.records.write, np.arange(16), loan=loan)
            while len(writing_agent.handles) < 3:
                time.sleep(0.001)
            loan.end()  # does not wait: nothing is written into host pages
            pool.fill(2)
            sim.let_go()
            assert writing.result(timeout=30) == [outcome] * 12 + [FAILED] * 4
        assert len(writing_agent.handles) == 3
        read = sim.records.read(np.arange(16, 32))
        for i, found in enumerate(read):
            assert found != GOOD or pool.page(16 + i) == expected[i]
        assert read[:12] == ([GOOD] if outcome == GOOD else [FOREIGN]) * 12


def test_a_read_through_staging_whose_loan_ends_on_the_way() -> None:
    """What comes afterwards stays in staging; the end of the loan waits for nothing."""
    pool = host_pool(1, 32, 2, 1300)
    with simulated(pool, 16, reads=in_turn(*[HANGS] * 3)) as sim:
        assert sim.records.write(np.arange(16)) == [GOOD] * 16
        loan = Loan()
        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(sim.records.read, np.arange(16, 32), loan=loan)
            while len(sim.agents[0].handles) < 3:
                time.sleep(0.001)
            loan.end()
            before = pool.memory.copy()
            sim.let_go()
            assert reading.result(timeout=30) == [FAILED] * 16
        assert np.array_equal(pool.memory, before)


def test_a_read_in_place_holds_its_loan_until_it_has_ended() -> None:
    """Its pages can be taken back only when the kernel has written the last byte into them; parts
    that were not begun are not."""
    pool = host_pool(1, 32, 2, BIG)
    with simulated(pool, 16, reads=in_turn(*[HANGS] * 3)) as sim:
        assert sim.records.write(np.arange(16)) == [GOOD] * 16
        loan = Loan()
        with ThreadPoolExecutor(2) as executor:
            reading = executor.submit(sim.records.read, np.arange(16, 32), loan=loan)
            while len(sim.agents[0].handles) < 3:
                time.sleep(0.001)
            ending = executor.submit(loan.end)
            time.sleep(0.05)
            assert not ending.done()
            sim.let_go()
            ending.result(timeout=30)
            after = pool.memory.copy()
            assert reading.result(timeout=30) == [FAILED] * 16
        assert len(sim.agents[0].handles) == 3
        assert np.array_equal(pool.memory, after)


@pytest.mark.parametrize("segment_bytes", [BIG, 1300])
def test_a_read_gives_its_loan_back(tmp_path: Path, segment_bytes: int) -> None:
    """After good, damaged, failed and unexpected ends alike, the loan can end at once."""
    pool = host_pool(1, 24, 3, segment_bytes)
    loan = Loan()
    with records_of(tmp_path, pool, 12) as (records, _, path):
        assert records.write(np.arange(12), loan=loan) == [GOOD] * 12
        flip_a_payload_bit(path, records.size)
        cut_short(path, records.size)
        outcomes = records.read(np.arange(12, 24), loan=loan)
        assert (outcomes[6], outcomes[11]) == (FOREIGN, FAILED)
        with (
            mock.patch.object(record, "check_trailers", side_effect=ZeroDivisionError),
            pytest.raises(ZeroDivisionError),
        ):
            records.read(np.arange(12, 24), loan=loan)
        with ThreadPoolExecutor(1) as executor:
            executor.submit(loan.end).result(timeout=30)


fates = st.builds(
    Fate,
    end=st.sampled_from(["done", "done", "done", "raise", "err", "refuse", "hang"]),
    delay=st.sampled_from([0.0, 0.0, 0.001, 0.01, 0.06]),
    moved=st.integers(0, 3),
    damage=st.sampled_from([False, False, False, True]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    writes=st.lists(fates, max_size=8),
    reads=st.lists(fates, max_size=8),
    big=st.booleans(),
    staging_records=st.integers(2, 12),
)
def test_whatever_storage_does_good_means_right_and_nothing_leaks(
    writes: list[Fate], reads: list[Fate], big: bool, staging_records: int
) -> None:
    """For any schedule of delays, failures, hangs and damage: a page that is GOOD has the right
    bytes, host pages and extents that were handed back never change again, late ones are kept until
    they end, and all staging comes back."""
    pool = host_pool(1, 24, 2, BIG if big else 1300)
    source, target = np.arange(12), np.arange(12, 24)
    expected = pool.pages(source)
    with simulated(
        pool,
        12,
        writes=in_turn(*writes),
        reads=in_turn(*reads),
        staging_records=staging_records,
    ) as sim:
        hanging = threading.Timer(0.1, sim.let_go)  # reads in place wait for it
        hanging.start()
        size = sim.records.size
        holding = Holding()
        written = sim.records.write(source, seconds=0.04, holding=holding)
        late = [i for i, outcome in enumerate(written) if outcome == LATE]
        assert sorted(holding.held) == late
        kept = sim.file.reshape(12, size)[[i for i in range(12) if i not in late]].copy()

        reading = Holding()
        read = sim.records.read(target, seconds=0.04, holding=reading)
        after = pool.memory.copy()
        for i, outcome in enumerate(read):
            if outcome == GOOD:
                assert pool.page(12 + i) == expected[i]
        hanging.join()
        sim.let_go()
        sim.wait_for_late()
        assert np.array_equal(pool.memory, after)
        assert np.array_equal(
            sim.file.reshape(12, size)[[i for i in range(12) if i not in late]], kept
        )
        assert sorted(holding.freed) == late
        assert sorted(reading.freed) == sorted(reading.held)
        assert sim.staging.in_use_bytes == 0


# -- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["uring", "aio"])
@pytest.mark.parametrize("segment_bytes", [BIG, 1300])
def test_threads_with_little_staging_never_block_each_other(
    tmp_path: Path, queue: str, segment_bytes: int
) -> None:
    """Eight threads write and read their own pages through staging for a few; all succeed."""
    count = 16
    pool = host_pool(1, 8 * 2 * count, 2, segment_bytes)
    size = record.record_bytes(pool.geometry.payload_bytes)
    budget = 3 * (ALIGNMENT if segment_bytes == BIG else size)
    with make_mover(pool, staging_bytes=budget, queue=queue) as rig:
        assert rig.mover.placement(pool.geometry).in_place == (segment_bytes == BIG)
        files = [rig.open_file(tmp_path / str(i), count * size) for i in range(8)]

        def work(number: int) -> None:
            records = Records(rig.mover, pool, files[number], count)
            mine = np.arange(count) + number * 2 * count
            expected = pool.pages(mine)
            for generation in range(1, 4):
                records.generation = generation
                assert records.write(mine) == [GOOD] * count
                assert records.read(mine + count) == [GOOD] * count
                assert pool.pages(mine + count) == expected

        with ThreadPoolExecutor(8) as executor:
            list(executor.map(work, range(8)))
        assert rig.staging.in_use_bytes == 0
        assert rig.staging.peak_bytes <= budget
        moved = 8 * 3 * count * pool.geometry.payload_bytes
        assert rig.mover.counters.written_bytes == rig.mover.counters.read_bytes == moved


def test_counters_lose_nothing_between_threads() -> None:
    """Threads that count at once are all counted."""
    counters = MoverCounters()

    def count(_: int) -> None:
        for _ in range(2000):
            counters.add(read_bytes=1, foreign_pages=2)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as executor:
            list(executor.map(count, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert (counters.read_bytes, counters.foreign_pages) == (16_000, 32_000)
