"""Claims about the store and the budget that an in-tree configuration comes to."""

from pathlib import Path
from typing import Any

import pytest

from configurations import GIB, STORAGE_DIR, STORE, Disks, load, refusal, write
from hicache_nixl.errors import SettingsError
from hicache_nixl.file_systems import MIN_BUDGET, FileSystems
from hicache_nixl.intree_store import DEFAULT_DIRECTORY, store_of
from hicache_nixl.settings import Settings, load_settings
from hicache_nixl.store_url import StoreUrl

POSIX = {"plugin": {"posix": {"active": True}}}
HIGH, LOW, ENABLED = (
    "l3_cleaner_high_watermark",
    "l3_cleaner_low_watermark",
    "l3_cleaner_enabled",
)


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    """Disks of 1 TiB; /mnt/nfs, /mnt/3fs and /mnt/fuse are shared."""
    shared = {"/mnt/nfs": "nfs4", "/mnt/3fs": "fuse.hf3fs", "/mnt/fuse": "fuse.sshfs"}
    return Disks(tmp_path / "mountinfo", shared)


def load_in_tree(
    disks: Disks, config: dict[str, Any] | None = None, directories: str | None = None
) -> Settings:
    environ = {} if directories is None else {STORAGE_DIR: directories}
    return load_settings(config, environ=environ, file_systems=disks.file_systems())


def note(settings: Settings, words: str) -> str:
    """The only note with `words`."""
    (found,) = (note for note in settings.notes if words in note)
    return found


# --- directories


@pytest.mark.parametrize("plugin", ["auto", "posix", "gds", "gds_mt"])
def test_local_directories_become_a_striped_slab_store(plugin: str, disks: Disks) -> None:
    """Local disks make a slab store with a directory of its own in each, whatever the plug-in."""
    urls, why = store_of(["/nvme0", "/nvme1/x"], plugin, "", disks.file_systems())
    assert urls == (
        StoreUrl("slab", "/nvme0/hicache-nixl"),
        StoreUrl("slab", "/nvme1/x/hicache-nixl"),
    )
    assert why == "ext4 on /dev/disk0: local"


@pytest.mark.parametrize(
    ("directory", "plugin", "why"),
    [
        ("/mnt/nfs/kv", "posix", "/mnt/nfs/kv is on nfs4 on /dev/disk1"),
        ("/mnt/fuse", "auto", "/mnt/fuse is on fuse.sshfs"),
        ("/mnt/3fs/kv", "3fs", "fuse.hf3fs"),
        ("/nvme0", "3fs", "plugin is 3fs"),
    ],
)
def test_shared_directory_becomes_a_files_store(
    directory: str, plugin: str, why: str, disks: Disks
) -> None:
    """A file system that other hosts share, or the 3FS plug-in, makes a files store."""
    urls, reason = store_of([directory], plugin, "", disks.file_systems())
    assert urls == (StoreUrl("files", f"{directory}/hicache-nixl"),)
    assert why in reason


@pytest.mark.parametrize("directories", ["/mnt/nfs/a,/mnt/nfs/b", "/nvme0,/mnt/nfs/a"])
def test_several_shared_directories_are_refused(directories: str, disks: Disks) -> None:
    """A store on a shared file system has one directory; the way out is in the message."""
    message = refusal(environ={STORAGE_DIR: directories}, file_systems=disks.file_systems())
    assert message.startswith(f"environment variable {STORAGE_DIR}: /mnt/nfs/a is on nfs4")
    first = directories.split(",")[0]
    assert f'store to "slab://{first}/hicache-nixl,slab:///mnt/nfs/' in message


def test_mount_point_of_3fs_must_hold_the_directory(disks: Disks) -> None:
    """A directory that 3FS cannot reach is refused; without one the mount point is taken."""
    file_systems = disks.file_systems()
    with pytest.raises(SettingsError, match=r"/nvme0 is not below plugin.3fs.mount_point = /mnt/3"):
        store_of(["/nvme0"], "3fs", "/mnt/3fs/", file_systems)
    with pytest.raises(SettingsError, match="is not below"):
        store_of(["/mnt/3fs2"], "3fs", "/mnt/3fs", file_systems)
    urls, _ = store_of(["/mnt/3fs"], "3fs", "/mnt/3fs/", file_systems)
    assert urls == (StoreUrl("files", "/mnt/3fs/hicache-nixl"),)
    message = refusal({"plugin": {"3fs": {"active": True}}}, file_systems=file_systems)
    assert "plugin 3fs has no directory" in message
    assert STORAGE_DIR in message


def test_shared_store_is_noted(disks: Disks) -> None:
    """A directory on NFS is served as files, with the share of NFS as its budget."""
    settings = load_in_tree(disks, directories="/mnt/nfs/kv")
    assert settings.store == (StoreUrl("files", "/mnt/nfs/kv/hicache-nixl"),)
    assert settings.in_tree_directories == ("/mnt/nfs/kv",)
    assert "nfs4 on /dev/disk1, which other hosts may share" in note(settings, "is read as store")
    assert settings.capacity == 819 * GIB


@pytest.mark.parametrize("directories", [None, "/mnt/3fs/kv"])
def test_3fs(directories: str | None, disks: Disks) -> None:
    """The 3FS plug-in keeps files in its directory, or at its mount point where none is named."""
    section = {"active": True, "mount_point": "/mnt/3fs", "iopool_size": 64}
    settings = load_in_tree(disks, {"plugin": {"3fs": section}}, directories)
    assert settings.store == (StoreUrl("files", f"{directories or '/mnt/3fs'}/hicache-nixl"),)
    assert settings.parameters_for("3fs") == {"mount_point": "/mnt/3fs", "iopool_size": "64"}


def test_directory_is_noted(disks: Disks) -> None:
    """One line says what the directory became, why, and how to choose otherwise."""
    settings = load_in_tree(disks, directories=" /nvme0/kv/ , /nvme1,")
    assert settings.in_tree_directories == ("/nvme0/kv", "/nvme1")
    assert note(settings, STORAGE_DIR) == (
        f"environment variable {STORAGE_DIR} is read as store = slab:///nvme0/kv/hicache-nixl,"
        "slab:///nvme1/hicache-nixl (ext4 on /dev/disk0: local); in-tree cache files are not "
        "read; set store to choose otherwise"
    )


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        (POSIX, {}),
        ({"plugin.posix.active": "true"}, {}),
        ({"use_uring": "true"}, {}),
        ({HIGH: 85}, {}),
        ({}, {"SGLANG_HICACHE_NIXL_BACKEND_PLUGIN": "POSIX"}),
    ],
)
def test_in_tree_default_directory(
    config: dict[str, Any], environ: dict[str, str], disks: Disks
) -> None:
    """What is written for the in-tree connector and names no directory has its default one."""
    settings = load_settings(config, environ=environ, file_systems=disks.file_systems())
    assert settings.store == (StoreUrl("slab", f"{DEFAULT_DIRECTORY}/hicache-nixl"),)
    assert settings.in_tree_directories == (DEFAULT_DIRECTORY,)
    assert STORAGE_DIR in note(settings, DEFAULT_DIRECTORY)


@pytest.mark.parametrize("config", [None, {}, {"use_direct_io": False}, {"capacity": "1GiB"}])
def test_no_default_directory_for_others(config: dict[str, Any] | None, disks: Disks) -> None:
    """Where nothing is in-tree, a store must be named."""
    environ = {"SGLANG_HUGEPAGE_SIZE": "2MB", "SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "1"}
    message = refusal(config, environ, file_systems=disks.file_systems())
    assert message.startswith("no store is configured")


@pytest.mark.parametrize(
    ("directories", "words"),
    [
        ("relative/dir", ["'relative/dir'", "absolute"]),
        ("/a,/b/../a", ["are the same"]),
        ("/a,/", ["names no directory"]),
    ],
)
def test_refused_directories(directories: str, words: list[str], disks: Disks) -> None:
    """A directory that cannot be a store is named with its variable."""
    message = refusal(environ={STORAGE_DIR: directories}, file_systems=disks.file_systems())
    assert STORAGE_DIR in message
    assert all(word in message for word in words), message


def test_directories_need_no_escaping(disks: Disks) -> None:
    """A directory in the in-tree variable may hold characters that a URL would escape."""
    settings = load_in_tree(disks, directories="/a b/100%?#")
    assert settings.store[0].path == "/a b/100%?#/hicache-nixl"


def test_store_and_in_tree_directory_in_one_source_are_refused() -> None:
    """Two variables that say where the store is are an error naming both, even if equal."""
    message = refusal(None, {STORAGE_DIR: "/nvme0/hicache", "HICACHE_NIXL_STORE": STORE})
    assert STORAGE_DIR in message
    assert "HICACHE_NIXL_STORE" in message
    assert "disagree" not in message


@pytest.mark.parametrize("source", ["mapping", "file"])
def test_store_counts_instead_of_the_in_tree_directory(source: str, tmp_path: Path) -> None:
    """A store in a file, SGLang's extra config or a flag is used, and a line says so."""
    config_file = None
    if source == "file":
        config_file = write(tmp_path / "s.toml", f'store = "{STORE}"')
    settings = load_settings(
        {"store": STORE} if source == "mapping" else None,
        environ={STORAGE_DIR: "/nvme0/hicache"},
        config_file=config_file,
    )
    assert str(settings.store[0]) == STORE
    assert settings.in_tree_directories == ()
    assert note(settings, STORAGE_DIR).endswith("is set")


def test_directory_that_is_missing_is_noted(disks: Disks, tmp_path: Path) -> None:
    """A directory that will be made may be one whose disk is not mounted: a line says so."""
    missing = f"{tmp_path}/not/mounted"
    settings = load_in_tree(disks, directories=f"{missing},{tmp_path}")
    assert note(settings, "does not exist") == (
        f"{missing} does not exist, nor does {tmp_path}/not; both are made at start: if a disk "
        "belongs there, mount it before"
    )


def test_without_a_need_for_a_store_no_disk_is_looked_at(tmp_path: Path) -> None:
    """Where no store is needed, in-tree directories and watermarks mean nothing."""
    settings = load_settings(
        {HIGH: 85} | POSIX,
        environ={STORAGE_DIR: "/nvme0"},
        require_store=False,
        file_systems=FileSystems(tmp_path / "none", statvfs=lambda path: pytest.fail("looked")),
    )
    assert (settings.store, settings.capacity) == ((), 64 * GIB)


# --- watermarks


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 719),  # 80 % of 1 TiB, 100 GiB of it taken by others, in GiB
        ({HIGH: 50.0}, 412),
        ({HIGH: "50"}, 412),
        ({HIGH: 50, LOW: "40.5"}, 412),
        ({LOW: 10}, 719),
        ({ENABLED: True}, 719),
        ({ENABLED: "true", HIGH: 50}, 412),
        ({HIGH: 50, "capacity": "2TiB"}, 2048),
        ({"capacity": "2TiB"}, 2048),
        ({ENABLED: False}, 64),
        ({ENABLED: "false", HIGH: 50, LOW: 60}, 64),
    ],
)
def test_watermark_becomes_the_budget(config: dict[str, Any], expected: int, disks: Disks) -> None:
    """The high watermark is a share of the disk, unless a capacity is set or the cleaner is off."""
    disks.used = 100 * GIB
    settings = load_in_tree(disks, config, "/nvme0")
    assert settings.capacity == expected * GIB


def test_default_watermark_is_not_for_own_stores(disks: Disks) -> None:
    """A store of this connector's own has the default capacity; with an explicit key it counts."""
    file_systems = disks.file_systems()
    assert load(POSIX, file_systems=file_systems).capacity == 64 * GIB
    assert load({HIGH: 50}, file_systems=file_systems).capacity == 512 * GIB


def test_file_system_without_a_size(disks: Disks) -> None:
    """Where the file system does not say how large it is, the default capacity counts."""
    disks.size = 0
    settings = load_in_tree(disks, {HIGH: 50}, "/mnt/fuse")
    assert settings.capacity == 64 * GIB
    assert "does not say its size" in note(settings, HIGH)


def test_capacity_anywhere_wins(disks: Disks) -> None:
    """A capacity counts before a watermark, also from an earlier source."""
    environ = {STORAGE_DIR: "/nvme0", "HICACHE_NIXL_CAPACITY": "1GiB"}
    settings = load_settings({HIGH: 50}, environ=environ, file_systems=disks.file_systems())
    assert settings.capacity == GIB
    assert "HICACHE_NIXL_CAPACITY is set" in note(settings, HIGH)


def test_cleaner_is_noted(disks: Disks) -> None:
    """Each of the cleaner's keys has one line: what it came to, or why it is not used."""
    disks.used = 100 * GIB
    settings = load_in_tree(disks, {ENABLED: True, HIGH: 50, LOW: 40}, "/nvme0")
    source = "(given settings)"
    assert note(settings, HIGH) == (
        f"{HIGH} = 50 {source} is read as capacity = 412GiB: that share of 1.0TiB, less 100.0GiB "
        "that other files take or are reserved"
    )
    assert f"{LOW} = 40 {source} is not used" in note(settings, LOW)
    assert f"{ENABLED} = true {source} is not used" in note(settings, ENABLED)
    assert "80 (in-tree default) is read as capacity" in note(
        load_in_tree(disks, None, "/nvme0"), HIGH
    )


def test_a_disk_that_others_have_filled_is_noted(disks: Disks) -> None:
    """Where nothing is left of the share, the line says that the budget is the least there is."""
    disks.used = 600 * GIB
    settings = load_in_tree(disks, {HIGH: 50}, "/nvme0")
    assert settings.capacity == MIN_BUDGET
    assert "= 64MiB: the least there is, because nothing is left" in note(settings, HIGH)
    assert "set capacity" in note(settings, HIGH)


def test_cleaner_that_is_off_is_noted(disks: Disks) -> None:
    """Who runs a cleaner of their own reads that it would damage the store."""
    settings = load_in_tree(disks, {ENABLED: False, HIGH: 50}, "/nvme0")
    assert "keep other cleaners away" in note(settings, ENABLED)
    assert "the cleaner is off" in note(settings, HIGH)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({ENABLED: "perhaps"}, [ENABLED, "'perhaps'", "true or false"]),
        ({HIGH: 101}, [HIGH, "101", "percentage"]),
        ({HIGH: 0}, [HIGH, "percentage"]),
        ({HIGH: True}, [HIGH, "true", "percentage"]),
        ({HIGH: "80%"}, [HIGH, "'80%'", "80.0"]),
        ({HIGH: [80]}, [HIGH, "a list"]),
        ({HIGH: 10**400}, [HIGH, "percentage"]),
        ({LOW: "nan"}, [LOW, "percentage"]),
        ({LOW: -1}, [LOW, "-1"]),
        ({HIGH: 70, LOW: 70}, [LOW, "70 is not below", f"{HIGH} = 70"]),
        ({LOW: 80}, [LOW, "80 is not below", f"{HIGH} = 80"]),
    ],
)
def test_refused_watermarks(config: dict[str, Any], words: list[str], disks: Disks) -> None:
    """A watermark that is no percentage, or the wrong way round, is named with its value."""
    message = refusal({"store": STORE} | config, file_systems=disks.file_systems())
    assert all(word in message for word in words), message
