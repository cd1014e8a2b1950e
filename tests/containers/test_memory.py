"""Host memory of SGLang's pools in containers: on which pages it is, what transfers touch of it,
and what a shortage ends in."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import hugepages
from hugepages import MIB
from memory_spec import HEAD_DIM, SHAPE, SHAPE_2MIB, Case, Seen, Trip
from observed import Extents
from s3_access import ADMIN

from .harness import STORE, TESTS, ChildContainer
from .runs import Run
from .s3_servers import S3Place, store_url

pytestmark = pytest.mark.docker

PAGES = 64
"""Of a pool in these tests; with SHAPE at most 16 MiB."""
TIMEOUT = 120.0
HUGE = {"SGLANG_HUGEPAGE_SIZE": "2MB"}
OURS = {"HICACHE_NIXL_HOST_POOL_ALLOCATOR": "1"}
REQUIRED = {"HICACHE_NIXL_HUGEPAGES": "required"}
SHORT_MIB = 64
SHORT_PAGES = SHORT_MIB * MIB // hugepages.SIZE
"""Hugepages, and pages of a pool with SHAPE_2MIB, that are more than there are."""


class MemoryContainer(ChildContainer):
    """Cases of host memory (memory_child.py) in the image that has SGLang."""

    def __init__(self, run: Run, image: str, cases: list[Case], **options: Any) -> None:
        given = json.dumps([asdict(case) for case in cases])
        super().__init__(run, image, "python", "-m", "memory_child", given, **options)

    def next(self) -> Seen:
        """Have the next case carried out; blocks until it is."""
        done = len(self.wait_lines(1, TIMEOUT))
        self.get_wrapped_container().kill("USR1")
        fields = json.loads(self.wait_lines(done + 1, TIMEOUT)[done])
        return Seen(**fields | {"trips": [Trip(**trip) for trip in fields["trips"]]})

    @property
    def pids(self) -> list[int]:
        """Its processes, as this machine numbers them."""
        listed = self.get_wrapped_container().top(ps_args="-eo pid")
        return [int(row[0]) for row in listed["Processes"]]


StartMemory = Callable[..., MemoryContainer]


@pytest.fixture
def start_memory(run: Run, engine_image: str, volume: str, held: ExitStack) -> StartMemory:
    """Start cases on a new volume; they wait to be asked for, and end with the test."""

    def start(*cases: Case, network: str = "", **options: Any) -> MemoryContainer:
        memory = MemoryContainer(run, engine_image, list(cases), **options)
        memory.beside(volume=volume, network=network, identity=ADMIN if network else None)
        held.enter_context(memory)
        memory.wait_lines(1, TIMEOUT)
        return memory

    return start


def case(
    kind: str,
    environment: dict[str, str],
    *stores: Any,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> Case:
    """A pool whose pages are aligned or not."""
    shape = SHAPE | {"head_dim": HEAD_DIM[kind]}
    given = [(store, settings or {}) for store in stores]
    return Case(PAGES, shape, environment, given, **changes)


def check_trip(trip: Trip, *, in_place: bool, direct: bool | None) -> None:
    """Every page came back through registered memory only; `direct` is None for a bucket."""
    assert (trip.stored, trip.read) == (PAGES, PAGES)
    extents = Extents(**trip.extents)
    # In place, only trailers are in staging: one for the two halves of a page.
    expected = 4 * PAGES if in_place else 0
    assert (extents.in_pool, extents.in_staging) == (expected, 2 * PAGES)
    assert extents.unregistered == 0
    files = {None: (0, 0), True: (expected + 2 * PAGES, 0), False: (0, expected + 2 * PAGES)}
    assert (extents.direct, extents.buffered) == files[direct]


@contextmanager
def hugepages_for(environment: dict[str, str]) -> Iterator[None]:
    """Enough for a pool and its staging memory, if hugepages are asked for."""
    if "SGLANG_HUGEPAGE_SIZE" not in environment:
        yield
        return
    with hugepages.raised(16):
        yield


@pytest.mark.parametrize(
    ("environment", "page_kb"),
    [(OURS, 4), (HUGE, 2048), (OURS | HUGE, 2048)],
    ids=["ordinary", "hugepages of SGLang", "hugepages of the plug-in"],
)
def test_round_trip(
    start_memory: StartMemory,
    s3: S3Place,
    bucket: str,
    environment: dict[str, str],
    page_kb: int,
) -> None:
    """Pages come back byte for byte, in place where they are aligned and through staging else, and
    every address that NIXL is told lies in a live registration."""
    memory = start_memory(
        case("aligned", environment, f"slab://{STORE}", store_url(bucket, "-".join(environment))),
        case("unaligned", environment, f"slab://{STORE}-2"),
        network=s3.network,
    )
    with hugepages_for(environment):
        aligned, unaligned = memory.next(), memory.next()
    for seen in (aligned, unaligned):
        assert (seen.error, seen.signal, seen.warnings) == ("", "", [])
        assert seen.page_kb == page_kb
        assert seen.hugetlb_kb == (-(-seen.pool_kb // 2048) * 2048 if page_kb == 2048 else 0)
    on_disk, in_bucket = aligned.trips
    check_trip(on_disk, in_place=True, direct=True)
    check_trip(in_bucket, in_place=False, direct=None)
    check_trip(unaligned.trips[0], in_place=False, direct=True)


def short_case(environment: dict[str, str], pages: int) -> Case:
    """A pool of so many hugepages."""
    return Case(pages, SHAPE_2MIB, HUGE | environment, [(f"slab://{STORE}", {"capacity": "1GiB"})])


def check_fallback(seen: Seen, pages: int) -> str:
    """Ordinary pages hold the pool and serve it; the one warning."""
    assert (seen.signal, seen.error) == ("", "")
    assert (seen.page_kb, seen.hugetlb_kb, seen.pool_kb) == (4, 0, pages * 2048)
    (trip,) = seen.trips
    assert (trip.stored, trip.read, trip.extents["unregistered"]) == (pages, pages, 0)
    (warning,) = seen.warnings
    assert warning.startswith(f"cannot map {pages * 2}.0MiB on {pages} hugepages of 2.0MiB: ")
    assert warning.endswith("; using ordinary pages")
    return warning.removesuffix("; using ordinary pages")


@dataclass(frozen=True)
class Shortage:
    """What is free, and what is asked for."""

    available: int
    pages: int


@contextmanager
def shortage(available: int) -> Iterator[Shortage]:
    """`available` hugepages free; if the machine has more, then as many more are asked for."""
    with hugepages.raised(available):
        free = hugepages.free()
        yield Shortage(free, free - available + SHORT_PAGES)


def test_too_few_free_hugepages(start_memory: StartMemory) -> None:
    """With 0 or 10 of 32 hugepages free SGLang gets ordinary pages and one warning, or under
    `required` one error that says what to run."""
    expected = {}
    for available in (0, 10):
        with shortage(available) as asked:
            expected[available] = asked
    memory = start_memory(
        *(
            short_case(environment, short.pages)
            for short in expected.values()
            for environment in (OURS, OURS | REQUIRED)
        )
    )
    for available, asked in expected.items():
        with shortage(available) as short:
            prefer, required = memory.next(), memory.next()
            # A process that has ended may give pages back meanwhile.
            free = range(short.available, hugepages.free() + 1)
            total = hugepages.count("nr_hugepages") + asked.pages
        warning = check_fallback(prefer, asked.pages)
        assert (required.signal, required.warnings) == ("", [])
        end = re.compile(r"(\d+) pages are free; run `sysctl -w vm\.nr_hugepages=(\d+)`$")
        for text in (warning, required.error):
            told = end.search(text)
            assert told, text
            assert int(told[1]) in free
            assert int(told[2]) == total - int(told[1])
        assert end.sub("", required.error) == f"HostMemoryError: {end.sub('', warning)}"


def test_hugetlb_limit_below_need(start_memory: StartMemory, tmp_path: Path) -> None:
    """Where the container may have 16 MiB of hugepages, a pool of 64 MiB is on ordinary pages with
    one warning, or under `required` one error; SGLang's own memory ends in SIGBUS there."""
    memory = start_memory(
        *(short_case(environment, SHORT_PAGES) for environment in ({}, OURS, OURS | REQUIRED))
    )
    with (
        hugepages.raised(SHORT_PAGES + 8),
        hugepages.limited(memory.pids, 16 * MIB, tmp_path / "cgroup"),
    ):
        without, prefer, required = memory.next(), memory.next(), memory.next()
    assert without.signal == "SIGBUS"
    warning = check_fallback(prefer, SHORT_PAGES)
    # A limit that the container cannot read is met when the pages are populated.
    assert "the cgroup allows 16.0MiB" in warning or "the kernel refused" in warning
    assert "raise the container's hugepages-2Mi limit" in warning
    assert required.error == f"HostMemoryError: {warning}"
    assert (required.signal, required.warnings) == ("", [])


@pytest.mark.parametrize("user", ["10001", "0"])
def test_memlock(start_memory: StartMemory, user: str) -> None:
    """Registered transfers need no locked memory, so they work below any memlock limit; pinning
    says in one line that it needs a GPU. The capability to lock more is of use to root only."""
    # The kernel charges the rings of io_uring to that limit, those of all processes of the user.
    settings = {"queue": "aio"}
    memory = start_memory(
        case("aligned", OURS, f"slab://{STORE}", settings=settings, pins=True),
        user=user,
        cap_add=["IPC_LOCK"],
        ulimits=[{"Name": "memlock", "Soft": 1 << 16, "Hard": 1 << 16}],
    )
    seen = memory.next()
    assert seen.locked == ("" if user == "0" else "Cannot allocate memory")
    assert seen.warnings == []
    check_trip(seen.trips[0], in_place=True, direct=True)
    assert seen.pinned == (
        "cannot pin host memory: torch sees no CUDA device; run on a GPU or do not pin"
    )


KILLED = """
import sys, time
import hugepages
from containers.runs import Run

if sys.argv[1] == "watched":
    Run.current().begin()
with hugepages.LOCK, hugepages.raised(hugepages.free() + 3):
    print("raised", flush=True)
    time.sleep(600)
"""


def test_lock_of_hugepages_is_for_every_user(tmp_path: Path) -> None:
    """The lock file that root makes with a usual umask can be opened by others."""
    take = "import os, hugepage_notes; os.umask(0o022); hugepage_notes.LOCK.acquire()"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", take], cwd=TESTS, env=environment, check=True)
    (lock,) = tmp_path.iterdir()
    assert lock.stat().st_mode & 0o666 == 0o666


def persistent() -> int:
    """Hugepages that this machine keeps; nobody else uses them meanwhile."""
    with hugepages.LOCK:
        return hugepages.count("nr_hugepages") - hugepages.count("surplus_hugepages")


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("who", ["the next user", "watched"])
def test_hugepages_of_a_killed_run(who: str) -> None:
    """What a process had raised when it got SIGKILL is given back by the next one that uses
    hugepages, or by the watcher of its run."""
    with hugepages.LOCK, hugepages.raised(hugepages.free() + 3):
        pass  # skips where the child would
    before = persistent()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("PYTEST_XDIST_WORKER", None)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, who],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        env=environment,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "raised\n"
        child.send_signal(signal.SIGKILL)
    if who == "the next user":
        with hugepages.raised(0):
            pass
    deadline = time.monotonic() + 60
    while persistent() != before:
        assert time.monotonic() < deadline, f"{persistent()} hugepages, there were {before}"
        time.sleep(0.2)
