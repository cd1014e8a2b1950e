"""Claims about what is read from the kernel, on made-up proc and sys trees and on the real ones."""

from pathlib import Path

import pytest

from hicache_nixl import memory_limits
from hicache_nixl.memory_limits import Limit
from hugepages import V1_MOUNT, V2_MOUNT, write, write_pool

MIB = 1 << 20
GIB = 1 << 30
# What cgroup v1 shows for "no limit" on 2 MiB pages.
NO_LIMIT_V1 = 9223372036852678656


def hugetlb_limit(size: int, root: Path) -> Limit | None:
    """The one that decides what is free."""
    return memory_limits.tightest(memory_limits.hugetlb_limits(size, root))


def test_pools_count_what_can_be_mapped(tmp_path: Path) -> None:
    """Reserved pages are not free, pages that overcommit may add are, sizes come in order."""
    write_pool(tmp_path, GIB, nr=1, free=1)
    write_pool(tmp_path, 2 * MIB, nr=40, free=30, resv=8, surplus=2, nr_overcommit=5)
    pools = memory_limits.hugepage_pools(tmp_path)
    assert list(pools) == [2 * MIB, GIB]
    assert (pools[2 * MIB].total, pools[2 * MIB].free) == (40, 30 - 8 + 5 - 2)
    assert pools[2 * MIB].allowed_bytes == (40 + 5 - 2) * 2 * MIB
    assert (pools[GIB].total, pools[GIB].free, pools[GIB].limit) == (1, 1, None)


def test_a_kernel_without_hugepages_has_no_pools(tmp_path: Path) -> None:
    """No directory, no pools."""
    assert memory_limits.hugepage_pools(tmp_path) == {}
    assert memory_limits.default_hugepage_size(tmp_path) is None


def test_pools_of_this_machine() -> None:
    """The real counters are read as the kernel shows them."""
    for size, pool in memory_limits.hugepage_pools().items():
        assert pool.directory == Path(f"/sys/kernel/mm/hugepages/hugepages-{size >> 10}kB")
        assert pool.total == int((pool.directory / "nr_hugepages").read_text())


@pytest.mark.parametrize(
    ("size", "name"), [(64 << 10, "64KB"), (2 * MIB, "2MB"), (32 * MIB, "32MB"), (GIB, "1GB")]
)
def test_hugetlb_limit_v2_of_every_size(tmp_path: Path, size: int, name: str) -> None:
    """The file of each page size is found by the name the kernel gives it."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            f"sys/fs/cgroup/pod/hugetlb.{name}.max": 16 * MIB,
            f"sys/fs/cgroup/pod/hugetlb.{name}.current": 4 * MIB,
        },
    )
    limit = hugetlb_limit(size, tmp_path)
    assert limit == Limit(tmp_path / f"sys/fs/cgroup/pod/hugetlb.{name}.max", 16 * MIB, 4 * MIB)
    assert limit.headroom == 12 * MIB


def test_the_tightest_ancestor_limits(tmp_path: Path) -> None:
    """A parent with less headroom than the child decides what is free, and the lowest limit what
    all may have."""
    write_pool(tmp_path, 2 * MIB, nr=64, free=64)
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/pod",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/slice/hugetlb.2MB.max": 64 * MIB,
            "sys/fs/cgroup/slice/hugetlb.2MB.current": 60 * MIB,
            "sys/fs/cgroup/slice/pod/hugetlb.2MB.max": 32 * MIB,
            "sys/fs/cgroup/slice/pod/hugetlb.2MB.current": 0,
        },
    )
    limit = hugetlb_limit(2 * MIB, tmp_path)
    assert limit is not None
    assert (limit.file.parent.name, limit.headroom) == ("slice", 4 * MIB)
    pool = memory_limits.hugepage_pools(tmp_path)[2 * MIB]
    assert (pool.free_bytes, pool.allowed_bytes) == (4 * MIB, 32 * MIB)


def test_the_reservation_limit_counts(tmp_path: Path) -> None:
    """The rsvd limit, which makes mmap itself fail, is read beside the limit on use."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/pod/hugetlb.2MB.max": "max",
            "sys/fs/cgroup/pod/hugetlb.2MB.rsvd.max": 8 * MIB,
            "sys/fs/cgroup/pod/hugetlb.2MB.rsvd.current": 2 * MIB,
        },
    )
    limit = hugetlb_limit(2 * MIB, tmp_path)
    assert limit is not None
    assert (limit.file.name, limit.headroom) == ("hugetlb.2MB.rsvd.max", 6 * MIB)


def test_hugetlb_limit_v1(tmp_path: Path) -> None:
    """On a hybrid machine the v1 hierarchy that holds the controller is read, not v2."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "11:cpu,hugetlb:/docker/abc\n4:memory:/\n0::/elsewhere",
            "proc/self/mountinfo": V2_MOUNT.format(root="/") + V1_MOUNT.format(root="/"),
            "sys/fs/cgroup/hugetlb/docker/hugetlb.2MB.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/hugetlb/docker/abc/hugetlb.2MB.limit_in_bytes": 16 * MIB,
            "sys/fs/cgroup/hugetlb/docker/abc/hugetlb.2MB.usage_in_bytes": 2 * MIB,
            "sys/fs/cgroup/elsewhere/hugetlb.2MB.max": 2 * MIB,
        },
    )
    limit = hugetlb_limit(2 * MIB, tmp_path)
    assert limit is not None
    assert (limit.limit, limit.used) == (16 * MIB, 2 * MIB)


@pytest.mark.parametrize("mounted", ["/", "/docker/abc", "/docker/other"])
@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../outside"])
def test_inside_a_container_the_mount_is_the_cgroup(
    tmp_path: Path, mounted: str, path: str
) -> None:
    """Host paths in /proc/self/cgroup that do not exist in the container lead to its mount."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}",
            "proc/self/mountinfo": V2_MOUNT.format(root=mounted),
            "sys/fs/cgroup/hugetlb.2MB.max": 0,
            "sys/fs/outside/hugetlb.2MB.max": 1,
        },
    )
    limit = hugetlb_limit(2 * MIB, tmp_path)
    assert limit == Limit(tmp_path / "sys/fs/cgroup/hugetlb.2MB.max", 0, 0)


def test_a_mount_point_with_a_blank(tmp_path: Path) -> None:
    """The octal escapes of mountinfo are undone."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": r"1 1 0:1 / /my\040cg rw - cgroup2 none rw",
            "my cg/hugetlb.2MB.max": MIB,
        },
    )
    limit = hugetlb_limit(2 * MIB, tmp_path)
    assert limit is not None
    assert limit.limit == MIB


@pytest.mark.parametrize("value", ["max", NO_LIMIT_V1])
def test_no_limit(tmp_path: Path, value: object) -> None:
    """`max` and v1's huge number mean that there is no limit."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/hugetlb.2MB.max": value,
        },
    )
    assert hugetlb_limit(2 * MIB, tmp_path) is None


def test_nothing_readable_is_no_limit(tmp_path: Path) -> None:
    """Without proc and sys nothing is known, and nothing is refused."""
    assert hugetlb_limit(2 * MIB, tmp_path) is None
    assert memory_limits.memory_limit(tmp_path) is None
    assert memory_limits.available_memory(tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
def test_memory_limit_leaves_out_page_cache(tmp_path: Path, version: int) -> None:
    """Inactive page cache is room, since the kernel drops it for an allocation."""
    limit, used, cache = {
        1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        2: ("max", "current", "inactive_file"),
    }[version]
    mount = V2_MOUNT if version == 2 else V1_MOUNT.replace("hugetlb", "memory")
    top = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/" if version == 2 else "4:memory:/",
            "proc/self/mountinfo": mount.format(root="/"),
            f"{top}/memory.{limit}": 100 * MIB,
            f"{top}/memory.{used}": 70 * MIB,
            f"{top}/memory.stat": f"anon 1\n{cache} {50 * MIB}",
        },
    )
    found = memory_limits.memory_limit(tmp_path)
    assert found is not None
    assert (found.limit, found.used, found.headroom) == (100 * MIB, 20 * MIB, 80 * MIB)


def test_available_memory_of_this_machine() -> None:
    """MemAvailable is read in bytes."""
    available = memory_limits.available_memory()
    assert available is not None
    assert MIB < available < 1 << 50
