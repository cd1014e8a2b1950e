"""Stores in directories inside containers: O_DIRECT and io_uring where they are and where they are
refused, full file systems, and what a kill leaves."""

import errno
import json
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from disk_child import PAGES, ROOM
from loop_disk import LoopDisk
from observed import Extents

from .harness import STORE, TESTS, ProjectContainer
from .runs import Run

pytestmark = pytest.mark.docker

USER = 10001
HOME = str(Path(STORE).parent)
TMPFS = f"size=128m,uid={USER},mode=0700"
KINDS = ("slab", "files")
STORES = [f"{kind}://{HOME}/{kind}" for kind in KINDS]
IO_URING = ["io_uring_setup", "io_uring_enter", "io_uring_register"]


class DiskContainer(ProjectContainer):
    """A function of a module of these tests in the connector image; it ends with it."""

    def __init__(self, run: Run, image: str, *child: object, **options: Any) -> None:
        module, function, *arguments = child
        super().__init__(run, image, entrypoint="python", **options)
        self.with_command(["-m", str(module), str(function), json.dumps(arguments)])
        self.with_envs(PYTHONPATH="/tests", PYTHONUNBUFFERED="1", NIXL_LOG_LEVEL="ERROR")
        self.with_volume_mapping(TESTS, "/tests", "ro")

    def said(self, timeout: float = 120.0) -> list[Any]:
        """What it has printed, once it has ended, which must be well."""
        self.must_end(timeout)
        return [json.loads(line) for line in self.lines()]


StartDisk = Callable[..., DiskContainer]


@pytest.fixture
def start_disk(run: Run, connector_image: str, held: ExitStack) -> StartDisk:
    """Start `start_disk(module, function, …, volume=…, tmpfs=…, **options of docker run)`; they end
    with the test."""

    def start(*child: object, volume: str = "", tmpfs: str = "", **options: Any) -> DiskContainer:
        disk = DiskContainer(run, connector_image, *child, **options)
        if tmpfs:
            disk.with_tmpfs_mount(HOME, tmpfs)
        return held.enter_context(disk.beside(volume=volume))

    return start


def seccomp(*rules: dict[str, Any]) -> list[str]:
    """Security options under which all is allowed but what `rules` refuse."""
    profile = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"action": "SCMP_ACT_ERRNO", **rule} for rule in rules],
    }
    return [f"seccomp={json.dumps(profile)}"]


def refused_direct_io() -> list[str]:
    """O_DIRECT as tmpfs refused it before Linux 6.6."""
    flag = {"value": os.O_DIRECT, "valueTwo": os.O_DIRECT, "op": "SCMP_CMP_MASKED_EQ"}
    return seccomp(
        {"names": ["openat"], "errnoRet": errno.EINVAL, "args": [{"index": 2, **flag}]},
        {"names": ["open"], "errnoRet": errno.EINVAL, "args": [{"index": 1, **flag}]},
    )


def check_round_trip(seen: dict[str, Any], *, direct: bool) -> None:
    """Every page came back, by transfers that were all of one kind."""
    extents = Extents(**seen["extents"])
    assert (seen["stored"], seen["read"], extents.unregistered) == (PAGES, PAGES, 0)
    assert extents.in_pool > 0
    moved = extents.in_pool + extents.in_staging
    assert (extents.direct, extents.buffered) == ((moved, 0) if direct else (0, moved))


@pytest.mark.parametrize("place", ["overlay", "volume", "tmpfs"])
def test_o_direct(start_disk: StartDisk, request: pytest.FixtureRequest, place: str) -> None:
    """In the container's own layer, on a named volume and on tmpfs every transfer is with O_DIRECT
    if the kernel has it there, else none is, with one warning."""
    where = {"tmpfs": TMPFS} if place == "tmpfs" else {}
    if place == "volume":
        where = {"volume": request.getfixturevalue("volume")}
    allowed, *trips = start_disk("disk_child", "round_trips", STORES, {}, **where).said()
    assert allowed["O_DIRECT"] or place == "tmpfs"
    assert len(trips) == len(STORES)
    for seen in trips:
        check_round_trip(seen, direct=allowed["O_DIRECT"])
        assert len(seen["warnings"]) == (0 if allowed["O_DIRECT"] else 1)


def test_o_direct_refused(start_disk: StartDisk) -> None:
    """Where the file system refuses O_DIRECT, pages move with buffered I/O after one warning."""
    container = start_disk(
        "disk_child", "round_trips", STORES, {}, security_opt=refused_direct_io(), tmpfs=TMPFS
    )
    allowed, *trips = container.said()
    assert not allowed["O_DIRECT"]
    for seen, kind in zip(trips, KINDS, strict=True):
        check_round_trip(seen, direct=False)
        (warning,) = seen["warnings"]
        assert warning.startswith(
            f"O_DIRECT is refused in {HOME}/{kind} (Invalid argument); using buffered I/O."
        )


@pytest.mark.parametrize("place", ["overlay", "tmpfs", "refused"])
def test_probe_says_what_o_direct_is(
    run: Run, connector_image: str, held: ExitStack, start_disk: StartDisk, place: str
) -> None:
    """`hicache-nixl probe --json` names the file system and says on or off as it is there, with
    what would be better."""
    options = {"security_opt": refused_direct_io()} if place == "refused" else {}
    tmpfs = "" if place == "overlay" else TMPFS
    (allowed,) = start_disk("disk_child", "allowed", HOME, tmpfs=tmpfs, **options).said()
    probe = ProjectContainer(run, connector_image, **options)
    if tmpfs:
        probe.with_tmpfs_mount(HOME, tmpfs)
    store = f"slab://{STORE}"
    probe.with_command(["probe", "--json", "--store", store, "--set", "capacity=16MiB"])
    probe = held.enter_context(probe)
    probe.must_end(timeout=60)
    printed = "\n".join(probe.lines())
    rows = {row["topic"]: (row["found"], row["better"]) for row in json.loads(printed)}
    assert rows["store"][0].startswith(
        f"slab in {STORE} ({'overlay' if place == 'overlay' else 'tmpfs'} on "
    )
    if allowed["O_DIRECT"]:
        assert place != "refused"
        assert rows["O_DIRECT"] == ("on", None)
    else:
        assert place != "overlay"
        assert rows["O_DIRECT"][0] == "off"
        assert rows["O_DIRECT"][1].startswith("O_DIRECT is refused in ")


@pytest.mark.parametrize(
    "number", [0, errno.EPERM, errno.ENOSYS], ids=["allowed", "EPERM", "ENOSYS"]
)
def test_io_uring(start_disk: StartDisk, number: int) -> None:
    """io_uring is used where the profile and the kernel allow it; where not, AIO after one warning,
    also if io_uring was asked for."""
    rules = [{"names": IO_URING, "errnoRet": number}] if number else []
    container = start_disk(
        "disk_child", "round_trips", STORES, {"queue": "uring"}, security_opt=seccomp(*rules)
    )
    allowed, *trips = container.said()
    assert not (number and allowed["io_uring"])
    assert len(trips) == len(STORES)
    for seen in trips:
        check_round_trip(seen, direct=True)
        if allowed["io_uring"]:
            assert seen["rings"] > 0
            assert seen["warnings"] == []
        else:
            assert seen["rings"] == 0
            (warning,) = seen["warnings"]
            assert warning.startswith("io_uring does not work here (")
            assert warning.endswith("; using AIO")


@pytest.mark.parametrize("place", ["tmpfs", "ext4"])
@pytest.mark.parametrize("kind", KINDS)
def test_full_file_system(
    start_disk: StartDisk, tmp_path: Path, held: ExitStack, kind: str, place: str
) -> None:
    """Of 128 pages where 40 fit some are stored and right and the rest is False; with room again
    all can be stored and read, and nothing else is left."""
    if place == "tmpfs":
        where = {"tmpfs": TMPFS}
    else:
        disk = held.enter_context(LoopDisk(tmp_path, mib=128))
        os.chown(disk.place, USER, USER)
        where = {"volume": str(disk.place)}
    (stored,) = start_disk("disk_child", "fill_up", kind, f"{HOME}/{kind}", **where).said()
    assert ROOM // 2 <= stored <= ROOM


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_in_the_middle_of_a_write(start_disk: StartDisk, volume: str, seed: int) -> None:
    """SIGKILL to containers that write to a files store: another one finds every page that was
    told, byte for byte, and what was not finished is removed."""
    chooser = random.Random(seed)
    options = {"payload": 64 << 10, "capacity": 2000 * 68 << 10}
    told: list[Any] = []
    for _ in range(2):
        number = chooser.randrange(1 << 30)
        writer = start_disk("files_children", "put_for_ever", STORE, number, options, volume=volume)
        writer.wait_lines(chooser.randrange(1, 25), timeout=60)
        writer.kill()
        told += [json.loads(line) for line in writer.lines()]
    start_disk("disk_child", "check_after_crash", STORE, told, options, volume=volume).said()
