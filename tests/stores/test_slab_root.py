"""The directories of a store: what may be opened, by whom, and what is made good at opening."""

import fcntl
import gc
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_nixl.errors import StoreError, StoreFormatError
from hicache_nixl.stores import slab_rebuild, slab_root
from hicache_nixl.stores.slab import SlabStore
from hicache_nixl.stores.slab_database import IndexLostError
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_root import SlabRoot
from hicache_nixl.stores.slab_segments import SegmentFile
from hicache_nixl.stores.slab_sql import page_hash
from slabs import (
    KIB,
    chain_keys,
    check_files,
    check_slots,
    finish,
    lose_index,
    namespace,
    open_files,
    open_plain,
    query,
    start_child,
)

HOW: dict[str, Any] = {"segment": 32 * 8 * KIB, "capacity": 96 * 8 * KIB}


def test_checks_that_were_killed_leave_nothing(tmp_path: Path) -> None:
    """Their files are removed at the next opening; those of others stay."""
    directories = [tmp_path / "one", tmp_path / "two"]
    with open_plain(directories):
        pass
    ours = [directory / ".check-17-0123abcd" for directory in directories]
    foreign = directories[0] / ".check-in"
    for path in (*ours, foreign):
        path.touch()
    with open_plain(directories):
        assert [path.exists() for path in (*ours, foreign)] == [False, False, True]


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file of a store and what is in it."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def refused(*directories: Path) -> str:
    """The message with which directories are refused; it is one line."""
    with pytest.raises(StoreError) as caught:
        SlabStore(directories, capacity_bytes=1 << 20)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- what is refused --------------------------------------------------------------------------


def test_parent_is_missing(tmp_path: Path) -> None:
    """A directory is created, its parent is not: it may be a mount that is not there."""
    assert "does not exist; mount" in refused(tmp_path / "disk" / "store")
    assert not list(tmp_path.iterdir())


def test_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """A file is left alone."""
    (tmp_path / "store").write_text("mine")
    assert "no directory" in refused(tmp_path / "store")
    assert (tmp_path / "store").read_text() == "mine"
    assert "is no directory; name another" in refused(tmp_path / "store" / "below")


def test_read_only_file_system(read_only_disk: Path) -> None:
    """A place nobody can write to is said to be one."""
    assert "Read-only file system" in refused(read_only_disk / "store")
    assert "not writable" in refused(read_only_disk)


def test_full_file_system(small_disk: Callable[[int], Path]) -> None:
    """A disk without a free block is one line."""
    disk = small_disk(8)
    with (disk / "filler").open("wb") as file:
        while True:
            try:
                os.write(file.fileno(), bytes(4096))
            except OSError:
                break
    assert "No space left" in refused(disk / "store") or "full" in refused(disk / "store")
    (disk / "filler").unlink()
    with open_plain(disk / "store", **HOW):
        pass


def test_newer_format_is_left_untouched(root: Path) -> None:
    """A store of a newer version is refused as such, and not a byte of it changes."""
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("a", 5))
    description = json.loads((root / "store.json").read_text())
    (root / "store.json").write_text(json.dumps(description | {"format": 2, "more": 1}))
    before = snapshot(root)
    with pytest.raises(StoreFormatError, match=r"format 2.*upgrade"):
        SlabStore([root], capacity_bytes=1 << 20)
    assert snapshot(root) == before


def test_newer_index_is_left_untouched(root: Path) -> None:
    """So is an index of a newer version."""
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("a", 5))
    query(root, "PRAGMA user_version=7")
    before = snapshot(root)
    with pytest.raises(StoreFormatError, match=r"format 7.*upgrade"):
        SlabStore([root], capacity_bytes=1 << 20)
    assert snapshot(root) == before


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"format": 1}', '{"format": "1", "store": 1}', "\xff\x00"]
)
def test_description_that_is_none(root: Path, content: str) -> None:
    """A store.json that is not one is refused, not replaced."""
    root.mkdir()
    (root / "store.json").write_text(content, encoding="latin-1")
    assert "not a store description" in refused(root)
    assert (root / "store.json").read_text(encoding="latin-1") == content


def test_directories_of_different_stores(tmp_path: Path) -> None:
    """Directories are one store, in one order, or refused."""
    one, two, three, four = (tmp_path / name for name in ("1", "2", "3", "4"))
    for directories in ([one, two], [three], [four]):
        SlabStore(directories, capacity_bytes=1 << 20).close()
    assert "different stores" in refused(one, three)
    assert "same order" in refused(two, one)
    assert "same directories" in refused(one)
    assert "same directories" in refused(one, two, tmp_path / "5")
    assert "same order" in refused(two)
    assert "same directories" in refused(three, tmp_path / "6")
    shutil.rmtree(two)
    assert "not part of the store" in refused(one, two)


def test_directory_named_twice(tmp_path: Path) -> None:
    """One directory under two names would be two disks that are one."""
    (tmp_path / "link").symlink_to(tmp_path / "store")
    assert "named twice" in refused(tmp_path / "store", tmp_path / "store")
    (tmp_path / "store").mkdir(exist_ok=True)
    assert "named twice" in refused(tmp_path / "store", tmp_path / "link")


def test_interrupted_creation_is_finished(tmp_path: Path) -> None:
    """A process that died while it described the directories does not lock them for ever."""
    directories = [tmp_path / "1", tmp_path / "2"]
    child = start_child(
        "die", "hicache_nixl.stores.slab_root:write_json", "after", "", directories, HOW
    )
    finish(child)
    assert (directories[0] / "store.json").exists()
    assert not (directories[1] / "store.json").exists()
    with open_plain(directories, **HOW) as tenant:
        assert all(tenant.put(chain_keys("a", 40)))
    assert json.loads((directories[1] / "store.json").read_text())["directory"] == 1


# -- writers ----------------------------------------------------------------------------------


def test_strange_names_among_writers(root: Path) -> None:
    """Files that are no writers are ignored and kept."""
    with open_plain(root, **HOW):
        pass
    for name in ("README", "zz" * 16, "ab" * 15, ".tmp"):
        (root / "writers" / name).touch()
    (root / "writers" / ("ab" * 16)).touch()
    with open_plain(root, **HOW):
        assert {path.name for path in (root / "writers").iterdir()} >= {"README", "zz" * 16}
        assert not (root / "writers" / ("ab" * 16)).exists(), "a dead writer's file goes"


def test_claims_of_the_living_stay(root: Path) -> None:
    """Opening a store frees the slots of the dead, not of those who are writing."""
    with open_plain(root, **HOW) as tenant:
        index = tenant.store._opening.index
        tenant.put(chain_keys("a", 1))
        index.claim(
            count=3, record_bytes=8 * KIB, writer=tenant.store._opening.root.writer, evict=False
        )
        index.claim(count=4, record_bytes=8 * KIB, writer=b"\x01" * 16, evict=False)
        with open_plain(root, **HOW):
            assert check_slots(root).claimed == 3
    with open_plain(root, **HOW):
        assert check_slots(root).claimed == 0


def test_lock_is_waited_for_until_the_deadline(root: Path) -> None:
    """Growing waits for another process that opens or grows, but not for ever."""
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("a", 32))
        with (root / "lock").open("r+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            tenant.deadline_s = 0.3
            start = time.monotonic()
            assert not any(tenant.put(chain_keys("b", 5), prefix=chain_keys("a", 32)))
            assert 0.25 < time.monotonic() - start < 20
            assert all(tenant.get(chain_keys("a", 32)))
        tenant.store._opening.space._no_growth_until = 0
        assert all(tenant.put(chain_keys("b", 5)))


def test_failed_opening_leaves_nothing_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What opening acquired is released when it fails half-way."""
    with open_plain(root, **HOW):
        pass
    gc.collect()
    before = open_files()

    def fail(*arguments: object) -> None:
        raise StoreError("no")

    for owner, name in ((SlabRoot, "_agree"), (SlabIndex, "allocated_bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(StoreError, match="no"):
                SlabStore([root], capacity_bytes=1 << 20)
    assert open_files() <= before
    assert not list((root / "writers").iterdir())


# -- index and files --------------------------------------------------------------------------


def spoil(root: Path, how: str) -> None:
    path = root / "index.sqlite"
    content = path.read_bytes()
    if how == "deleted":
        lose_index(root)
    elif how == "only the journal is left":
        (root / "index.sqlite-wal").write_bytes(content)
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("this is no database, it says nothing " * 50)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2 // 1024 * 1024])
    elif how == "garbage in the middle":
        middle = len(content) // 4 // 1024 * 1024
        path.write_bytes(content[:middle] + b"\x5a" * 8192 + content[middle + 8192 :])
    elif how == "no tables":
        path.unlink()
        query(root, "CREATE TABLE something(x)")
    elif how == "marked":
        (root / "index.sqlite.lost").touch()


@pytest.mark.parametrize(
    "how",
    [
        "deleted",
        "only the journal is left",
        "empty",
        "text",
        "cut",
        "garbage in the middle",
        "no tables",
        "marked",
    ],
)
def test_lost_index_is_made_anew(root: Path, how: str) -> None:
    """The same pages are there again, from the trailers of their slots."""
    with open_plain(root, **HOW) as tenant:
        for name in "abcde":
            tenant.put(chain_keys(name, 30))
        before = {name: tenant.exists(chain_keys(name, 30)) for name in "abcde"}
        assert sum(before.values()) == 96
        pages = check_slots(root).pages
    spoil(root, how)
    # Damage in the middle may be found only when it is met; then the next start mends it.
    for _ in range(2):
        with open_plain(root, **HOW) as tenant:
            try:
                after = {name: tenant.exists(chain_keys(name, 30)) for name in "abcde"}
                assert {name: sum(tenant.get(chain_keys(name, 30))) for name in "abcde"} == after
            except IndexLostError:
                continue
            if how != "garbage in the middle":
                break
    assert after == before
    assert check_slots(root).pages == pages
    with open_plain(root, **HOW) as tenant:
        assert all(tenant.put(chain_keys("f", 40)))
        assert all(tenant.get(chain_keys("f", 40)))
        check_files([root])
    assert not list(root.glob("*.new*"))
    assert not (root / "index.sqlite.lost").exists()


def test_lost_index_is_not_replaced_under_others(root: Path) -> None:
    """While others go on with the old index, a new one would hand out the same slots twice."""
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("a", 5))
        (root / "index.sqlite").unlink()
        assert "1 other users" in refused(root)
        assert all(tenant.get(chain_keys("a", 5)))
    with open_plain(root, **HOW) as tenant:
        assert all(tenant.get(chain_keys("a", 5)))


def test_busy_index_is_not_lost(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble that passes does not cost the index."""
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("a", 5))
    before = query(root, "SELECT key, generation FROM pages")

    def fail(*arguments: object) -> None:
        raise StoreError("the index failed: database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(SlabIndex, "segments", fail)
        assert "locked" in refused(root)
    assert not list(root.glob("*broken*"))
    assert query(root, "SELECT key, generation FROM pages") == before


def test_index_older_than_the_slots(root: Path) -> None:
    """What a power loss can do: pages whose slots were reused since are misses, none is wrong."""
    older = root.parent / "older"
    with open_plain(root, **HOW) as tenant:
        for name in "abc":
            tenant.put(chain_keys(name, 32))
    shutil.copytree(root, older)
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("d", 20))
        tenant.put(chain_keys("a", 10))
        tenant.store.clear(namespace(4 * KIB, "none").digest)
    shutil.copy(older / "index.sqlite", root / "index.sqlite")
    with open_plain(root, **HOW) as tenant:
        assert tenant.exists(chain_keys("a", 32)) == 32, "the old index says so"
        for name in "abcd":
            tenant.get(chain_keys(name, 32))  # raises for a wrong byte
        found = {name: tenant.readable(chain_keys(name, 32)) for name in "abcd"}
        assert found["d"] == 0
        assert sum(found.values()) <= 96 - 20
        assert found["c"] == 32
        check_slots(root)
        assert all(page.good for page in tenant.store.verify())
        for number in range(4):
            assert all(tenant.put(chain_keys(number, 32)))
        assert check_slots(root).pages == 96


def test_index_older_than_the_segments(root: Path) -> None:
    """Segments that the index does not know (yet, or any more) are removed or forgotten."""
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("a", 32))
    older = (root / "index.sqlite").read_bytes()
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("b", 32))
    newer = (root / "index.sqlite").read_bytes()
    (root / "index.sqlite").write_bytes(older)
    with open_plain(root, **HOW) as tenant:
        assert tenant.exists(chain_keys("a", 32)) == 32
        assert tenant.exists(chain_keys("b", 32)) == 0
        check_files([root])
        tenant.put(chain_keys("c", 32))
    (root / "index.sqlite").write_bytes(newer)
    with open_plain(root, **HOW) as tenant:
        assert all(tenant.get(chain_keys("a", 32)))
        assert not any(tenant.get(chain_keys("b", 32)))
        check_files([root])
        check_slots(root)


def test_segment_that_cannot_be_restored(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A segment that was cut short on a full disk is given up, and the rest goes on."""
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("a", 64))
    first = sorted(root.glob("segment-*"))[0]
    os.truncate(first, 5)

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(slab_root, "restore_length", full)
        with open_plain(root, **HOW) as tenant:
            assert "No space left" in caplog.text
            assert tenant.readable(chain_keys("a", 64)) == 32
            check_files([root])


def test_copies_of_a_segment(root: Path) -> None:
    """A file under a second name is not a second set of pages."""
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("a", 32))
    (path,) = root.glob("segment-*")
    shutil.copy(path, root / "segment-00000077-8192.slab")
    lose_index(root)
    with open_plain(root, **HOW) as tenant:
        assert all(tenant.get(chain_keys("a", 32)))
        slots = check_slots(root)
        assert slots.pages == 32
        assert slots.pages + slots.vacant + slots.fresh == 64


# -- notes on namespaces ----------------------------------------------------------------------


def test_notes_that_are_missing_or_damaged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pages of a namespace without a readable manifest are not believed after a lost index."""
    keys = chain_keys("a", 5)
    for model in ("one", "two", "three"):
        with open_plain(root, model=model, **HOW) as tenant:
            tenant.put(keys)
    notes = root / "namespaces"
    (notes / f"{namespace(4 * KIB, 'one').digest.hex()}.json").unlink()
    (notes / f"{namespace(4 * KIB, 'two').digest.hex()}.json").write_text("{")
    (notes / "strange.json").write_text('{"manifest": {"format": 1}}')
    lose_index(root)
    for model, there in (("one", 0), ("two", 0), ("three", 5)):
        with open_plain(root, model=model, **HOW) as tenant:
            assert tenant.exists(keys) == there
            assert all(tenant.put(keys))
    assert "cannot be used" in caplog.text
    lose_index(root)
    for model in ("one", "two", "three"):
        with open_plain(root, model=model, **HOW) as tenant:
            assert all(tenant.get(keys)), "opening a namespace has mended its note"


def test_clear_without_a_note(root: Path) -> None:
    """A clear writes the note anew if somebody removed it."""
    keys = chain_keys("a", 5)
    with open_plain(root, **HOW) as tenant:
        tenant.put(keys)
        shutil.rmtree(root / "namespaces")
        (root / "namespaces").mkdir()
        assert tenant.store.clear(tenant.namespace.digest) == 5
    lose_index(root)
    with open_plain(root, **HOW) as tenant:
        assert tenant.exists(keys) == 0
        assert all(tenant.put(keys))


def test_opening_does_not_undo_a_clear(root: Path) -> None:
    """The tick of a clear outlives later openings, and later pages outlive the clear."""
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("a", 5))
        tenant.store.clear(tenant.namespace.digest)
    with open_plain(root, **HOW) as tenant:
        tenant.put(chain_keys("b", 5))
    lose_index(root)
    with open_plain(root, **HOW) as tenant:
        assert tenant.exists(chain_keys("a", 5)) == 0
        assert all(tenant.get(chain_keys("b", 5)))


# -- size -------------------------------------------------------------------------------------


def test_many_pages(root: Path) -> None:
    """300,000 pages: opening looks at segments only; a lost index takes a block a slot."""
    count, slots = 300_000, 16384
    with open_plain(root, segment=slots * 8 * KIB, capacity=20 * slots * 8 * KIB) as tenant:
        number = tenant.store._opening.number(tenant.namespace.digest)
        make_pages(tenant.store, number, count, slots)
    how: dict[str, Any] = {"segment": slots * 8 * KIB, "capacity": 20 * slots * 8 * KIB}
    seen: list[str] = []
    with open_plain(root, **how) as tenant:
        tenant.store._opening.index._database._writer.set_trace_callback(seen.append)
        keys = many_keys(count - 128, count)
        assert tenant.exists(keys) == 128
        assert len(seen) == 1


def many_keys(start: int, end: int) -> list[bytes]:
    return chain_keys("many", end - start, start)


def make_pages(store: SlabStore, number: int, count: int, slots: int) -> None:
    """Enter pages whose records were never written, in sparse files."""
    segments = {}
    for first in range(0, count, slots):
        segment = SegmentFile(store._opening.index.reserve_segment_id(), 0, 8 * KIB, slots)
        with segment.path(store._opening.root.directories).open("wb") as file:
            file.truncate(segment.nbytes)
        segments[segment] = set(range(min(slots, count - first)))
    names = list(segments)
    store._opening.index.restore(
        segments,
        (
            (page_hash(number, page), number, page, names[i // slots].id, i % slots,
             i // 128 + 1, 8 * KIB, i // 128 + 1, i % 128)
            for i, page in enumerate(many_keys(0, count))
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "reads"), [(64 * KIB, [4096] * 60), (4 * KIB, [60 * 8 * KIB - 4 * KIB])]
)
def test_scan(root: Path, monkeypatch: pytest.MonkeyPatch, payload: int, reads: list[int]) -> None:
    """Making an index anew reads one block of every large record, and small ones in one go."""
    size = payload + 4 * KIB
    how: dict[str, Any] = {"payload": payload, "segment": size * 60, "capacity": size * 60}
    with open_plain(root, **how) as tenant:
        tenant.put(chain_keys("a", 40))
        tenant.put(chain_keys("b", 5))
    lose_index(root)
    read: list[int] = []
    pread = os.pread

    def counting(descriptor: int, nbytes: int, offset: int) -> bytes:
        read.append(nbytes)
        return pread(descriptor, nbytes, offset)

    with monkeypatch.context() as patch:
        patch.setattr(slab_rebuild.os, "pread", counting)
        SlabStore([root], capacity_bytes=size * 60).close()
    assert read == reads
    with open_plain(root, **how) as tenant:
        assert all(tenant.get(chain_keys("a", 40)))
        assert all(tenant.get(chain_keys("b", 5)))
