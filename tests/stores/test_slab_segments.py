"""Segment files: names, preallocation, and which of them are open."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hicache_nixl.errors import StoreError, TransferError
from hicache_nixl.stores import slab_segments
from hicache_nixl.stores.slab_segments import (
    SegmentFile,
    SegmentTable,
    direct_io_refused,
    find_segments,
    preallocate,
    remove,
    restore_length,
)
from hicache_nixl.transfer import TransferEngine
from slabs import KIB, MIB, allocated, open_files
from support import engines

SIZE = 8 * KIB


def test_names_tell_everything(tmp_path: Path) -> None:
    """Id, record size and number of slots come back from name and length; others are ignored."""
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    made = [SegmentFile(12, 0, SIZE, 3), SegmentFile(123456789, 1, 3 * SIZE, 2)]
    for segment in made:
        preallocate(directories, segment)
    for name in ("segment-1-8192.slab", "segment-00000001-0.slab", "segment-x", "store.json"):
        (directories[0] / name).write_bytes(b"x")
    assert find_segments(directories) == made
    os.truncate(made[0].path(directories), 2 * SIZE + 100)
    assert find_segments(directories)[0].slots == 2
    assert restore_length(directories, made[0]) == SIZE - 100
    assert restore_length(directories, made[0]) == 0
    assert find_segments(directories) == made


def test_all_blocks_are_taken_at_once(tmp_path: Path) -> None:
    """A segment never meets a full disk later, and is not made twice."""
    segment = SegmentFile(1, 0, MIB, 4)
    preallocate([tmp_path], segment)
    assert allocated([tmp_path]) == 4 * MIB
    with pytest.raises(FileExistsError):
        preallocate([tmp_path], segment)


def test_full_disk_leaves_nothing(small_disk: Callable[[int], Path]) -> None:
    """A segment that does not fit is an ENOSPC and no file."""
    disk = small_disk(16)
    with pytest.raises(OSError, match="No space left") as caught:
        preallocate([disk], SegmentFile(1, 0, MIB, 64))
    assert caught.value.errno == errno.ENOSPC
    assert find_segments([disk]) == []


def test_removal_frees_blocks_that_others_hold(tmp_path: Path) -> None:
    """Blocks are free at once, although another process still has the file open."""
    segment = SegmentFile(1, 0, MIB, 4)
    preallocate([tmp_path], segment)
    descriptor = os.open(segment.path([tmp_path]), os.O_RDONLY)
    try:
        remove([tmp_path], segment)
        assert os.fstat(descriptor).st_blocks == 0
        remove([tmp_path], segment)
    finally:
        os.close(descriptor)


class Segments:
    """Four segments of ten slots on disk, and a table of them."""

    def __init__(self, directory: Path, *engines: TransferEngine) -> None:
        self.directory = directory
        self.there = {id_: SegmentFile(id_, 0, SIZE, 10) for id_ in range(1, 5)}
        for segment in self.there.values():
            preallocate([directory], segment)
        self.table = SegmentTable([directory], engines, True, self.there.get)

    def use(self, *ids: int) -> list[int]:
        """Rows of these segments that can be used."""
        with self.table.extents(np.array(ids), np.arange(len(ids))) as (extents, rows):
            assert len(extents) == len(rows)
            for row, file, offset in zip(rows, extents.files, extents.offsets, strict=True):
                assert os.fstat(file).st_ino == self.inode(ids[row])
                assert offset == row * SIZE
            return list(rows)

    def inode(self, id_: int) -> int:
        return self.there[id_].path([self.directory]).stat().st_ino


def test_files_are_opened_once(tmp_path: Path) -> None:
    """Extents name the right file and offset; a second use opens nothing."""
    segments = Segments(tmp_path)
    before = open_files("segment-")
    assert segments.use(1, 2, 1) == [0, 1, 2]
    assert segments.use(2, 1) == [0, 1]
    assert open_files("segment-") == before + 2
    assert segments.table.known() == {1, 2}
    segments.table.close()
    segments.table.close()
    assert open_files("segment-") == before


def test_unusable_segments(tmp_path: Path) -> None:
    """Rows of unknown, missing and unreadable segments are left out, each for itself."""
    segments = Segments(tmp_path)
    segments.there[3].path([tmp_path]).unlink()
    segments.there[4].path([tmp_path]).unlink()
    segments.there[4].path([tmp_path]).mkdir()
    assert segments.use(1, 99, 3, 2, 4) == [0, 3]
    assert segments.table.is_missing(3)
    assert segments.table.take_missing() == [segments.there[3]]
    assert segments.table.take_missing() == []
    assert not segments.table.is_missing(3)
    segments.table.close()


def test_dropped_file_stays_open_for_its_users(tmp_path: Path) -> None:
    """A segment that is dropped in the middle of its use is closed after it."""
    segments = Segments(tmp_path)
    before = open_files("segment-")
    with segments.table.extents(np.array([1]), np.array([0])) as (extents, _):
        free = segments.table.keep_open(np.array([1, 1]))
        segments.table.drop({1, 2})
        os.fstat(extents.files[0])
    assert open_files("segment-") == before + 1
    free()
    assert open_files("segment-") == before
    assert segments.use(1) == [0], "it would be opened again"
    segments.table.close()


def test_trouble_while_looking_up_leaves_nothing_held(tmp_path: Path) -> None:
    """An index that fails in the middle does not leave segments in use."""
    segments = Segments(tmp_path)

    def describe(id_: int) -> SegmentFile | None:
        if id_ == 2:
            raise StoreError("locked")
        return segments.there[id_]

    segments.table = SegmentTable([tmp_path], (), True, describe)
    with pytest.raises(StoreError):
        segments.use(1, 2)
    before = open_files("segment-")
    segments.table.close()
    assert open_files("segment-") == before - 1


def test_registrations_end_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine knows a file while it is open, once, and a refusal leaves nothing behind."""
    with engines() as both:
        segments = Segments(tmp_path, *both)
        before = open_files("segment-")
        segments.use(1, 2)
        assert [len(engine._registrations._devices) for engine in both] == [2, 2]
        segments.table.drop({1})
        assert [len(engine._registrations._devices) for engine in both] == [1, 1]

        def refuse(descriptor: int, nbytes: int) -> None:
            raise TransferError("no")

        with monkeypatch.context() as patch:
            patch.setattr(both[1], "register_file", refuse)
            assert segments.use(3, 2) == [1]
        assert [len(engine._registrations._devices) for engine in both] == [1, 1]
        segments.table.close()
        assert [len(engine._registrations._devices) for engine in both] == [0, 0]
        assert open_files("segment-") == before


def test_direct_io_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe leaves no file, reports a refusal, and says what is wrong with the directory."""
    assert direct_io_refused(tmp_path) is None
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreError, match="make it writable"):
        direct_io_refused(tmp_path / "missing")

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(slab_segments.os, "pwritev", refuse)
    assert direct_io_refused(tmp_path) == "Invalid argument"
    assert not list(tmp_path.iterdir())
