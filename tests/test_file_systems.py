"""Claims about what is said of the file system under a directory."""

import os
from pathlib import Path

import pytest

from configurations import GIB, MIB, TIB, Disks, write
from hicache_nixl.errors import SettingsError, StoreError
from hicache_nixl.file_systems import MIN_BUDGET, FileSystem, FileSystems, make_directories
from hicache_nixl.stores.files_ledger import Usage, write_usage

TABLE = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw - proc proc rw
30 22 8:2 / /nvme0 rw,relatime shared:2 master:3 propagate_from:4 - xfs /dev/nvme0n1 rw
31 30 0:40 / /nvme0/net rw - nfs4 filer:/export/a\040b rw,vers=4.2
32 22 0:41 / /with\040blank rw - lustre mgs@tcp:/scratch rw
33 22 0:42 / /back\134slash rw - ceph 10.0.0.1:/ rw
34 22 0:43 / /covered rw - ext4 /dev/sdb rw
35 34 0:44 / /covered rw - fuse.juicefs JuiceFS:x rw
half a line
"""


@pytest.mark.parametrize(
    ("directory", "kind", "device"),
    [
        ("/", "ext4", "/dev/sda1"),
        ("/home/of/nobody", "ext4", "/dev/sda1"),
        ("/nvme0", "xfs", "/dev/nvme0n1"),
        ("/nvme0/deep/er", "xfs", "/dev/nvme0n1"),
        ("/nvme01", "ext4", "/dev/sda1"),
        ("/nvme0/net/x", "nfs4", "filer:/export/a b"),
        ("/nvme0/network", "xfs", "/dev/nvme0n1"),
        ("/with blank/x", "lustre", "mgs@tcp:/scratch"),
        ("/back\\slash", "ceph", "10.0.0.1:/"),
        ("/covered/x", "fuse.juicefs", "JuiceFS:x"),
    ],
)
def test_mount_of_a_directory(directory: str, kind: str, device: str, tmp_path: Path) -> None:
    """The innermost mount above a directory is found, the later one of two at the same point."""
    table = write(tmp_path / "mountinfo", TABLE)
    assert FileSystems(mountinfo=table).under(directory) == FileSystem(kind, device)


def test_links_are_followed(tmp_path: Path) -> None:
    """The file system that counts is the one a link leads to."""
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    disks = Disks(tmp_path / "mountinfo", {f"{tmp_path}/target": "nfs"})
    assert disks.file_systems().under(tmp_path / "link" / "x").kind == "nfs"


def test_this_machine() -> None:
    """The kernel's own table has /proc as proc, which nobody shares."""
    found = FileSystems().under("/proc/self")
    assert (found.kind, found.shared) == ("proc", False)


def test_no_table(tmp_path: Path) -> None:
    """Without a mount table the kind is unknown, which counts as local."""
    found = FileSystems(mountinfo=tmp_path / "none").under("/nvme0")
    assert (str(found), found.shared) == ("unknown on unknown", False)


SHARED = [
    *("nfs", "nfs4", "lustre", "ceph", "beegfs", "gpfs", "cifs", "smb3", "ocfs2", "gfs2", "wekafs"),
    *("9p", "virtiofs", "autofs", "fuse", "fuse.hf3fs", "fuse.sshfs", "fuse.ceph-fuse"),
]
LOCAL = ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "fuseblk", "unknown"]


@pytest.mark.parametrize("kind", [*SHARED, *LOCAL])
def test_what_other_hosts_may_share(kind: str) -> None:
    """Network, cluster, FUSE and host-folder file systems are shared, disks are not."""
    assert FileSystem(kind, "x").shared is (kind in SHARED)


@pytest.mark.parametrize(
    ("size", "used", "percent", "expected"),
    [
        (TIB, 0, 80.0, 819 * GIB),  # 819.2 GiB, in whole GiB
        (TIB, 200 * GIB, 80.0, 619 * GIB),
        (TIB, 0, 100.0, TIB),
        (10 * GIB, 0, 50.0, 5 * GIB),
        (GIB, 0, 33.3, 336 * MIB),  # 340.9 MiB, in steps of 16 MiB
        (TIB, 900 * GIB, 80.0, MIN_BUDGET),
        (TIB, TIB, 80.0, MIN_BUDGET),
    ],
)
def test_budget(size: int, used: int, percent: float, expected: int, tmp_path: Path) -> None:
    """A budget is the share of the disk less what others use, rounded down, never tiny."""
    disks = Disks(tmp_path / "mountinfo", size=size, used=used).file_systems()
    budget = disks.budget([str(tmp_path / "not" / "yet")], percent)
    assert (budget.nbytes, budget.size_bytes, budget.other_bytes) == (expected, size, used)


def test_own_files_are_not_others(tmp_path: Path) -> None:
    """A store that has grown has the budget it had when it was empty."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "segment-1.slab").write_bytes(b"x" * (48 * MIB))
    (store / "below").mkdir()
    (store / "below" / "other").write_bytes(b"x" * (16 * MIB))
    file_systems = Disks(tmp_path / "mountinfo", size=GIB, used=64 * MIB).file_systems()
    budget = file_systems.budget([str(store)], 50.0)
    assert budget.other_bytes == 16 * MIB
    assert budget.nbytes == 496 * MIB


def test_use_of_a_files_store_is_its_own(tmp_path: Path) -> None:
    """What a files store says it uses does not count as somebody else's."""
    usage = Usage(used_bytes=500 * MIB, pages=1, evicted_pages=0, grain_ns=0)
    write_usage(tmp_path / "usage.json", usage)
    disks = Disks(tmp_path.with_suffix(".mountinfo"), size=GIB, used=600 * MIB)
    budget = disks.file_systems().budget([str(tmp_path)], 50.0)
    assert budget.other_bytes == 100 * MIB - 4096
    assert budget.nbytes == 400 * MIB
    (tmp_path / "usage.json").write_text("half")
    assert disks.file_systems().budget([str(tmp_path)], 50.0).other_bytes == 600 * MIB - 4096


def test_one_disk_counts_once(tmp_path: Path) -> None:
    """Two directories on one disk share its room."""
    file_systems = Disks(tmp_path / "mountinfo", size=100 * GIB).file_systems()
    both = file_systems.budget([f"{tmp_path}/a", f"{tmp_path}/b"], 80.0)
    assert both == file_systems.budget([f"{tmp_path}/a"], 80.0)


def test_several_disks_add_up(tmp_path: Path) -> None:
    """Directories on different disks have the room of each, and a full one takes from none."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system to write to at /dev/shm")
    disks = Disks(tmp_path / "mountinfo", size=100 * GIB)

    def statvfs(path: Path) -> os.statvfs_result:
        disks.used = 100 * GIB if path == memory else 20 * GIB
        return disks.statvfs(path)

    budget = disks.file_systems(statvfs).budget([f"{tmp_path}/a", str(memory / "no/such")], 80.0)
    assert (budget.nbytes, budget.size_bytes) == (60 * GIB, 200 * GIB)


def test_disk_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """A file system that gives no answer is one line that says what to set instead."""

    def statvfs(path: Path) -> os.statvfs_result:
        raise OSError(5, "Input/output error")

    with pytest.raises(SettingsError, match=r"Input/output error; set capacity"):
        FileSystems(statvfs=statvfs).budget([str(tmp_path)], 80.0)


def test_directories_are_made_with_all_above(tmp_path: Path) -> None:
    """Missing directories are made, present ones are left alone."""
    make_directories([f"{tmp_path}/a/b/c", f"{tmp_path}/a"])
    assert (tmp_path / "a/b/c").is_dir()


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """A directory below a file is refused with its name."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"{tmp_path}/file/x cannot be made: Not a directory"):
        make_directories([f"{tmp_path}/file/x"])
