"""Claims about mapped memory: alignment, population, release, and shortage of hugepages."""

import ctypes
import errno
import gc
import json
import logging
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hugepages
from hicache_nixl import memory, memory_limits
from hicache_nixl.errors import HostMemoryError
from hicache_nixl.memory import HostBuffer, allocate, hugepage_report
from hugepages import MIB, V2_MOUNT, write, write_pool

PAGE = mmap.PAGESIZE
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _fresh_warnings() -> Iterator[None]:
    memory._warned.clear()
    yield
    memory._warned.clear()


def mapping(address: int) -> dict[str, int]:
    """The smaps fields, in kB, of the mapping that starts at `address`; empty if there is none."""
    fields: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            # Another thread may have reused the address for memory of another kind.
            inside = line.startswith(f"{address:x}-") and ("zero" in line or "hugepage" in line)
        elif inside and line.endswith(" kB"):
            name, value = line.split(":")
            fields[name] = int(value.removesuffix(" kB"))
    return fields


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name == "hicache_nixl.memory"
    ]


def random_bytes(seed: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * MIB + 5])
def test_a_buffer_is_aligned_zeroed_and_writable(nbytes: int) -> None:
    """Every byte asked for is there, on whole pages, zero at first, and keeps what is written."""
    buffer = allocate(nbytes)
    view = buffer.view()
    assert buffer.address % 4096 == 0
    assert buffer.address == view.ctypes.data
    assert (buffer.nbytes, buffer.page_size) == (nbytes, PAGE)
    assert buffer.mapped_bytes == -(-nbytes // PAGE) * PAGE
    assert view.shape == (nbytes,)
    assert not view.any()
    expected = random_bytes(nbytes, nbytes)
    view[:] = expected
    assert ctypes.string_at(buffer.address, nbytes) == expected.tobytes()


def test_a_buffer_is_populated() -> None:
    """All pages are resident before the first touch."""
    buffer = allocate(8 * MIB)
    assert mapping(buffer.address)["Rss"] == 8 * MIB // 1024


def test_large_mappings_are_populated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that several threads populate cover the mapping, the odd end included."""
    monkeypatch.setattr(memory, "_POPULATE_CHUNK", MIB)
    buffer = allocate(9 * MIB + 5)
    assert mapping(buffer.address)["Rss"] * 1024 == buffer.mapped_bytes


def test_collection_unmaps() -> None:
    """A buffer without references gives its memory back."""
    buffer = allocate(MIB)
    address = buffer.address
    assert mapping(address)
    del buffer
    gc.collect()
    assert not mapping(address)


def test_release_unmaps_and_is_idempotent() -> None:
    """release() gives the memory back at once, a second call does nothing, views are refused."""
    buffer = allocate(MIB)
    assert buffer.mapped
    buffer.release()
    assert not mapping(buffer.address)
    assert not buffer.mapped
    assert "released" in repr(buffer)
    buffer.release()
    with pytest.raises(HostMemoryError, match=r"was released: take views before release\(\)$"):
        buffer.view()


@pytest.mark.parametrize("by", ["release", "collection"])
@pytest.mark.parametrize("kind", ["array", "slice", "tensor"])
def test_a_view_keeps_the_memory(by: str, kind: str) -> None:
    """Neither release() nor collection unmaps under a view; the end of the last one does."""
    buffer = allocate(MIB)
    address, mapped = buffer.address, buffer._finalizer
    view: Any = buffer.view()
    view[:] = random_bytes(1, MIB)
    if kind == "slice":
        view = view[100:200]
    elif kind == "tensor":
        view = torch.frombuffer(view, dtype=torch.float16).reshape(2, -1)
    if by == "release":
        buffer.release()
    del buffer
    gc.collect()
    assert mapping(address)
    expected = random_bytes(1, MIB)[100:200] if kind == "slice" else random_bytes(1, MIB)
    seen = view.view(torch.uint8).numpy().reshape(-1) if kind == "tensor" else view
    np.testing.assert_array_equal(seen, expected)
    del view, seen
    gc.collect()
    assert not mapped.alive
    assert not mapping(address)


def test_a_forked_child_shares_the_pages() -> None:
    """fork() leaves a device's pinned page the parent's page: nothing is copied on write."""
    buffer = allocate(PAGE)
    view = buffer.view()
    child = os.fork()
    if child == 0:
        view[7] = 42
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert view[7] == 42


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nbytes": 0}, "cannot map 0 bytes of host memory: ask for at least one"),
        ({"nbytes": -4096}, "cannot map -4096 bytes of host memory: ask for at least one"),
        ({"hugepages": "always"}, "hugepages='always': use off, prefer or required"),
        ({"hugepage_size": 4096}, "hugepage_size=4096: use a power of two above 4096"),
        ({"hugepage_size": 3 * MIB}, "hugepage_size=3145728: use a power of two above 4096"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    """Arguments that make no sense are one line with the value and what to write."""
    with pytest.raises(HostMemoryError) as caught:
        allocate(**{"nbytes": PAGE, **arguments})
    assert str(caught.value).startswith(message)


def test_more_than_the_machine_has_is_refused(tmp_path: Path) -> None:
    """Beyond MemAvailable nothing is mapped, since the OOM killer would answer."""
    write(tmp_path, {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 1024 kB"})
    with pytest.raises(HostMemoryError) as caught:
        allocate(MIB + 1, root=tmp_path)
    assert str(caught.value) == (
        "cannot map 1.0MiB of host memory: 1.0MiB are available; ask for less"
    )
    assert allocate(MIB, root=tmp_path).mapped
    with pytest.raises(HostMemoryError, match=r"cannot map 8\.0EiB of host memory"):
        allocate(1 << 63)


def test_more_than_the_cgroup_allows_is_refused(tmp_path: Path) -> None:
    """Beyond the memory limit of the cgroup nothing is mapped, and its file is named."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/memory.max": 8 * MIB,
            "sys/fs/cgroup/memory.current": 3 * MIB,
        },
    )
    with pytest.raises(HostMemoryError) as caught:
        allocate(6 * MIB, root=tmp_path)
    assert str(caught.value) == (
        "cannot map 6.0MiB of host memory: the cgroup allows 8.0MiB and 5.0MiB of it are left; "
        f"ask for less, or raise {tmp_path}/sys/fs/cgroup/memory.max"
    )
    assert allocate(5 * MIB, root=tmp_path).mapped


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT])
def test_a_populate_that_fails_is_an_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel reports while populating becomes one line, and nothing stays mapped."""
    mapped = []

    def refuse(address: int, nbytes: int, advice: int) -> None:
        mapped.append(address)
        raise OSError(number, os.strerror(number))

    memory._can_populate()
    monkeypatch.setattr(memory, "_madvise", refuse)
    with pytest.raises(HostMemoryError) as caught:
        allocate(MIB)
    assert str(caught.value) == (
        f"cannot map 1.0MiB of host memory: the kernel refused ({os.strerror(number)}); "
        "ask for less"
    )
    assert not mapping(mapped[0])


def test_one_failing_part_fails_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in one of the parts that are populated side by side is not lost."""
    starts: list[int] = []
    real = memory._madvise

    def refuse_fourth(address: int, nbytes: int, advice: int) -> None:
        starts.append(address)
        if address == min(starts) + 3 * MIB:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        real(address, nbytes, advice)

    memory._can_populate()
    monkeypatch.setattr(memory, "_POPULATE_CHUNK", MIB)
    monkeypatch.setattr(memory, "_madvise", refuse_fourth)
    with pytest.raises(HostMemoryError, match="Cannot allocate memory"):
        allocate(8 * MIB)
    assert not mapping(min(starts))


def test_an_old_kernel_touches_ordinary_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MADV_POPULATE_WRITE ordinary pages are made resident by writing them."""
    monkeypatch.setattr(memory, "_can_populate", lambda: False)
    buffer = allocate(2 * MIB)
    assert mapping(buffer.address)["Rss"] == 2 * MIB // 1024


def test_an_old_kernel_gets_no_hugepages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without MADV_POPULATE_WRITE a shortage would be SIGBUS, so hugepages are not used."""
    monkeypatch.setattr(memory, "_can_populate", lambda: False)
    assert allocate(MIB, hugepages="prefer").page_size == PAGE
    with pytest.raises(HostMemoryError) as caught:
        allocate(MIB, hugepages="required")
    assert str(caught.value) == (
        "cannot map 1.0MiB on 1 hugepages of 2.0MiB: this kernel has no MADV_POPULATE_WRITE, so a "
        "shortage would be SIGBUS; use Linux 5.14 or newer, or hugepages=off"
    )
    assert warnings_of(caplog) == [f"{caught.value}; using ordinary pages"]


def test_the_kernel_is_asked_for_its_ability(monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL from madvise is what a kernel without MADV_POPULATE_WRITE answers."""

    def refuse(address: int, nbytes: int, advice: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(memory, "_madvise", refuse)
    assert not memory._can_populate.__wrapped__()


def test_free_hugepages_are_used_and_given_back() -> None:
    """With pages free the mapping consists of them (smaps), holds data, and is given back."""
    with hugepages.raised(8):
        before = hugepages.count("free_hugepages")
        for end in ("release", "collection"):
            buffer = allocate(15 * MIB, hugepages="required")
            fields = mapping(buffer.address)
            assert fields["KernelPageSize"] == 2048
            assert (buffer.page_size, buffer.mapped_bytes) == (2 * MIB, 16 * MIB)
            assert buffer.address % buffer.page_size == 0
            assert hugepages.count("free_hugepages") == before - 8
            view = buffer.view()
            view[:] = random_bytes(2, 15 * MIB)
            np.testing.assert_array_equal(view, random_bytes(2, 15 * MIB))
            del view
            if end == "release":
                buffer.release()
            else:
                del buffer
                gc.collect()
            assert hugepages.count("free_hugepages") == before


def test_pages_of_one_gigabyte() -> None:
    """A free 1 GiB page is used for any size up to it."""
    with hugepages.raised(1, GIB):
        buffer = allocate(5 * MIB, hugepages="required", hugepage_size=GIB)
        assert mapping(buffer.address)["KernelPageSize"] == GIB // 1024
        assert (buffer.mapped_bytes, buffer.page_size) == (GIB, GIB)
        assert buffer.address % GIB == 0


@pytest.mark.parametrize("available", [0, 10])
def test_too_few_free_hugepages(available: int, caplog: pytest.LogCaptureFixture) -> None:
    """0 or 10 free of 32: ordinary pages and one warning, or one error; its command helps."""
    with hugepages.raised(available):
        available = hugepages.free()
        pages = available + 32 if available < 10 else available + 22
        wanted = pages * 2 * MIB
        for _ in range(2):
            buffer = allocate(wanted, hugepages="prefer")
            assert (buffer.page_size, buffer.mapped_bytes) == (PAGE, wanted)
            buffer.release()
        with pytest.raises(HostMemoryError) as caught:
            allocate(wanted, hugepages="required", hugepage_size=2 * MIB)
        total = hugepages.count("nr_hugepages") + pages - available
        assert str(caught.value) == (
            f"cannot map {wanted / MIB:.1f}MiB on {pages} hugepages of 2.0MiB: {available} pages "
            f"are free; run `sysctl -w vm.nr_hugepages={total}`"
        )
        assert warnings_of(caplog) == [f"{caught.value}; using ordinary pages"]
    with hugepages.raised(0):
        knob = hugepages.pool() / "nr_hugepages"
        before = knob.read_text()
        if not os.access(knob, os.W_OK):
            pytest.skip(f"{knob} cannot be written: raising it needs root")
        try:
            knob.write_text(str(total))
            assert allocate(wanted, hugepages="required").page_size == 2 * MIB
        finally:
            knob.write_text(before)


def test_a_size_the_kernel_does_not_have(tmp_path: Path) -> None:
    """A page size without a pool is an error that lists those there are and how to get it."""
    write_pool(tmp_path, 2 * MIB, nr=4, free=4)
    with pytest.raises(HostMemoryError) as caught:
        allocate(MIB, hugepages="required", hugepage_size=GIB, root=tmp_path)
    assert str(caught.value) == (
        "cannot map 1.0MiB on 1 hugepages of 1.0GiB: this kernel has no such pages (it has: "
        "2.0MiB); set hugepage_size to one of these, or boot with hugepagesz=1048576K hugepages=1"
    )


def test_the_command_for_a_size_that_is_not_the_default(tmp_path: Path) -> None:
    """vm.nr_hugepages counts the default size only; other sizes are raised by their own file."""
    write_pool(tmp_path, GIB, nr=2, free=1)
    write(tmp_path, {"proc/meminfo": "Hugepagesize: 2048 kB"})
    with pytest.raises(HostMemoryError) as caught:
        allocate(3 * GIB, hugepages="required", hugepage_size=GIB, root=tmp_path)
    knob = tmp_path / "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"
    assert str(caught.value).endswith(f"1 pages are free; run `echo 4 > {knob}`")


def test_pages_that_others_took_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Counters that promise more than the kernel then grants end in the same two ways."""
    write_pool(tmp_path, 2 * MIB, nr=1 << 20, free=1 << 20)
    with hugepages.raised(0):
        wanted = (hugepages.free() + hugepages.count("nr_overcommit_hugepages") + 1) * 2 * MIB
        assert allocate(wanted, hugepages="prefer", root=tmp_path).page_size == PAGE
        with pytest.raises(HostMemoryError, match=r"the kernel refused \(Cannot allocate memory\)"):
            allocate(wanted, hugepages="required", root=tmp_path)
    assert len(warnings_of(caplog)) == 1


def test_each_reason_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second reason is not silenced by the first, a second time is."""
    write_pool(tmp_path, 2 * MIB)
    for size in (2 * MIB, GIB, 2 * MIB, GIB):
        allocate(MIB, hugepages="prefer", hugepage_size=size, root=tmp_path)
    first, second = warnings_of(caplog)
    assert "0 pages are free" in first
    assert "no such pages" in second


CHILD = """
import ctypes, json, logging, mmap, sys
from pathlib import Path
from hicache_nixl import memory, memory_limits
from hicache_nixl.errors import HostMemoryError

records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger("hicache_nixl").addHandler(handler)
mode, root, wanted = sys.argv[1], Path(sys.argv[2]), 64 << 20
if mode == "touch":
    size = memory._MAP_HUGETLB | 21 << memory._MAP_HUGE_SHIFT
    address = memory._mmap(wanted, mmap.MAP_SHARED | mmap.MAP_POPULATE | size)
    print("mapped", flush=True)
    ctypes.memset(address, 1, wanted)
try:
    buffers = [memory.allocate(wanted, hugepages=mode, root=root) for _ in range(2)]
    for buffer in buffers:
        buffer.view()[:] = 7
    sizes, error = [buffer.page_size for buffer in buffers], None
except HostMemoryError as caught:
    sizes, error = [], str(caught)
limit = memory_limits.hugepage_pools()[2 << 20].limit
file = limit and str(limit.file)
print(json.dumps({"sizes": sizes, "error": error, "warnings": records, "file": file}))
"""


def in_limited_cgroup(version: int, mode: str, root: Path, scratch: Path) -> tuple[int, Any]:
    """Run CHILD where 16 MiB of 2 MiB pages are allowed and 40 are free: (exit code, output)."""
    command = [sys.executable, "-c", CHILD, mode, str(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with hugepages.raised(72):
        done = hugepages.run_limited([version], 16 * MIB, command, scratch / "cgroup", environment)
    return done.returncode, json.loads(done.stdout) if "{" in done.stdout else done.stdout


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_limit_falls_back(version: int, tmp_path: Path) -> None:
    """16 MiB allowed of 64 MiB, `prefer`: writable ordinary pages, one warning with the fix."""
    code, seen = in_limited_cgroup(version, "prefer", Path("/"), tmp_path)
    assert code == 0, seen
    assert seen["sizes"] == [PAGE, PAGE]
    assert seen["warnings"] == [
        "cannot map 64.0MiB on 32 hugepages of 2.0MiB: the cgroup allows 16.0MiB and 16.0MiB of "
        f"it are left; run `echo {64 * MIB} > {seen['file']}`, or raise the container's "
        "hugepages-2Mi limit; using ordinary pages"
    ]
    assert seen["file"].endswith({1: "hugetlb.2MB.limit_in_bytes", 2: "hugetlb.2MB.max"}[version])


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_limit_under_required(version: int, tmp_path: Path) -> None:
    """16 MiB allowed of 64 MiB, `required`: one error."""
    code, seen = in_limited_cgroup(version, "required", Path("/"), tmp_path)
    assert code == 0, seen
    assert (seen["sizes"], seen["warnings"]) == ([], [])
    assert "the cgroup allows 16.0MiB and 16.0MiB of it are left; run `echo" in seen["error"]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mode", ["prefer", "required"])
def test_a_cgroup_limit_that_cannot_be_read(version: int, mode: str, tmp_path: Path) -> None:
    """Where the limit is invisible, populating reports it: fallback or error, never SIGBUS."""
    write_pool(tmp_path / "blind", 2 * MIB, nr=100, free=100)
    code, seen = in_limited_cgroup(version, mode, tmp_path / "blind", tmp_path)
    assert code == 0, seen
    assert seen["sizes"] == ([PAGE, PAGE] if mode == "prefer" else [])
    said = seen["warnings"] if mode == "prefer" else [seen["error"]]
    assert len(said) == 1
    assert said[0].removesuffix("; using ordinary pages") == (
        "cannot map 64.0MiB on 32 hugepages of 2.0MiB: the kernel refused (Bad address) with 100 "
        "pages free; raise the container's hugepages-2Mi limit"
    )


def test_without_populating_the_limit_is_sigbus(tmp_path: Path) -> None:
    """The cgroups of these tests are real: a mapping made with MAP_POPULATE dies in them."""
    code, seen = in_limited_cgroup(1, "touch", Path("/"), tmp_path)
    assert seen == "mapped\n"
    assert code == 135


def test_the_report_names_pools_and_limits(tmp_path: Path) -> None:
    """Sizes, counts, the cgroup limit and the kernel's ability are in one object."""
    write_pool(tmp_path, 2 * MIB, nr=10, free=4)
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/hugetlb.2MB.max": 16 * MIB,
        },
    )
    report = hugepage_report(tmp_path)
    (pool,) = report.pools
    assert (pool.page_size, pool.total, pool.free) == (2 * MIB, 10, 4)
    assert pool.limit is not None
    assert pool.limit.headroom == 16 * MIB
    assert report.populate_write == memory._can_populate()


def test_the_report_of_this_machine() -> None:
    """The real report lists what the readers find."""
    assert [pool.page_size for pool in hugepage_report().pools] == list(
        memory_limits.hugepage_pools()
    )


def test_importing_reads_nothing() -> None:
    """Importing the module maps nothing and imports no torch."""
    code = (
        "import sys, hicache_nixl.memory, hicache_nixl.pinning; assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_buffer_describes_itself() -> None:
    """repr gives size, address and page size."""
    buffer: HostBuffer = allocate(5)
    assert repr(buffer) == f"<HostBuffer 5 bytes at {buffer.address:#x}, {PAGE // 1024} KiB pages>"
