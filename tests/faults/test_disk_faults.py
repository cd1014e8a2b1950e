"""Everything that can go wrong between the connector and a disk, with threads that set and get.

Each case ends with: no wrong byte, no exception into the caller, no call longer than its deadline,
storage works again without a restart, and descriptors, threads and staging are back where they
were. `storage_load.Load` checks the first three all the time.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import storage_load
from connectors import config
from held_up import held_up_since
from hicache_nixl.connector import HiCacheNixlConnector
from hicache_nixl.stores.files import THREADS as CREW
from loop_disk import LoopDisk
from storage_load import BATCH, Held, Load

DEADLINE_S = 1.0
FAULT_S = 2.0
RECOVERY_S = 30.0
SLAB_RESERVE = 32 << 20
"""What a slab store leaves free for its index."""
SEGMENTS = 9
"""Of a slab store of 8 MiB: 28 records of 36 KiB each, and what is left over."""

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Disk = Callable[..., LoopDisk]


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Disk]:
    with contextlib.ExitStack() as cleanup:
        yield lambda **how: cleanup.enter_context(LoopDisk(tmp_path, **how))


@contextlib.contextmanager
def connected(
    kind: str, directory: Path, *, deadline_s: float = DEADLINE_S, **changes: Any
) -> Iterator[Load]:
    """A load on a connector with a store in `directory`."""
    pool = storage_load.make_pool()
    settings = {"capacity": "8MiB", "segment": "1MiB"} if kind == "slab" else {"capacity": "24MiB"}
    connector = HiCacheNixlConnector(
        config(
            directory,
            store=f"{kind}://{directory}",
            deadline=f"{deadline_s}s",
            **settings | changes,
        )
    )
    try:
        connector.register_mem_pool_host(pool)
        yield Load(connector, pool, deadline_s=deadline_s)
    finally:
        connector.close()


@contextlib.contextmanager
def nothing_left(load: Load) -> Iterator[None]:
    """Descriptors, threads and staging after the block, when storage works again, are as before.

    Threads but for the crew of the files store: it keeps those that it once needed."""
    for group in range(500, 540):
        load.wait_until("stored", lambda it=group: all(load.set(it)), RECOVERY_S)
    load.wait_until("as large as it gets", lambda: load.wait_works() and is_grown(), RECOVERY_S)
    load.run(0.5)
    before = Held.now()
    yield
    load.wait_works(RECOVERY_S)
    load.run(0.5)
    guard, staging = load.connector._tier.guard, load.connector._tier.staging
    end = time.monotonic() + 30
    while True:
        now, state = Held.now(), guard.state()
        more = held_more(before, now)
        threads = now.threads.total() - before.threads.total()
        left = (more, state.stuck_threads, staging.in_use_bytes, max(0, threads - CREW))
        if left == (Counter(), 0, 0, 0) and state.read.state == state.write.state == "closed":
            break
        assert time.monotonic() < end, f"{left}, {now.threads - before.threads}, {state}"
        time.sleep(0.1)


def is_grown() -> bool:
    """Whether the store of a slab has all its segments, which it may put off for seconds."""
    segments = [name for name in Held.now().files if "/segment-" in name]
    return len(segments) in (0, SEGMENTS)


def held_more(before: Held, now: Held) -> Counter[str]:
    """Files of which more are open. A store that was opened again is another writer, and there is
    a connection to the index for each thread that asked at the same time as others."""

    def named(files: Counter[str]) -> Counter[str]:
        found: Counter[str] = Counter()
        for name, count in files.items():
            if "index.sqlite" not in name:
                found["writer" if "/writers/" in name else name] += count
        return found

    return named(now.files) - named(before.files)


def fill(load: Load) -> None:
    """Every group is stored."""
    for group in range(load.groups):
        load.wait_until("stored", lambda it=group: all(load.set(it)), RECOVERY_S)


def assert_misses_at_once(load: Load) -> None:
    """Both circuits open: a call is over in a moment."""
    guard = load.connector._tier.guard
    end = time.monotonic() + 30
    while "closed" in (guard.state().read.state, guard.state().write.state):
        assert time.monotonic() < end, guard.state()
        load.set(2000)
        load.get(0)
    began = time.monotonic()
    for _ in range(10):
        load.exists(0)
    took_s = time.monotonic() - began
    assert took_s - held_up_since(began) < 10 * DEADLINE_S / 4


STORES = pytest.mark.parametrize("kind", ["slab", "files"])


@STORES
def test_disk_that_fails(make_disk: Disk, kind: str) -> None:
    """EIO for every block: misses until the device is back."""
    disk = make_disk(journal=False)
    with connected(kind, disk.place / "store") as load, nothing_left(load):
        fill(load)
        with load.running(), disk.failing():
            time.sleep(FAULT_S)
        load.check()


@STORES
def test_disk_that_stalls(make_disk: Disk, kind: str) -> None:
    """Reads and writes that do not end: calls end by their deadline, then at once."""
    disk = make_disk()
    with connected(kind, disk.place / "store") as load, nothing_left(load):
        fill(load)
        with load.running(), disk.stalled():
            time.sleep(FAULT_S)
            assert_misses_at_once(load)
        load.check()


@STORES
def test_file_system_that_freezes(make_disk: Disk, kind: str) -> None:
    """Writes that hang in the kernel: sets end by their deadline, then at once."""
    disk = make_disk()
    with connected(kind, disk.place / "store") as load, nothing_left(load):
        fill(load)
        with load.running(), disk.frozen():
            time.sleep(FAULT_S)
        load.check()


@STORES
def test_file_system_that_goes_read_only(make_disk: Disk, kind: str) -> None:
    """After an error of the file system nothing is stored; it is let go of when it is unmounted,
    so that it can be checked, and used again when it is back."""
    disk = make_disk()
    with connected(kind, disk.place / "store") as load, nothing_left(load):
        fill(load)
        with load.running():
            disk.break_down()
            time.sleep(FAULT_S)
            assert not any(load.set(3000))
            disk.repair()
        load.check()


@STORES
def test_directory_that_is_moved_away(make_disk: Disk, kind: str) -> None:
    """Nothing is put into files without a name; when the directory is back, so are its pages."""
    disk = make_disk()
    store = disk.place / "store"
    with connected(kind, store) as load, nothing_left(load):
        fill(load)
        with load.running():
            store.rename(disk.place / "away")
            time.sleep(FAULT_S)
            assert not any(load.set(3000))
            assert load.exists(0) == 0
            (disk.place / "away").rename(store)
        load.check()


@STORES
def test_disk_that_is_full(make_disk: Disk, kind: str) -> None:
    """Others take the last block: what is stored is read all the time, and sets go on or miss."""
    disk = make_disk()
    # What is full does not stall, and only a stall may cost a read.
    with connected(kind, disk.place / "store", deadline_s=10.0) as load, nothing_left(load):
        fill(load)
        with load.running(), disk.full():
            for _ in range(20):
                assert load.exists(0) == BATCH
                assert all(load.get(0))
                load.set(3000)
        load.check()
        assert load.connector._tier.guard.state().read.opened == 0


@STORES
def test_disk_with_room_for_some(make_disk: Disk, kind: str) -> None:
    """With room for 40 pages, of 96 some are stored and right, the rest is a miss; all can be
    stored when there is room again."""
    disk = make_disk()
    groups = range(12)
    room = (SLAB_RESERVE if kind == "slab" else 0) + 40 * 36 * 1024
    how = {"capacity": "1GiB", "segment": "1MiB"} if kind == "slab" else {"capacity": "1GiB"}
    with connected(kind, disk.place / "store", deadline_s=10.0, **how) as load:
        with disk.full(leave=room):
            for group in groups:
                load.set(group)
            found = [load.exists(group) for group in groups]
            assert BATCH < sum(found) < len(groups) * BATCH
            for group, run in zip(groups, found, strict=True):
                assert load.get(group)[:run] == [True] * run
        load.wait_works(RECOVERY_S)
        for group in groups:  # a slab store tries only now and then to grow
            load.wait_until("stored", lambda it=group: all(load.set(it)), RECOVERY_S)
            assert all(load.get(group))
        load.check()


@STORES
def test_permission_that_is_lost(make_disk: Disk, kind: str) -> None:
    """Directories that may not be entered any more: misses or, through what is open, hits; and all
    is as before when they may."""
    disk = make_disk()
    drop = "--bounding-set=-dac_override,-dac_read_search"  # else modes do not hold for root
    child = Path(__file__).with_name("permission_child.py")
    done = subprocess.run(
        ["setpriv", drop, sys.executable, child, kind, disk.place / "store"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
