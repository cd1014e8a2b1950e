"""Segment files: preallocated files that are cut into slots, one slot a page record.

    <directory>/segment-<id>-<record bytes>.slab      slot i at offset i * record bytes

Name and length of a file say all that is needed to read it without an index. This module owns
opening, preallocating, registering and closing them; which slot holds what, it does not know.
"""

import contextlib
import errno
import logging
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_nixl.batch import Extents
from hicache_nixl.errors import StoreError, TransferError
from hicache_nixl.registrations import Registration
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)

_NAME = re.compile(r"segment-(\d{8,})-([1-9]\d*)\.slab", re.ASCII)
_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class SegmentFile:
    """One segment: which file, and its slots."""

    id: int
    directory: int
    record_bytes: int
    slots: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.record_bytes

    def path(self, directories: Sequence[Path]) -> Path:
        """Where the file is."""
        return directories[self.directory] / f"segment-{self.id:08d}-{self.record_bytes}.slab"


def find_segments(directories: Sequence[Path]) -> list[SegmentFile]:
    """The segments that lie in `directories`, as far as their names and lengths tell."""
    found = []
    for number, directory in enumerate(directories):
        for entry in os.scandir(directory):
            match = _NAME.fullmatch(entry.name)
            if match:
                size = int(match[2])
                slots = entry.stat().st_size // size
                found.append(SegmentFile(int(match[1]), number, size, slots))
    return sorted(found, key=lambda segment: segment.id)


def preallocate(directories: Sequence[Path], segment: SegmentFile) -> None:
    """Create the file of a segment with all its blocks. OSError (ENOSPC) leaves nothing behind."""
    path = segment.path(directories)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, segment.nbytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def remove(directories: Sequence[Path], segment: SegmentFile) -> None:
    """Delete the file of a segment. Its blocks are free at once, whoever still has it open."""
    path = segment.path(directories)
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, 0)
        path.unlink()


def restore_length(directories: Sequence[Path], segment: SegmentFile) -> int:
    """Bytes that were missing at the end of a segment file, which are allocated again."""
    path = segment.path(directories)
    missing = segment.nbytes - path.stat().st_size
    if missing > 0:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, segment.nbytes)
        finally:
            os.close(descriptor)
    return max(0, missing)


def direct_io_refused(directory: Path) -> str | None:
    """None if `directory` takes O_DIRECT reads and writes, else why not. Tries it for real."""
    path = directory / f".direct-io-probe-{os.getpid()}-{threading.get_ident()}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NO_DIRECT_IO:
            path.unlink(missing_ok=True)
            return error.strerror
        raise StoreError(
            f"{directory} cannot hold a store ({error.strerror}); make it writable for uid "
            f"{os.getuid()}"
        ) from error
    try:
        with mmap.mmap(-1, 4096) as block:
            os.pwritev(descriptor, [block], 0)
            os.preadv(descriptor, [block], 0)
    except OSError as error:
        return error.strerror
    finally:
        os.close(descriptor)
        path.unlink()
    return None


class _OpenSegment:
    def __init__(self, segment: SegmentFile, descriptor: int) -> None:
        self.segment = segment
        self.descriptor = descriptor
        self.registrations: list[tuple[TransferEngine, Registration]] = []
        self.users = 0
        self.dropped = False


class SegmentTable:
    """The segment files that are open in this process, each registered once with each engine.

    Safe for threads. A file that was dropped is closed when its last user is done.

    Args:
        describe: the segment of an id, None if there is none (any more).
    """

    def __init__(
        self,
        directories: Sequence[Path],
        engines: Sequence[TransferEngine],
        direct_io: bool,
        describe: Callable[[int], SegmentFile | None],
    ) -> None:
        self._directories = directories
        self._engines = engines
        self._describe = describe
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct_io else 0)
        self._lock = threading.Lock()
        self._open: dict[int, _OpenSegment] = {}
        self._missing: dict[int, SegmentFile] = {}

    @contextlib.contextmanager
    def extents(
        self, segments: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> Iterator[tuple[Extents, npt.NDArray[np.int64]]]:
        """Extents of those slots whose file is there and open, and which rows these are.

        The files stay open until the block ends; transfers that outlive it must hold `keep_open`.
        """
        files = np.zeros(len(segments), np.int64)
        offsets = np.zeros(len(segments), np.int64)
        usable = np.zeros(len(segments), np.bool_)
        held: list[_OpenSegment] = []
        try:
            for id_ in np.unique(segments):
                opened = self._acquire(int(id_))
                if opened is None:
                    continue
                held.append(opened)
                here = segments == id_
                files[here] = opened.descriptor
                offsets[here] = slots[here] * opened.segment.record_bytes
                usable |= here
            rows = np.flatnonzero(usable)
            yield Extents(files[rows], offsets[rows]), rows
        finally:
            for opened in held:
                self._release(opened)

    def keep_open(self, segments: npt.NDArray[np.int64]) -> Callable[[], None]:
        """Hold open segments past their block, until the returned function is called."""
        with self._lock:
            held = [self._open[int(id_)] for id_ in np.unique(segments)]
            for opened in held:
                opened.users += 1

        def done() -> None:
            for opened in held:
                self._release(opened)

        return done

    def drop(self, ids: set[int]) -> None:
        """Close segments that exist no more, as soon as nobody uses them."""
        with self._lock:
            for id_ in ids & self._open.keys():
                opened = self._open[id_]
                opened.dropped = True
                if opened.users == 0:
                    self._close(opened)

    def known(self) -> set[int]:
        """Ids of the segments that are open."""
        with self._lock:
            return set(self._open)

    def is_missing(self, id_: int) -> bool:
        """Whether the file of a segment was found to be gone."""
        return id_ in self._missing

    def take_missing(self) -> list[SegmentFile]:
        """Segments whose files turned out to be gone since the last call."""
        with self._lock:
            missing, self._missing = self._missing, {}
        return list(missing.values())

    def close(self) -> None:
        """Close every file that no late transfer still needs. Idempotent."""
        self.drop(self.known())

    def _acquire(self, id_: int) -> _OpenSegment | None:
        with self._lock:
            opened = self._open.get(id_)
            if opened is None:
                segment = self._describe(id_)
                opened = None if segment is None else self._open_file(segment)
            if opened is not None:
                opened.users += 1
            return opened

    def _open_file(self, segment: SegmentFile) -> _OpenSegment | None:
        path = segment.path(self._directories)
        try:
            descriptor = os.open(path, self._flags)
        except FileNotFoundError:
            self._missing[segment.id] = segment
            return None
        except OSError as error:
            logger.warning("%s cannot be opened: %s", path, error.strerror)
            return None
        opened = _OpenSegment(segment, descriptor)
        try:
            for engine in self._engines:
                registration = engine.register_file(descriptor, segment.nbytes)
                opened.registrations.append((engine, registration))
        except TransferError as error:
            logger.warning("%s cannot be registered: %s", path, error)
            self._close(opened)
            return None
        self._open[segment.id] = opened
        return opened

    def _release(self, opened: _OpenSegment) -> None:
        with self._lock:
            opened.users -= 1
            if opened.users == 0 and opened.dropped:
                self._close(opened)

    def _close(self, opened: _OpenSegment) -> None:
        self._open.pop(opened.segment.id, None)
        try:
            for engine, registration in opened.registrations:
                engine.deregister(registration)
        except TransferError as error:  # then NIXL may still use the descriptor: it stays open
            logger.warning("%s", error)
        else:
            os.close(opened.descriptor)
