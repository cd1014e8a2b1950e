"""The directories of a slab store: who may open them, and the way from a crash back to order.

<first directory>/index.sqlite          slab_index.py
<first directory>/lock                  flock: held while opening, growing and shrinking
<first directory>/writers/<id>          flock: held by each open writer; no lock, no writer
<first directory>/namespaces/<digest>   manifest, and the tick of the last clear
<each directory>/store.json             format, which store, which directory of how many
<each directory>/segment-*.slab         slab_segments.py
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hicache_nixl import record
from hicache_nixl.errors import StoreError, StoreFormatError
from hicache_nixl.identity import Namespace, namespace_from_manifest
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_segments import SegmentFile, find_segments, restore_length

logger = logging.getLogger(__name__)

FORMAT = 1
_SCAN_THREADS = 8
_SCAN_CHUNK = 256


class SlabRoot:
    """The directories of one store. The first holds everything but segments of the others."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = list(directories)
        self.first = self.directories[0]
        self.writer = secrets.token_bytes(16)
        self._writer_file: int | None = None

    def prepare(self) -> None:
        """Create the directories, or check that they are this store's and of a known format."""
        for directory in self.directories:
            if not directory.parent.is_dir():
                raise StoreError(
                    f"{directory} cannot hold a store: {directory.parent} does not exist; mount "
                    "or create it"
                )
            try:
                directory.mkdir(exist_ok=True)
            except OSError as error:
                raise StoreError(f"{directory} cannot hold a store: {error.strerror}") from error
            if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
                raise StoreError(
                    f"{directory} cannot hold a store: not writable for uid {os.getuid()}"
                )
        (self.first / "writers").mkdir(exist_ok=True)
        (self.first / "namespaces").mkdir(exist_ok=True)
        with self.locked():
            described = [_read_description(directory) for directory in self.directories]
            stores = {d["store"] for d in described if d is not None}
            store = stores.pop() if stores else secrets.token_hex(16)
            if stores:
                raise StoreError(
                    f"{', '.join(map(str, self.directories))} belong to different stores; "
                    "name the directories of one store, or empty ones"
                )
            for number, (directory, found) in enumerate(
                zip(self.directories, described, strict=True)
            ):
                wanted = {
                    "format": FORMAT,
                    "store": store,
                    "directory": number,
                    "directories": len(self.directories),
                }
                if found is None and any(d is not None for d in described):
                    raise StoreError(
                        f"{directory} is not part of the store that the other directories "
                        "belong to; name the same directories as when it was made"
                    )
                if found is not None and found != wanted:
                    raise StoreError(
                        f"{directory} is directory {found['directory']} of "
                        f"{found['directories']} of its store; name the same directories in the "
                        "same order as when it was made"
                    )
                if found is None:
                    _write_json(directory / "store.json", wanted)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that opens, grows or shrinks this store. Blocks."""
        descriptor = os.open(self.first / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # -- writers ------------------------------------------------------------------------------

    def sign_in(self) -> None:
        """Be known as alive, until `sign_out` or the end of the process."""
        path = self.first / "writers" / self.writer.hex()
        self._writer_file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._writer_file, fcntl.LOCK_EX)

    def sign_out(self) -> None:
        """The opposite of `sign_in`. Idempotent."""
        descriptor, self._writer_file = self._writer_file, None
        if descriptor is not None:
            (self.first / "writers" / self.writer.hex()).unlink(missing_ok=True)
            os.close(descriptor)

    def reap_dead_writers(self, index: SlabIndex) -> int:
        """Free the slots that dead writers had claimed; how many."""
        freed = 0
        for writer in index.claiming_writers():
            if not self._is_alive(writer):
                freed += index.end_claims(writer)
        for path in (self.first / "writers").iterdir():
            if not self._is_alive(bytes.fromhex(path.name)):
                path.unlink(missing_ok=True)
        return freed

    def _is_alive(self, writer: bytes) -> bool:
        if writer == self.writer:
            return True
        try:
            descriptor = os.open(self.first / "writers" / writer.hex(), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    # -- namespaces ---------------------------------------------------------------------------

    def note_namespace(self, namespace: Namespace) -> None:
        """Keep the manifest where people, and a scan without an index, find it."""
        path = self.first / "namespaces" / f"{namespace.digest.hex()}.json"
        if not path.exists():
            _write_json(path, {"manifest": namespace.manifest, "cleared_at": 0})

    def note_clear(self, digest: bytes, tick: int) -> None:
        """Keep pages that were cleared from coming back when the index is rebuilt."""
        path = self.first / "namespaces" / f"{digest.hex()}.json"
        _write_json(path, json.loads(path.read_text()) | {"cleared_at": tick})

    def _noted_namespaces(self) -> list[tuple[Namespace, int]]:
        noted = []
        for path in sorted((self.first / "namespaces").glob("*.json")):
            content = json.loads(path.read_text())
            noted.append((namespace_from_manifest(content["manifest"]), content["cleared_at"]))
        return noted

    # -- opening ------------------------------------------------------------------------------

    def open_index(self, *, busy_timeout_s: float) -> SlabIndex:
        """The index, in agreement with the segment files; made anew from them if it is lost."""
        path = self.first / "index.sqlite"
        with self.locked():
            fresh = not path.exists()
            index = None
            if not fresh:
                try:
                    index = SlabIndex(path, busy_timeout_s=busy_timeout_s)
                    index.segments()
                except StoreError as error:
                    aside = path.with_name(f"index.sqlite.broken-{time.time_ns()}")
                    logger.warning("%s; moved to %s, making a new one", error, aside.name)
                    if index is not None:
                        index.close()
                    _move_aside(path, aside)
                    index = None
            if index is None:
                index = SlabIndex(path, busy_timeout_s=busy_timeout_s)
                self._rebuild(index)
            else:
                self.reap_dead_writers(index)
                self._agree(index)
        return index

    def _agree(self, index: SlabIndex) -> None:
        """Bring index and files together after a crash or after somebody's hands."""
        known = {segment.id: segment for segment in index.segments()}
        there = {segment.id: segment for segment in find_segments(self.directories)}
        for id_, segment in known.items():
            found = there.get(id_)
            if found is None or found.path([Path()] * 99) != segment.path([Path()] * 99):
                lost = index.drop_segment(segment)
                logger.warning(
                    "%s is gone; forgot its %s pages", segment.path(self.directories), lost
                )
            elif found.slots < segment.slots:
                lost = index.forget_slots_from(segment, found.slots)
                missing = restore_length(self.directories, segment)
                logger.warning(
                    "%s was %d bytes short; forgot %d pages and restored its length",
                    segment.path(self.directories),
                    missing,
                    lost,
                )
        for id_ in there.keys() - known.keys():
            there[id_].path(self.directories).unlink()

    def _rebuild(self, index: SlabIndex) -> None:
        segments = [s for s in find_segments(self.directories) if s.slots > 0]
        if not segments:
            return
        start = time.monotonic()
        numbers: dict[bytes, tuple[int, int]] = {}
        for namespace, cleared_at in self._noted_namespaces():
            numbers[namespace.digest] = (index.add_namespace(namespace), cleared_at)
        best: dict[tuple[int, bytes], tuple[int, int, int, int, int]] = {}
        for segment in segments:
            for slot, trailer in self._scan(segment):
                number, cleared_at = numbers.get(trailer.namespace, (None, 0))
                if number is None or trailer.generation <= cleared_at:
                    continue
                found = (trailer.generation, segment.id, slot, segment.record_bytes, trailer.depth)
                best[(number, trailer.key)] = max(best.get((number, trailer.key), found), found)
        used: dict[int, set[int]] = {segment.id: set() for segment in segments}
        rows = []
        for (number, key), (generation, id_, slot, size, depth) in best.items():
            used[id_].add(slot)
            rows.append((number, key, id_, slot, generation, size, generation, depth))
        for segment in segments:
            index.add_segment(segment, set(range(segment.slots)) - used[segment.id])
        index.restore_pages(rows)
        logger.warning(
            "made a new index of %d pages from %d segments in %.1f s",
            len(rows),
            len(segments),
            time.monotonic() - start,
        )

    def _scan(self, segment: SegmentFile) -> Iterator[tuple[int, record.Trailer]]:
        """The intact trailers of one segment, by slot. Page cache is used: blocks are few."""
        offset = segment.record_bytes - record.TRAILER_BYTES
        descriptor = os.open(segment.path(self.directories), os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

        def read(slots: range) -> list[tuple[int, record.Trailer]]:
            found = []
            for slot in slots:
                block = os.pread(
                    descriptor, record.TRAILER_BYTES, slot * segment.record_bytes + offset
                )
                if len(block) < record.TRAILER_BYTES or not block.startswith(record.MAGIC):
                    continue
                trailer = record.parse_trailer(np.frombuffer(block, np.uint8))
                if trailer and record.record_bytes(trailer.payload_bytes) == segment.record_bytes:
                    found.append((slot, trailer))
            return found

        chunks = [
            range(start, min(start + _SCAN_CHUNK, segment.slots))
            for start in range(0, segment.slots, _SCAN_CHUNK)
        ]
        try:
            with ThreadPoolExecutor(_SCAN_THREADS) as pool:
                for found in pool.map(read, chunks):
                    yield from found
        finally:
            os.close(descriptor)


def _read_description(directory: Path) -> dict[str, Any] | None:
    path = directory / "store.json"
    try:
        content = json.loads(path.read_text())
        known = {"format", "store", "directory", "directories"} <= content.keys()
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise StoreError(f"{path} is not a store description; restore it or remove it") from error
    if not known or not isinstance(content["format"], int):
        raise StoreError(f"{path} is not a store description; restore it or remove it")
    if content["format"] > FORMAT:
        raise StoreFormatError(
            f"{directory} holds a store of format {content['format']}, this version reads up to "
            f"{FORMAT}; upgrade hicache-nixl or use another directory"
        )
    return dict(content)


def _write_json(path: Path, content: object) -> None:
    """Write whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with draft.open("w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def _move_aside(path: Path, aside: Path) -> None:
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
