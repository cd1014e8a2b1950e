"""Records between host pages and objects: exact bytes or nothing, and no byte after the end.

First with stand-in agents, then against a real S3 server that stalls, trickles and lies.
"""

import gc
import os
import subprocess
import sys
import textwrap
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

from fake_nixl import FakeBucket, Fate, fake_object_engine
from fault_proxy import Fault, FaultProxy, other_content, slow, stall, truncate
from hicache_nixl import record
from hicache_nixl.batch import Batch, Extents, ObjectNames, Outcome, WriteStamp
from hicache_nixl.loan import Loan
from hicache_nixl.memory import allocate
from hicache_nixl.mover import RecordMover
from hicache_nixl.object_engine import ObjectEngine
from hicache_nixl.record import TRAILER_BYTES
from hicache_nixl.staging import StagingArena
from s3_access import ADMIN, REGION
from s3_server import S3Address
from support import HostPool, host_pool, make_mover, page_keys

Numbers = npt.NDArray[np.int64]

NAMESPACE = b"n" * 32
KIB = 1024
GOOD, FAILED, FOREIGN, LATE = Outcome.GOOD, Outcome.FAILED, Outcome.FOREIGN, Outcome.LATE
UNTRIED = Outcome.UNTRIED
HANGS = Fate("hang")


@dataclass
class Objects:
    """Pages of one pool, and a mover to the objects `<prefix><i>`, page i of a call."""

    mover: RecordMover
    pool: HostPool
    prefix: str = ""
    held: list[int] = field(default_factory=list)
    """Rows of late transfers, and those of them that have ended."""
    freed: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return record.record_bytes(self.pool.geometry.payload_bytes)

    @property
    def staging(self) -> StagingArena:
        return self.mover.staging

    def names(self, count: int) -> list[str]:
        return [f"{self.prefix}{i}" for i in range(count)]

    def write(
        self, numbers: Numbers, *, seconds: float = 60.0, loan: Loan | None = None
    ) -> list[int]:
        outcomes: list[int] = self.mover.write(
            self._batch(numbers, loan),
            ObjectNames(self.names(len(numbers))),
            WriteStamp(5, b"w" * 16, np.arange(len(numbers))),
            deadline=time.monotonic() + seconds,
            on_late=self._on_late,
        ).tolist()
        return outcomes

    def read(
        self, numbers: Numbers, *, seconds: float = 60.0, loan: Loan | None = None
    ) -> list[int]:
        outcomes: list[int] = self.mover.read(
            self._batch(numbers, loan),
            ObjectNames(self.names(len(numbers))),
            None,
            deadline=time.monotonic() + seconds,
            on_late=self._on_late,
        ).tolist()
        return outcomes

    def _batch(self, numbers: Numbers, loan: Loan | None) -> Batch:
        return Batch(
            self.pool.geometry, numbers, page_keys(len(numbers)), NAMESPACE, loan or Loan()
        )

    def _on_late(self, rows: Numbers) -> Callable[[], None]:
        self.held.extend(rows.tolist())
        return lambda: self.freed.extend(rows.tolist())

    def settled(self, seconds: float = 60.0) -> bool:
        """Whether all late transfers end within `seconds`, and give back what they hold."""
        stop = time.monotonic() + seconds
        engines = (self.mover.reader, self.mover.writer)
        while any(engine.late_transfers for engine in engines) and time.monotonic() < stop:
            time.sleep(0.005)
        return self.staging.in_use_bytes == 0


def mover_of(
    reader: ObjectEngine, writer: ObjectEngine, staging_bytes: int, checks_payload: bool = True
) -> RecordMover:
    staging = StagingArena(allocate(staging_bytes))
    for engine in (reader, writer):
        engine.register_memory(staging.address, staging.nbytes)
    return RecordMover(
        reader=reader,
        writer=writer,
        staging=staging,
        direct_io=False,
        checks_payload=checks_payload,
    )


@contextmanager
def simulated(
    pool: HostPool,
    *,
    staging_records: int = 64,
    checks_payload: bool = True,
    requests: int = 8,
) -> Iterator[tuple[Objects, FakeBucket]]:
    """On stand-in agents; what they hold in the end is let go, and must end."""
    bucket = FakeBucket()
    parameters = {"num_threads": str(requests)}
    with ExitStack() as stack:
        reader = stack.enter_context(fake_object_engine(bucket, parameters))
        writer = stack.enter_context(fake_object_engine(bucket, parameters))
        nbytes = staging_records * record.record_bytes(pool.geometry.payload_bytes)
        objects = Objects(mover_of(reader, writer, nbytes, checks_payload), pool)
        yield objects, bucket
        bucket.let_go()
        assert objects.settled()
        assert sorted(objects.freed) == sorted(objects.held)


def halves(pages: int) -> tuple[Numbers, Numbers]:
    """Pages to write from, and as many to read into."""
    source, target = np.split(np.random.default_rng(3).permutation(pages), 2)
    return source, target


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "segment_bytes"), [(1, 256 * KIB), (3, 1300), (4, 128 * KIB), (2, 4096)]
)
def test_pages_come_back_byte_for_byte(segments: int, segment_bytes: int) -> None:
    """Every pool goes through staging, also one whose pages could move in place in a file; pages
    that were not named do not change."""
    pool = host_pool(1, 120, segments, segment_bytes)
    source, target = halves(120)
    source, target = source[:50], target[:50]
    expected = pool.pages(source)
    with simulated(pool) as (objects, bucket):
        assert not objects.mover.placement(pool.geometry).in_place
        assert objects.write(source) == [GOOD] * 50
        assert {len(content) for content in bucket.objects.values()} == {objects.size}
        pool.fill(2)
        others = np.setdiff1d(np.arange(120), target)
        unchanged = pool.pages(others)
        assert objects.read(target) == [GOOD] * 50
        assert pool.pages(target) == expected
        assert pool.pages(others) == unchanged


def test_a_batch_far_larger_than_staging() -> None:
    """100 pages move through staging for 5 of them."""
    pool = host_pool(1, 200, 3, 1300)
    source, target = halves(200)
    expected = pool.pages(source)
    with simulated(pool, staging_records=5) as (objects, _):
        assert objects.write(source) == [GOOD] * 100
        assert objects.read(target) == [GOOD] * 100
        assert pool.pages(target) == expected


@pytest.mark.parametrize("requests", [2, 8, 40])
def test_so_many_objects_are_in_flight_that_no_request_waits(requests: int) -> None:
    """While the first pages of a batch hang, twice as many as there are requests are posted."""
    pool = host_pool(1, 128, 1, 256 * KIB)
    with simulated(pool, staging_records=128, requests=requests) as (objects, bucket):
        bucket.fates = {name: [HANGS] for name in objects.names(128)}
        with ThreadPoolExecutor(1) as executor:
            writing = executor.submit(objects.write, np.arange(128))
            stop = time.monotonic() + 30
            while len(bucket.asked) < 2 * requests and time.monotonic() < stop:
                time.sleep(0.001)
            assert len(bucket.asked) >= 2 * requests
            assert not writing.done()
            bucket.let_go()
            assert writing.result(timeout=30) == [GOOD] * 128


def test_files_and_objects_are_not_mixed_up(tmp_path: Path) -> None:
    """Names for an engine of files, and extents for one of objects, are a TypeError, with nothing
    left behind."""
    pool = host_pool(1, 2, 3, 1300)
    extents = Extents(np.zeros(1, np.int64), np.zeros(1, np.int64))
    batch = Batch(pool.geometry, np.arange(1), page_keys(1), NAMESPACE)
    later = time.monotonic() + 10
    with make_mover(pool) as rig, simulated(pool) as (objects, _):
        for mover, where in ((objects.mover, extents), (rig.mover, ObjectNames(["a"]))):
            with pytest.raises(TypeError, match="cannot move"):
                mover.read(batch, where, None, deadline=later, on_late=objects._on_late)
            assert mover.staging.in_use_bytes == 0


# -- one result a page ----------------------------------------------------------------------------


def test_nothing_is_posted_after_a_page_that_is_not_there() -> None:
    """The rest of a read is of no use: the parts in flight end, and no other is begun."""
    pool = host_pool(1, 256, 1, 64 * KIB)
    with simulated(pool, staging_records=256, requests=4) as (objects, bucket):
        assert objects.write(np.arange(128)) == [GOOD] * 128
        del bucket.objects["1"]
        bucket.asked.clear()
        outcomes = objects.read(np.arange(128, 256))
        assert outcomes[:3] == [GOOD, FAILED, GOOD]
        asked = len(bucket.asked)
        assert asked < 128
        assert outcomes[asked:] == [UNTRIED] * (128 - asked)
        # A write goes on: what is stored behind a gap is of use later.
        bucket.fates = {"1": [Fate("raise")]}
        assert objects.write(np.arange(128)).count(GOOD) == 127


def damaged(content: bytes, how: str) -> bytes:
    """What may lie in the place of a record."""
    half = len(content) // 2
    return {
        "short": content[:half],
        "empty": b"",
        "without its trailer": content[:-TRAILER_BYTES],
        "one byte short": content[:-1],
        "longer at the front": bytes(4096) + content,
        "html": b"<html>".ljust(len(content)),
        "zeros": bytes(len(content)),
        "a bit of the payload": content[:99] + bytes([content[99] ^ 1]) + content[100:],
        "a bit of the trailer": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    }[how]


DAMAGE = [
    "short",
    "empty",
    "without its trailer",
    "one byte short",
    "longer at the front",
    "html",
    "zeros",
    "a bit of the trailer",
]


@pytest.mark.parametrize("page", [2, 3], ids=["first of its part", "second"])
@pytest.mark.parametrize("checks_payload", [True, False])
@pytest.mark.parametrize("how", [*DAMAGE, "a bit of the payload"])
def test_a_damaged_object_is_a_miss_of_its_own(how: str, checks_payload: bool, page: int) -> None:
    """Also where staging holds the right end of that very record from the read before; with
    verify=trailer all but a wrong bit in the payload is noticed."""
    pool = host_pool(1, 16, 3, 1300)
    with simulated(pool, checks_payload=checks_payload) as (objects, bucket):
        assert objects.write(np.arange(8)) == [GOOD] * 8
        assert objects.read(np.arange(8, 16)) == [GOOD] * 8
        bucket.objects[str(page)] = damaged(bucket.objects[str(page)], how)
        pool.fill(2)
        before = pool.page(8 + page)
        outcomes = objects.read(np.arange(8, 16))
        if how == "a bit of the payload" and not checks_payload:
            assert outcomes[page] == GOOD
            return
        assert outcomes[: page + 1] == [GOOD] * page + [FOREIGN]
        assert pool.page(8 + page) == before


def test_pages_that_ended_in_time_are_served() -> None:
    """Of a read whose deadline comes, the pages that are there are GOOD; the late ones have failed,
    hold their staging until they end, and never reach a host page."""
    pool = host_pool(1, 64, 3, 1300)
    with simulated(pool) as (objects, bucket):
        assert objects.write(np.arange(32)) == [GOOD] * 32
        expected = pool.pages(np.arange(32))
        bucket.fates = {"3": [HANGS], "20": [HANGS]}
        pool.fill(2)
        start = time.monotonic()
        outcomes = objects.read(np.arange(32, 64), seconds=1.0)
        assert time.monotonic() - start < 20
        good = [i for i, outcome in enumerate(outcomes) if outcome == GOOD]
        assert good == [i for i in range(24) if i not in (3, 20)]
        assert [pool.page(32 + i) for i in good] == [expected[i] for i in good]
        assert objects.held == [3, 20]
        assert objects.staging.quarantined_bytes == objects.staging.in_use_bytes > 0
        before = pool.memory.copy()
        bucket.let_go()
        assert objects.settled()
        assert np.array_equal(pool.memory, before)
        assert objects.staging.quarantined_bytes == 0


def test_a_late_write_is_late_alone() -> None:
    """LATE is the page whose write hangs; the others are stored."""
    pool = host_pool(1, 64, 3, 1300)
    with simulated(pool) as (objects, bucket):
        bucket.fates = {"25": [HANGS]}
        outcomes = objects.write(np.arange(32), seconds=1.0)
        assert [i for i, outcome in enumerate(outcomes) if outcome != GOOD] == [25]
        assert outcomes[25] == LATE
        assert "25" not in bucket.objects
        bucket.let_go()
        assert objects.settled()
        assert objects.read(np.arange(32, 64)) == [GOOD] * 32


def test_quarantine_costs_calls_their_pages_until_it_drains() -> None:
    """Where late transfers hold all the staging, calls miss at once; with a part of it they go on
    in what is left; when the transfers have ended everything is as before."""
    pool = host_pool(1, 64, 3, 1300)
    with simulated(pool, staging_records=8) as (objects, bucket):
        assert objects.write(np.arange(32)) == [GOOD] * 32
        for hang in range(6):
            bucket.fates = {"0": [HANGS]}
            assert objects.read(np.array([32]), seconds=0.5) == [FAILED]
            assert objects.staging.quarantined_bytes == (hang + 1) * objects.size
        assert objects.read(np.arange(32, 64)) == [GOOD] * 32
        for _ in range(2):
            bucket.fates = {"0": [HANGS]}
            objects.read(np.array([32]), seconds=0.5)
        assert objects.staging.quarantined_bytes == objects.staging.nbytes
        start = time.monotonic()
        assert objects.read(np.arange(32, 64), seconds=30) == [UNTRIED] * 32
        assert objects.write(np.arange(32), seconds=30) == [UNTRIED] * 32
        assert time.monotonic() - start < 20
        bucket.let_go()
        assert objects.settled()
        assert objects.read(np.arange(32, 64)) == [GOOD] * 32


# -- loans ----------------------------------------------------------------------------------------


def test_a_call_whose_loan_is_over_touches_nothing() -> None:
    """Neither host pages nor the bucket."""
    pool = host_pool(1, 16, 3, 1300)
    with simulated(pool) as (objects, bucket):
        assert objects.write(np.arange(8)) == [GOOD] * 8
        loan = Loan()
        loan.end()
        bucket.asked.clear()
        before = pool.memory.copy()
        assert objects.read(np.arange(8, 16), loan=loan) == [UNTRIED] * 8
        assert objects.write(np.arange(8), loan=loan) == [UNTRIED] * 8
        assert bucket.asked == []
        assert np.array_equal(pool.memory, before)


def test_a_read_never_reaches_pages_whose_loan_ended_on_the_way() -> None:
    """The loan ends while the objects are in flight: when they come, they stay in staging."""
    pool = host_pool(1, 16, 3, 1300)
    with simulated(pool) as (objects, bucket):
        assert objects.write(np.arange(8)) == [GOOD] * 8
        bucket.fates = {name: [HANGS] for name in objects.names(8)}
        loan = Loan()
        before = pool.memory.copy()
        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(objects.read, np.arange(8, 16), loan=loan)
            while len(bucket.asked) < 8 + 8:
                time.sleep(0.001)
            loan.end()
            bucket.let_go()
            assert reading.result(timeout=30) == [FAILED] * 8
        assert np.array_equal(pool.memory, before)


def test_what_was_copied_before_the_loan_ended_is_stored() -> None:
    """A write through staging does not need the host pages any more: what changes in them then
    does not spoil it."""
    pool = host_pool(1, 8, 3, 1300)
    with simulated(pool) as (objects, bucket):
        bucket.fates = {name: [HANGS] for name in objects.names(4)}
        expected = pool.pages(np.arange(4))
        loan = Loan()
        with ThreadPoolExecutor(1) as executor:
            writing = executor.submit(objects.write, np.arange(4), loan=loan)
            while len(bucket.asked) < 3:
                time.sleep(0.001)
            loan.end()
            pool.fill(9)
            bucket.let_go()
            outcomes = writing.result(timeout=30)
        assert outcomes[:3] == [GOOD] * 3
        stored = outcomes.count(GOOD)
        assert objects.read(np.arange(4, 4 + stored)) == [GOOD] * stored
        assert pool.pages(np.arange(4, 4 + stored)) == expected[:stored]


# -- whatever happens -----------------------------------------------------------------------------

object_fates = st.builds(
    Fate,
    end=st.sampled_from(["done", "done", "raise", "err", "refuse", "hang"]),
    delay=st.sampled_from([0.0, 0.0, 0.001, 0.01, 0.06]),
    moved=st.integers(0, 1),
    damage=st.sampled_from([False, False, True]),
)
schedules = st.dictionaries(st.integers(0, 11), st.lists(object_fates, min_size=1, max_size=2))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    writes=schedules,
    reads=schedules,
    damage=st.dictionaries(st.integers(0, 11), st.sampled_from(DAMAGE), max_size=4),
    staging_records=st.integers(2, 16),
    checks_payload=st.booleans(),
)
def test_whatever_storage_does_good_means_right_and_nothing_leaks(
    writes: dict[int, list[Fate]],
    reads: dict[int, list[Fate]],
    damage: dict[int, str],
    staging_records: int,
    checks_payload: bool,
) -> None:
    """For any schedule of delays, failures, hangs and damage: a page that is GOOD has the right
    bytes, host pages that were handed back never change, no transfer in flight shares staging with
    another one, and all of it comes back."""
    pool = host_pool(1, 24, 2, 1300)
    source, target = np.arange(12), np.arange(12, 24)
    expected = pool.pages(source)
    with simulated(
        pool, staging_records=staging_records, checks_payload=checks_payload, requests=2
    ) as (objects, bucket):
        bucket.fates = {str(i): list(fates) for i, fates in writes.items()}
        written = objects.write(source, seconds=0.04)
        assert objects.held == [i for i, outcome in enumerate(written) if outcome == LATE]
        for i, how in damage.items():
            if str(i) in bucket.objects:
                bucket.objects[str(i)] = damaged(bucket.objects[str(i)], how)
        if not checks_payload:  # then a wrong bit in a payload is not noticed
            reads = {i: [f for f in fates if not f.damage] for i, fates in reads.items()}
        bits = {str(i) for i, fates in writes.items() if any(fate.damage for fate in fates)}
        bucket.fates = {str(i): list(fates) for i, fates in reads.items() if fates}
        read = objects.read(target, seconds=0.04)
        after = pool.memory.copy()
        for i, outcome in enumerate(read):
            if outcome == GOOD and (checks_payload or str(i) not in bits):
                assert pool.page(12 + i) == expected[i]
        bucket.let_go()
        assert objects.settled()
        assert np.array_equal(pool.memory, after)


# -- a real server --------------------------------------------------------------------------------


def parameters(endpoint: str, bucket: str, threads: int = 16) -> dict[str, str]:
    return {
        "access_key": ADMIN.access_key,
        "secret_key": ADMIN.secret_key,
        "bucket": bucket,
        "endpoint_override": endpoint,
        "scheme": "http",
        "region": REGION,
        "num_threads": str(threads),
    }


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """The AWS client of NIXL's plug-in tries once."""
    with mock.patch.dict(os.environ, AWS_RETRY_MODE="standard", AWS_MAX_ATTEMPTS="1"):
        yield


@contextmanager
def real(
    pool: HostPool,
    endpoint: str,
    bucket: str,
    prefix: str,
    *,
    staging_bytes: int = 32 << 20,
    checks_payload: bool = True,
) -> Iterator[Objects]:
    given = parameters(endpoint, bucket)
    reader, writer = ObjectEngine("OBJ", given), ObjectEngine("OBJ", given)
    objects = Objects(mover_of(reader, writer, staging_bytes, checks_payload), pool, prefix)
    try:
        yield objects
    finally:
        ended = all([reader.drain(wait_s=60), writer.drain(wait_s=60)])
        reader.close()
        writer.close()
    assert ended
    assert objects.settled()


@pytest.mark.parametrize(("segments", "segment_bytes"), [(1, 256 * KIB), (3, 1300)])
def test_pages_come_back_from_a_real_server(
    s3: S3Address, module_bucket: str, segments: int, segment_bytes: int
) -> None:
    """Written, found by another client with the length of a record, and read back exactly."""
    pool = host_pool(1, 200, segments, segment_bytes)
    source, target = halves(200)
    expected = pool.pages(source)
    prefix = f"exact/{segment_bytes}/"
    with real(pool, s3.endpoint, module_bucket, prefix) as objects:
        assert objects.write(source) == [GOOD] * 100
        head = s3.client().head_object(Bucket=module_bucket, Key=f"{prefix}7")
        assert head["ContentLength"] == objects.size
        pool.fill(2)
        assert objects.read(target) == [GOOD] * 100
        assert pool.pages(target) == expected


@pytest.mark.parametrize("checks_payload", [True, False])
def test_what_is_wrong_on_a_real_server_is_a_miss(
    s3: S3Address, module_bucket: str, checks_payload: bool
) -> None:
    """Missing, short (with the right end of the record still in staging), longer or other objects
    cost their own page, which is not touched, and no other of their part."""
    pool = host_pool(1, 64, 1, 64 * KIB)
    numbers = np.arange(32)
    prefix = f"wrong/{checks_payload}/"
    client = s3.client()
    with real(pool, s3.endpoint, module_bucket, prefix, checks_payload=checks_payload) as objects:
        assert objects.write(numbers) == [GOOD] * 32
        assert objects.read(numbers + 32) == [GOOD] * 32
        names = objects.names(32)
        whole = client.get_object(Bucket=module_bucket, Key=names[0])["Body"].read()
        client.delete_object(Bucket=module_bucket, Key=names[1])
        for row, how in enumerate(DAMAGE, start=2):
            client.put_object(Bucket=module_bucket, Key=names[row], Body=damaged(whole, how))
        bad = range(1, 2 + len(DAMAGE))
        pool.fill(2)
        for row in bad:  # alone, so that none hides behind another one
            before = pool.page(32)
            batch = Batch(pool.geometry, np.array([32]), [page_keys(32)[row]], NAMESPACE)
            (outcome,) = objects.mover.read(
                batch,
                ObjectNames([names[row]]),
                None,
                deadline=time.monotonic() + 30,
                on_late=objects._on_late,
            ).tolist()
            assert outcome in (FAILED, FOREIGN), DAMAGE[row - 2]
            assert pool.page(32) == before
        outcomes = objects.read(numbers + 32)
        assert outcomes[0] == GOOD
        assert {outcomes[row] for row in bad if row < 8} <= {FAILED, FOREIGN}


@pytest.mark.parametrize(
    "fault",
    [
        other_content("html", methods=("GET",)),
        other_content("bit", methods=("GET",)),
        truncate(announced=True, methods=("GET",)),
        truncate(announced=False, methods=("GET",)),
    ],
    ids=["html", "bit", "short", "torn"],
)
def test_what_is_wrong_on_the_way_is_a_miss(
    module_bucket: str, faulty: FaultProxy, fault: Fault, request: pytest.FixtureRequest
) -> None:
    """Bodies that are cut or changed on the way reach no host page."""
    pool = host_pool(1, 32, 1, 64 * KIB)
    prefix = f"way/{request.node.callspec.id}/"
    with real(pool, faulty.endpoint, module_bucket, prefix) as objects:
        assert objects.write(np.arange(16)) == [GOOD] * 16
        assert objects.read(np.arange(16, 32)) == [GOOD] * 16
        faulty.set(fault)
        pool.fill(2)
        before = pool.memory.copy()
        outcomes = objects.read(np.arange(16, 32))
        assert GOOD not in outcomes
        assert np.array_equal(pool.memory, before)
        faulty.set()
        assert objects.read(np.arange(16, 32)) == [GOOD] * 16


@contextmanager
def all_connected(faulty: FaultProxy) -> Iterator[None]:
    """Requests that last long enough for each to need a connection of its own: what a client may
    have is open then, and later it has no more."""
    faulty.set_round_trip(0.2)
    try:
        yield
    finally:
        faulty.set_round_trip(0)


@pytest.mark.parametrize("fault", ["slow", "stall"])
def test_reused_pages_never_change_after_an_error_and_a_deadline(
    s3: S3Address, module_bucket: str, faulty: FaultProxy, fault: str
) -> None:
    """64 reads, the first key missing, the server slow: the call ends in time, its host pages serve
    something else, and neither they nor staging that is leased again are written any more, before
    and after the server is well again. Then everything works as before, with as many descriptors
    and threads."""
    pool = host_pool(1, 128, 1, 1024 * KIB)
    numbers = np.arange(64)
    with real(
        pool, faulty.endpoint, module_bucket, f"reused/{fault}/", staging_bytes=96 << 20
    ) as objects:
        with all_connected(faulty):
            assert objects.write(numbers) == [GOOD] * 64
            expected = pool.pages(numbers)
            assert objects.read(numbers + 64) == [GOOD] * 64
        before_faults = Usage.now()
        s3.client().delete_object(Bucket=module_bucket, Key=objects.names(1)[0])
        faulty.set(
            slow(4096, 0.05, methods=("GET",))
            if fault == "slow"
            else stall("body", 60, methods=("GET",))
        )
        start = time.monotonic()
        outcomes = objects.read(numbers + 64, seconds=2.0)
        assert time.monotonic() - start < 20
        assert outcomes[0] == FAILED
        pool.fill(7)
        reused = pool.memory.copy()
        assert objects.staging.quarantined_bytes > 0
        with ExitStack() as stack:
            free = []
            while (lease := objects.staging.lease(objects.size, timeout=0)) is not None:
                free.append(stack.enter_context(lease))
                lease.view[:] = 0xA5
            assert free
            time.sleep(1.0)
            faulty.set()
            stop = time.monotonic() + 60
            while objects.mover.reader.late_transfers and time.monotonic() < stop:
                time.sleep(0.01)
            assert all((lease.view == 0xA5).all() for lease in free)
        assert np.array_equal(pool.memory, reused)
        assert objects.settled()
        assert objects.staging.quarantined_bytes == 0
        pool.memory[: 64 << 20] = np.frombuffer(b"".join(expected), np.uint8)
        assert objects.write(numbers[:1]) == [GOOD]
        assert objects.read(numbers + 64) == [GOOD] * 64
        assert pool.pages(numbers + 64) == expected
        assert before_faults.is_back()


@dataclass(frozen=True)
class Usage:
    """Descriptors and threads of this process."""

    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> "Usage":
        return cls(*(len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task")))

    def is_back(self, seconds: float = 30.0) -> bool:
        """Whether both come back to these, or less, within `seconds`."""
        stop = time.monotonic() + seconds
        while True:
            gc.collect()
            now = Usage.now()
            if now.descriptors <= self.descriptors + 2 and now.threads <= self.threads + 2:
                return True
            if time.monotonic() > stop:
                return False
            time.sleep(0.05)


def test_a_server_that_stalls_for_a_minute_costs_misses_and_nothing_else(
    module_bucket: str, faulty: FaultProxy
) -> None:
    """With a deadline of 2 s every call ends by it, also when quarantine has eaten all the staging;
    hits come back with the server, in this process; so do descriptors and threads."""
    pool = host_pool(1, 64, 1, 1024 * KIB)
    numbers = np.arange(32)
    with real(pool, faulty.endpoint, module_bucket, "minute/", staging_bytes=24 << 20) as objects:
        with all_connected(faulty):
            assert objects.write(numbers) == [GOOD] * 32
            expected = pool.pages(numbers)
            assert objects.read(numbers + 32) == [GOOD] * 32
        elsewhere = Objects(objects.mover, pool, "minute/other/")
        usage = Usage.now()
        faulty.set(stall("header", 60))
        pool.fill(3)
        before = pool.memory.copy()
        for _ in range(2):
            start = time.monotonic()
            assert GOOD not in objects.read(numbers + 32, seconds=2.0)
            assert GOOD not in elsewhere.write(numbers[:2], seconds=0.1)
            assert time.monotonic() - start < 2.1 + 8.0, "two deadlines, and a busy machine"
        assert np.array_equal(pool.memory, before)
        faulty.set()
        assert objects.settled()
        pool.memory[: 32 << 20] = np.frombuffer(b"".join(expected), np.uint8)
        stop = time.monotonic() + 30
        while objects.read(numbers + 32, seconds=2.0) != [GOOD] * 32:
            assert time.monotonic() < stop
        assert pool.pages(numbers + 32) == expected
        assert usage.is_back()


def test_eight_threads_share_a_server_and_little_staging(s3: S3Address, module_bucket: str) -> None:
    """Each writes and reads its own pages through staging for a few; none sees another's."""
    pool = host_pool(1, 8 * 32, 1, 64 * KIB)
    with real(pool, s3.endpoint, module_bucket, "", staging_bytes=12 * 68 * KIB) as objects:

        def work(number: int) -> None:
            mine = Objects(objects.mover, pool, f"thread-{number}/")
            numbers = np.arange(16) + number * 32
            for _ in range(2):
                expected = pool.pages(numbers)
                assert mine.write(numbers) == [GOOD] * 16
                assert mine.read(numbers + 16) == [GOOD] * 16
                assert pool.pages(numbers + 16) == expected

        with ThreadPoolExecutor(8) as executor:
            list(executor.map(work, range(8)))
        assert objects.staging.in_use_bytes == 0


LEAVES = """
    import os, sys, threading, time
    import numpy as np
    from hicache_nixl.object_engine import ObjectEngine
    from test_object_moves import Objects, mover_of, parameters
    from support import host_pool

    endpoint, bucket, how = sys.argv[1:]
    given = parameters(endpoint, bucket)
    reader, writer = ObjectEngine("OBJ", given), ObjectEngine("OBJ", given)
    pool = host_pool(1, 32, 1, 256 * 1024)
    objects = Objects(mover_of(reader, writer, 32 << 20), pool, "leaves/")

    def read():
        objects.read(np.arange(32), seconds=60.0 if how == "thread" else 2.0)

    if how == "thread":
        threading.Thread(target=read, daemon=True).start()
        time.sleep(0.3)
    else:
        read()
        assert reader.late_transfers
    if how == "close":
        started = time.monotonic()
        assert not reader.drain(wait_s=0.1)
        reader.close()
        assert time.monotonic() - started < 20
    print("leaving", flush=True)
"""


@pytest.mark.parametrize("how", ["thread", "close"])
def test_a_process_leaves_with_transfers_in_flight(
    module_bucket: str, faulty: FaultProxy, how: str
) -> None:
    """Whoever leaves while a server trickles ends by itself, soon and without a crash: with a call
    of a daemon thread under way, and with late transfers after `close`."""
    pool = host_pool(1, 32, 1, 256 * KIB)
    with real(pool, faulty.endpoint, module_bucket, "leaves/") as objects:
        assert objects.write(np.arange(32)) == [GOOD] * 32
    faulty.set(slow(1024, 0.02, methods=("GET",)))
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LEAVES), faulty.endpoint, module_bucket, how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (child.returncode, "leaving" in child.stdout) == (0, True), child.stderr[-3000:]
