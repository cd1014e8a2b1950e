"""NIXL for real: what may be touched, how failures and late transfers are told, many threads."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fake_nixl import Fate, fake_engine
from hicache_nixl.errors import DeadlineExceededError, TransferError
from hicache_nixl.record import ALIGNMENT
from hicache_nixl.registrations import Descriptors, Registration
from hicache_nixl.transfer import QUEUE_PARAMETERS, Transfer, TransferEngine
from support import Bytes, address_of, aligned_array, open_file

BLOCKS = 32
FOREVER = float("inf")


def rows(*extents: tuple[int, int, int]) -> Descriptors:
    return np.array(extents, np.uint64).reshape(-1, 3)


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


@dataclass
class Bench:
    """One engine, BLOCKS blocks of registered memory and a registered file of as many."""

    engine: TransferEngine
    memory: Bytes
    descriptor: int
    registrations: tuple[Registration, Registration]

    @property
    def address(self) -> int:
        return address_of(self.memory)

    def block(self, number: int) -> Bytes:
        return self.memory[number * ALIGNMENT : (number + 1) * ALIGNMENT]

    def at(self, number: int) -> tuple[int, int, int]:
        return (self.address + number * ALIGNMENT, ALIGNMENT, 0)

    def on(self, number: int) -> tuple[int, int, int]:
        return (number * ALIGNMENT, ALIGNMENT, self.descriptor)

    def read(self, memory: Descriptors, file: Descriptors) -> None:
        self.engine.post("READ", memory, file).wait(soon())

    def still_works(self) -> None:
        """A block goes to the file and comes back."""
        self.block(0)[:] = np.random.default_rng(3).integers(0, 256, ALIGNMENT)
        self.engine.post("WRITE", rows(self.at(0)), rows(self.on(BLOCKS - 1))).wait(soon())
        self.read(rows(self.at(1)), rows(self.on(BLOCKS - 1)))
        assert np.array_equal(self.block(0), self.block(1))


@pytest.fixture(params=sorted(QUEUE_PARAMETERS))
def queue(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Opens files, which are closed in the end."""
    descriptors = []

    def open_(name: str = "file", nbytes: int = 0) -> int:
        descriptor = open_file(tmp_path / name)
        descriptors.append(descriptor)
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
        return descriptor

    yield open_
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def bench(queue: str, opened: Callable[..., int]) -> Iterator[Bench]:
    engine = TransferEngine("POSIX", QUEUE_PARAMETERS[queue])
    memory = aligned_array(BLOCKS * ALIGNMENT)
    descriptor = opened(nbytes=BLOCKS * ALIGNMENT)
    registrations = (
        engine.register_memory(address_of(memory), memory.size),
        engine.register_file(descriptor, BLOCKS * ALIGNMENT),
    )
    yield Bench(engine, memory, descriptor, registrations)
    for registration in registrations:
        engine.deregister(registration)
    engine.close()


# -- moving -------------------------------------------------------------------------------------


def test_bytes_go_to_the_file_and_come_back(bench: Bench) -> None:
    """Many extents in one transfer, in any order; the file has them where they were meant to be."""
    order = np.random.default_rng(1).permutation(BLOCKS // 2)
    bench.memory[:] = np.random.default_rng(2).integers(0, 256, bench.memory.size)
    written = bench.memory.copy()
    half = range(BLOCKS // 2)
    memory, file = rows(*map(bench.at, half)), rows(*map(bench.on, order.tolist()))
    transfer = bench.engine.post("WRITE", memory, file)
    transfer.wait(soon())
    assert transfer.done
    assert transfer.poll()
    bench.memory[:] = 0
    bench.read(rows(*(bench.at(i + BLOCKS // 2) for i in half)), file)
    assert np.array_equal(bench.memory[bench.memory.size // 2 :], written[: written.size // 2])


def test_more_extents_than_the_kernel_queue_holds(bench: Bench) -> None:
    """A transfer of thousands of extents ends without help from another one."""
    order = np.random.default_rng(1).integers(0, BLOCKS, 3000)
    bench.memory[:] = 1
    bench.engine.post("WRITE", rows(*map(bench.at, order)), rows(*map(bench.on, order))).wait(
        soon()
    )


def test_threads_share_an_engine(bench: Bench) -> None:
    """Eight threads write and read their own blocks on one engine; none sees another's bytes."""

    def work(number: int) -> None:
        chance = np.random.default_rng(number)
        mine = range(4 * number, 4 * number + 2)
        back = range(4 * number + 2, 4 * number + 4)
        for _ in range(60):
            for i in mine:
                bench.block(i)[:] = chance.integers(0, 256, ALIGNMENT)
            file = rows(*map(bench.on, mine))
            bench.engine.post("WRITE", rows(*map(bench.at, mine)), file).wait(soon())
            bench.read(rows(*map(bench.at, back)), file)
            for i, j in zip(mine, back, strict=True):
                assert np.array_equal(bench.block(i), bench.block(j))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


# -- registered memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shift", "nbytes"),
    [
        (-ALIGNMENT, ALIGNMENT),
        (-ALIGNMENT, 2 * ALIGNMENT),
        (BLOCKS * ALIGNMENT, ALIGNMENT),
        ((BLOCKS - 1) * ALIGNMENT, 2 * ALIGNMENT),
        (0, 2**64 - ALIGNMENT),
        (0, (BLOCKS + 1) * ALIGNMENT),
    ],
)
def test_memory_outside_of_a_registration_is_refused(bench: Bench, shift: int, nbytes: int) -> None:
    """No address that is not inside of a live registration is ever handed to NIXL."""
    with pytest.raises(TransferError, match="lies in no registration"):
        bench.engine.post(
            "READ",
            rows(bench.at(0), (bench.address + shift, nbytes, 0)),
            rows(bench.on(0), (0, nbytes, bench.descriptor)),
        )
    bench.still_works()


@pytest.mark.parametrize(
    "offset", [BLOCKS * ALIGNMENT, (BLOCKS * ALIGNMENT) - 512, 2**64 - ALIGNMENT, 2**63]
)
def test_an_extent_outside_of_a_file_is_refused(bench: Bench, offset: int) -> None:
    """Offsets at, across and far behind the registered end, and negative ones, are errors."""
    with pytest.raises(TransferError, match="is registered for"):
        bench.engine.post(
            "WRITE",
            rows(bench.at(0), bench.at(1)),
            rows(bench.on(0), (offset, ALIGNMENT, bench.descriptor)),
        )
    bench.still_works()


def test_a_file_that_is_not_registered_is_refused(bench: Bench, opened: Callable[..., int]) -> None:
    """An open file is not enough; it must be registered with this engine."""
    other = opened("other", nbytes=ALIGNMENT)
    with pytest.raises(TransferError, match=f"file descriptor {other} is registered for 0 bytes"):
        bench.engine.post("READ", rows(bench.at(0)), rows((0, ALIGNMENT, other)))


def test_extents_of_different_length_are_refused(bench: Bench) -> None:
    """NIXL would move the file side's length, into memory that was never checked."""
    with pytest.raises(TransferError, match="differ in number or length"):
        bench.engine.post("READ", rows(bench.at(0)), rows((0, 2 * ALIGNMENT, bench.descriptor)))
    with pytest.raises(TransferError, match="differ in number or length"):
        bench.engine.post("READ", rows(bench.at(0)), rows(bench.on(0), bench.on(1)))


def test_nothing_is_touched_after_deregistration(bench: Bench) -> None:
    """Memory and files are refused once deregistered; a second deregistration does nothing."""
    memory, file = bench.registrations
    bench.engine.deregister(memory)
    with pytest.raises(TransferError, match="lies in no registration"):
        bench.engine.post("READ", rows(bench.at(0)), rows(bench.on(0)))
    again = bench.engine.register_memory(bench.address, bench.memory.size)
    bench.engine.deregister(memory)
    bench.still_works()
    bench.engine.deregister(file)
    with pytest.raises(TransferError, match="is registered for 0 bytes"):
        bench.engine.post("READ", rows(bench.at(0)), rows(bench.on(0)))
    bench.engine.deregister(file)
    bench.engine.deregister(again)


def test_a_file_is_registered_once(bench: Bench) -> None:
    """NIXL confuses two registrations with one device id, so the second is refused."""
    with pytest.raises(TransferError, match="is registered already"):
        bench.engine.register_file(bench.descriptor, ALIGNMENT)
    bench.still_works()
    bench.engine.deregister(bench.registrations[1])
    again = bench.engine.register_file(bench.descriptor, BLOCKS * ALIGNMENT)
    bench.still_works()
    bench.engine.deregister(again)


def test_registrations_may_touch_but_not_overlap(bench: Bench) -> None:
    """An extent must lie in one registration, also where the next one begins at its end. NIXL finds
    neither of two that overlap, so the second is refused."""
    memory = aligned_array(6 * ALIGNMENT)
    address = address_of(memory)

    def register(first: int, blocks: int) -> Registration:
        return bench.engine.register_memory(address + first * ALIGNMENT, blocks * ALIGNMENT)

    def read(first: int, blocks: int) -> None:
        nbytes = blocks * ALIGNMENT
        bench.read(
            rows((address + first * ALIGNMENT, nbytes, 0)), rows((0, nbytes, bench.descriptor))
        )

    left, right = register(0, 2), register(2, 2)
    for first, blocks in ((0, 2), (1, 1), (2, 2), (3, 1)):
        read(first, blocks)
    for first, blocks in ((1, 2), (0, 4), (3, 2), (4, 1)):
        with pytest.raises(TransferError, match="lies in no registration"):
            read(first, blocks)
    for first, blocks in ((0, 2), (1, 1), (0, 6), (3, 3)):
        with pytest.raises(TransferError, match="overlaps memory that is registered already"):
            register(first, blocks)
    bench.engine.deregister(left)
    left = register(0, 1)
    read(0, 1)
    with pytest.raises(TransferError, match="lies in no registration"):
        read(1, 1)
    bench.engine.deregister(left)
    bench.engine.deregister(right)


# -- failures -----------------------------------------------------------------------------------


def test_a_short_read_is_an_error_and_the_engine_goes_on(
    bench: Bench, opened: Callable[..., int]
) -> None:
    """A file that is shorter than registered fails the transfer, each time it is asked."""
    short = opened("short", nbytes=ALIGNMENT)
    registration = bench.engine.register_file(short, 4 * ALIGNMENT)
    transfer = bench.engine.post(
        "READ", rows(bench.at(0), bench.at(1)), rows((0, ALIGNMENT, short), (4096, 4096, short))
    )
    for _ in range(2):
        with pytest.raises(TransferError, match="the transfer failed"):
            transfer.wait(soon())
    assert not transfer.done
    bench.still_works()
    bench.engine.deregister(registration)


def test_misaligned_direct_io_is_an_error_and_the_engine_goes_on(bench: Bench) -> None:
    """O_DIRECT refuses an odd offset; that is a TransferError like any other."""
    os.pwrite(bench.descriptor, bench.memory, 0)  # what was never written is not read from the disk
    with contextlib.suppress(OSError):
        os.pread(bench.descriptor, ALIGNMENT, 1)
        pytest.skip("this file system reads odd offsets with O_DIRECT, too")
    with pytest.raises(TransferError, match="the transfer failed"):
        bench.read(rows(bench.at(0)), rows((1, ALIGNMENT, bench.descriptor)))
    bench.still_works()


def test_a_full_device_is_an_error_and_the_engine_goes_on(bench: Bench, tmp_path: Path) -> None:
    """A write for which there is no space raises."""
    full = os.open("/dev/full", os.O_RDWR)
    registration = bench.engine.register_file(full, ALIGNMENT)
    with pytest.raises(TransferError):
        bench.engine.post("WRITE", rows(bench.at(0)), rows((0, ALIGNMENT, full))).wait(soon())
    bench.still_works()
    bench.engine.deregister(registration)
    os.close(full)


def test_a_read_only_file_is_an_error_and_the_engine_goes_on(bench: Bench, tmp_path: Path) -> None:
    """A file that is not open for writing cannot be written."""
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    registration = bench.engine.register_file(descriptor, ALIGNMENT)
    with pytest.raises(TransferError):
        bench.engine.post("WRITE", rows(bench.at(0)), rows((0, ALIGNMENT, descriptor))).wait(soon())
    bench.still_works()
    bench.engine.deregister(registration)
    os.close(descriptor)


@pytest.mark.parametrize("end", ["raise", "err"])
def test_both_ways_of_reporting_an_error_are_errors(end: str) -> None:
    """NIXL may raise or return "ERR"; at the check or already at the start."""
    memory = aligned_array(ALIGNMENT)
    for delay in (0.0, 0.01):
        with fake_engine({9: memory.copy()}, lambda delay=delay: Fate(end, delay)) as (engine, _):  # type: ignore[misc]
            engine.register_memory(address_of(memory), ALIGNMENT)
            engine.register_file(9, ALIGNMENT)
            with pytest.raises(TransferError, match="the transfer failed"):
                engine.post(
                    "READ", rows((address_of(memory), ALIGNMENT, 0)), rows((0, ALIGNMENT, 9))
                ).wait(soon())


def test_an_error_is_one_line() -> None:
    """What NIXL says of a refused transfer becomes one line."""
    memory = aligned_array(ALIGNMENT)
    with fake_engine({9: memory.copy()}, lambda: Fate("refuse")) as (engine, _):
        engine.register_memory(address_of(memory), ALIGNMENT)
        engine.register_file(9, ALIGNMENT)
        with pytest.raises(TransferError, match=r"BackendError NIXL_ERR_NOT_ALLOWED refused$"):
            engine.post("READ", rows((address_of(memory), ALIGNMENT, 0)), rows((0, ALIGNMENT, 9)))


def test_an_unknown_plugin_is_named() -> None:
    """A plug-in that NIXL does not have is a TransferError that names those it has."""
    with pytest.raises(TransferError, match=r"no plug-in 'NOSUCH'; it has \[.*'POSIX'"):
        TransferEngine("NOSUCH", {})


def test_more_extents_than_nixl_can_hold_are_refused() -> None:
    """NIXL would queue some and then fail, with the transfer gone: it never gets that far."""
    memory = aligned_array(ALIGNMENT)
    with fake_engine({9: memory.copy()}, lambda: Fate("hang")) as (engine, agent):
        engine.register_memory(address_of(memory), ALIGNMENT)
        engine.register_file(9, ALIGNMENT)
        at = np.repeat(rows((address_of(memory), 0, 0)), 40_000, axis=0)
        on = np.repeat(rows((0, 0, 9)), 40_000, axis=0)
        first = engine.post("READ", at, on)
        with pytest.raises(TransferError, match="40000 extents are in flight; 40000 more"):
            engine.post("READ", at, on)
        agent.let_go()
        first.wait(soon())
        engine.post("READ", at, on).wait(soon())


# -- late transfers -----------------------------------------------------------------------------


@dataclass
class Stall:
    """A read of a pipe, which ends when `feed` is called, and not before."""

    engine: TransferEngine
    memory: Bytes
    pipe: int

    def post(self, block: int = 0) -> Transfer:
        return self.engine.post(
            "READ",
            rows((address_of(self.memory) + block * ALIGNMENT, ALIGNMENT, 0)),
            rows((0, ALIGNMENT, self.pipe)),
        )

    def feed(self, byte: int) -> None:
        os.write(self.pipe, bytes([byte]) * ALIGNMENT)


@pytest.fixture
def stall(tmp_path: Path) -> Iterator[Stall]:
    """Only io_uring reads a pipe without blocking the one who asks."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    engine = TransferEngine("POSIX", QUEUE_PARAMETERS["uring"])
    memory = aligned_array(4 * ALIGNMENT)
    registrations = [
        engine.register_memory(address_of(memory), memory.size),
        engine.register_file(pipe, ALIGNMENT),
    ]
    yield Stall(engine, memory, pipe)
    assert engine.drain()
    for registration in registrations:
        engine.deregister(registration)
    engine.close()
    os.close(pipe)


def test_a_transfer_that_is_late_can_be_waited_for_again(stall: Stall) -> None:
    """A wait ends at its deadline with the transfer still in flight; a later wait sees it end."""
    transfer = stall.post()
    start = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="1 extents did not end by its deadline"):
        transfer.wait(start + 0.05)
    assert 0.05 <= time.monotonic() - start < 20
    assert not transfer.poll()
    stall.feed(7)
    transfer.wait(FOREVER)
    assert (stall.memory[:ALIGNMENT] == 7).all()


def test_an_abandoned_transfer_is_watched_until_it_ends(stall: Stall) -> None:
    """`on_end` is called once, when the transfer has ended and not before, without further calls
    of the engine; the thread that watches ends, too."""
    ended = threading.Event()
    calls = []
    stall.post().abandon(lambda: (calls.append(stall.memory[0].item()), ended.set()))
    time.sleep(0.05)
    assert (calls, stall.engine.late_transfers) == ([], 1)
    stall.feed(9)
    assert ended.wait(30)
    while stall.engine.late_transfers:
        time.sleep(0.001)
    time.sleep(0.02)
    assert calls == [9]
    assert stall.engine._watcher is None


def test_other_transfers_go_on_beside_a_late_one(stall: Stall, opened: Callable[..., int]) -> None:
    """A transfer that hangs holds up nobody else on its engine."""
    ended = threading.Event()
    stall.post().abandon(ended.set)
    descriptor = opened(nbytes=ALIGNMENT)
    registration = stall.engine.register_file(descriptor, ALIGNMENT)
    for operation in ("WRITE", "READ"):
        stall.engine.post(
            operation,
            rows((address_of(stall.memory) + ALIGNMENT, ALIGNMENT, 0)),
            rows((0, ALIGNMENT, descriptor)),
        ).wait(soon())
    stall.engine.deregister(registration)
    assert not ended.is_set()
    stall.feed(1)
    assert ended.wait(30)


def test_what_waits_for_a_late_transfer_cannot_disturb_the_others(
    stall: Stall, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in one `on_end` is logged; the next one is called all the same."""
    ended = threading.Event()
    first, second = stall.post(0), stall.post(1)
    first.abandon(lambda: 1 // 0)
    second.abandon(ended.set)
    stall.feed(1)
    stall.feed(2)
    assert ended.wait(30)
    assert stall.engine.drain()
    assert "what waited for the end of a late transfer failed" in caplog.text


def test_a_failed_transfer_touches_nothing_after_its_error(
    stall: Stall, opened: Callable[..., int]
) -> None:
    """When the error of one extent is reported, the others are no longer in flight: bytes that
    would complete them later change nothing."""
    short = opened("short", nbytes=0)
    registration = stall.engine.register_file(short, ALIGNMENT)
    address = address_of(stall.memory)
    transfer = stall.engine.post(
        "READ",
        rows((address, ALIGNMENT, 0), (address + ALIGNMENT, ALIGNMENT, 0)),
        rows((0, ALIGNMENT, stall.pipe), (0, ALIGNMENT, short)),
    )
    with pytest.raises(TransferError, match="the transfer failed"):
        transfer.wait(soon())
    stall.feed(3)
    time.sleep(0.05)
    assert not stall.memory.any()
    stall.post(2).wait(soon())  # takes what was fed
    assert (stall.memory[2 * ALIGNMENT : 3 * ALIGNMENT] == 3).all()
    stall.engine.deregister(registration)


# -- the end ------------------------------------------------------------------------------------


def test_a_drained_engine_takes_no_more_transfers(bench: Bench) -> None:
    """After `drain` and after `close` a post is a TransferError; both may be called again."""
    assert bench.engine.drain(wait_s=0)
    with pytest.raises(TransferError, match="the transfer engine is closed"):
        bench.engine.post("READ", rows(bench.at(0)), rows(bench.on(0)))
    for registration in bench.registrations:
        bench.engine.deregister(registration)
    bench.engine.close()
    bench.engine.close()
    bench.engine.deregister(bench.registrations[0])
    assert bench.engine.drain()
    with pytest.raises(TransferError, match="the transfer engine is closed"):
        bench.engine.post("READ", rows(bench.at(0)), rows(bench.on(0)))


@pytest.mark.parametrize("late", [False, True])
def test_closing_releases_nothing_that_is_in_flight(stall: Stall, late: bool) -> None:
    """With a transfer in flight, abandoned or not, `drain` says so after its time and `close` keeps
    the agent, so that the transfer can still end."""
    transfer = stall.post()
    ended = threading.Event()
    if late:
        transfer.abandon(ended.set)
    start = time.monotonic()
    assert not stall.engine.drain(wait_s=0.05)
    assert 0.05 <= time.monotonic() - start < 20
    stall.engine.close()
    stall.feed(4)
    if late:
        assert ended.wait(30)
    else:
        transfer.wait(soon())
    assert (stall.memory[:ALIGNMENT] == 4).all()
    assert stall.engine.drain(wait_s=30)


def test_a_transfer_that_ends_does_not_count_for_another(stall: Stall) -> None:
    """An engine is idle when the last of its transfers has ended."""
    first, second = stall.post(0), stall.post(1)
    stall.feed(4)
    while not (first.poll() or second.poll()):
        time.sleep(0.001)
    assert not stall.engine.drain(wait_s=0)
    stall.feed(4)
    first.wait(soon())
    second.wait(soon())
    assert stall.engine.drain(wait_s=0)
