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
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hicache_nixl.errors import HiCacheNixlError, StoreError, StoreFormatError
from hicache_nixl.identity import Namespace, namespace_from_manifest
from hicache_nixl.stores.directory import as_store_error, make_directory, write_json
from hicache_nixl.stores.slab_database import IndexLostError, lost_mark
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_rebuild import rebuild
from hicache_nixl.stores.slab_segments import find_segments, remove, restore_length

logger = logging.getLogger(__name__)

FORMAT = 1
_WRITER_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_LOCK_POLL_S = 0.005


class SlabRoot:
    """The directories of one store. The first holds everything but segments of the others."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = list(directories)
        self.first = self.directories[0]
        self.writer = secrets.token_bytes(16)
        self.store = ""
        self._writer_file: int | None = None

    # -- directories --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the directories, or check that they are this store's and of a known format."""
        for directory in self.directories:
            make_directory(directory)
        if len({directory.resolve() for directory in self.directories}) < len(self.directories):
            raise StoreError(
                f"{', '.join(map(str, self.directories))}: a directory is named twice; "
                "name each once"
            )
        with as_store_error(self.first):
            (self.first / "writers").mkdir(exist_ok=True)
            (self.first / "namespaces").mkdir(exist_ok=True)
        with self.locked():
            self._describe()

    def rejoin(self, store: str) -> None:
        """See that the directories hold that store. None is made: a directory that is empty may be
        one on which nothing is mounted now. Raises StoreError."""
        for number, directory in enumerate(self.directories):
            found = _read_description(directory)
            if found is None or (found["store"], found["directory"]) != (store, number):
                raise StoreError(
                    f"{directory} does not hold the store that was opened there; bring it back, or "
                    "start again to make a new one"
                )
        self.store = store
        with as_store_error(self.first):
            (self.first / "writers").mkdir(exist_ok=True)
            (self.first / "namespaces").mkdir(exist_ok=True)

    def _describe(self) -> None:
        """See that each directory says which one it is, of which store."""
        described = [_read_description(directory) for directory in self.directories]
        stores = {found["store"] for found in described if found is not None}
        if len(stores) > 1:
            raise StoreError(
                f"{', '.join(map(str, self.directories))} belong to different stores; "
                "name the directories of one store, or empty ones"
            )
        store = self.store = stores.pop() if stores else secrets.token_hex(16)
        # Until there is an index, the store was never opened: a crash while it was made.
        unfinished = not (self.first / "index.sqlite").exists()
        for number, (directory, found) in enumerate(zip(self.directories, described, strict=True)):
            wanted = {
                "format": FORMAT,
                "store": store,
                "directory": number,
                "directories": len(self.directories),
            }
            if found is None:
                if any(described) and not unfinished:
                    raise StoreError(
                        f"{directory} is not part of the store that the other directories belong "
                        "to; name the same directories as when it was made"
                    )
                write_json(directory / "store.json", wanted)
            elif found != wanted:
                raise StoreError(
                    f"{directory} is directory {found['directory']} of {found['directories']} of "
                    "its store; name the same directories in the same order as when it was made"
                )

    @contextlib.contextmanager
    def locked(self, deadline: float | None = None) -> Iterator[None]:
        """Be the only one that opens, grows or shrinks this store.

        Blocks; with a `deadline` (`time.monotonic`) at most until then, StoreError after it.
        """
        path = self.first / "lock"
        with as_store_error(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if deadline is None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            while deadline is not None and not _try_lock(descriptor):
                if time.monotonic() >= deadline:
                    raise StoreError(f"{path} is held by another process that opens or grows it")
                time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    # -- writers ------------------------------------------------------------------------------

    def _sign_in(self) -> None:
        """Be known as alive, until `sign_out` or the end of the process. The lock is held, or
        somebody who reaps could come between creating the file and locking it."""
        path = self.first / "writers" / self.writer.hex()
        with as_store_error(path):
            self._writer_file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._writer_file, fcntl.LOCK_EX)

    def sign_out(self) -> None:
        """End being a writer, which frees what it still claims. Idempotent."""
        descriptor, self._writer_file = self._writer_file, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the directory may be gone; the lock is what counts
                (self.first / "writers" / self.writer.hex()).unlink(missing_ok=True)
            os.close(descriptor)

    def _reap(self, index: SlabIndex) -> None:
        """Free the slots that dead writers had claimed."""
        alive = self._writers()
        for writer in index.claiming_writers() - alive:
            freed = index.end_claims(writer)
            logger.info("freed %d slots that a writer left behind", freed)

    def _writers(self) -> set[bytes]:
        """Who is alive; the files of the dead are removed."""
        alive = set()
        for path in (self.first / "writers").iterdir():
            if _WRITER_NAME.fullmatch(path.name):
                if path.name == self.writer.hex() or _is_locked(path):
                    alive.add(bytes.fromhex(path.name))
                else:
                    path.unlink(missing_ok=True)
        return alive

    # -- namespaces ---------------------------------------------------------------------------

    def note_namespace(self, namespace: Namespace) -> None:
        """Keep the manifest where people, and a scan without an index, find it."""
        with self.locked():
            if _read_note(self._note(namespace.digest)) is None:
                self._write_note(namespace, 0)

    def note_clear(self, namespace: Namespace, tick: int) -> None:
        """Keep pages that were cleared from coming back when the index is rebuilt."""
        with self.locked():
            self._write_note(namespace, tick)

    def _note(self, digest: bytes) -> Path:
        return self.first / "namespaces" / f"{digest.hex()}.json"

    def _write_note(self, namespace: Namespace, cleared_at: int) -> None:
        content = {"manifest": namespace.manifest, "cleared_at": cleared_at}
        write_json(self._note(namespace.digest), content)

    def _noted_namespaces(self) -> dict[bytes, tuple[Namespace, int]]:
        notes = (_read_note(path) for path in sorted((self.first / "namespaces").glob("*.json")))
        return {note[0].digest: note for note in notes if note is not None}

    # -- opening ------------------------------------------------------------------------------

    def open_index(self, *, busy_timeout_s: float) -> SlabIndex:
        """The index, in agreement with the segment files; made anew from them if it is lost.

        Signs in as a writer. Raises StoreError.
        """
        path = self.first / "index.sqlite"
        with self.locked(), as_store_error(self.first):
            others = self._writers()
            self._sign_in()
            index = None
            try:
                try:
                    if lost_mark(path).exists():
                        raise IndexLostError(f"the index {path} was found damaged")
                    index = SlabIndex(path, busy_timeout_s=busy_timeout_s)
                    self._reap(index)
                    self._agree(index)
                except IndexLostError as error:
                    if index is not None:
                        index.close()
                    if others:
                        raise StoreError(
                            f"{error}, and {len(others)} other users of {self.first} are running; "
                            "stop them, then start again"
                        ) from error
                    self._make_anew(path, busy_timeout_s, str(error))
                    index = SlabIndex(path, busy_timeout_s=busy_timeout_s)
                    self._agree(index)
            except BaseException:
                if index is not None:
                    index.close()
                self.sign_out()
                raise
        return index

    def _make_anew(self, path: Path, busy_timeout_s: float, why: str) -> None:
        """Build an index beside the place of the lost one, then put it there."""
        if path.exists():
            broken = path.with_name(path.name + ".broken")
            logger.warning("%s; it is kept as %s", why, broken.name)
            path.rename(broken)
        draft = path.with_name(path.name + ".new")
        for stale in (path, draft):  # a journal must not be taken for that of the new index
            for suffix in ("", "-wal", "-shm"):
                stale.with_name(stale.name + suffix).unlink(missing_ok=True)
        index = SlabIndex(draft, busy_timeout_s=busy_timeout_s, create=True)
        try:
            rebuild(index, self.directories, self._noted_namespaces())
        finally:
            index.close()  # which leaves no journal behind
        draft.rename(path)
        lost_mark(path).unlink(missing_ok=True)

    def _agree(self, index: SlabIndex) -> None:
        """Bring index and files together after a crash or after somebody's hands."""
        there = {(s.id, s.directory, s.record_bytes): s for s in find_segments(self.directories)}
        for segment in index.segments():
            path = segment.path(self.directories)
            found = there.pop((segment.id, segment.directory, segment.record_bytes), None)
            if found is None:
                lost = index.drop_segment(segment)
                logger.warning("%s is gone; forgot its %s pages", path, lost)
            elif found.slots < segment.slots:
                lost = index.forget_slots_from(segment, found.slots)
                try:
                    missing = restore_length(self.directories, segment)
                except OSError as error:
                    logger.warning("%s is cut short and cannot grow: %s", path, error.strerror)
                    if index.drop_segment(segment) is not None:
                        remove(self.directories, segment)
                    continue
                logger.warning(
                    "%s was %d bytes short; forgot %d pages and restored its length",
                    path,
                    missing,
                    lost,
                )
        for unknown in there.values():
            remove(self.directories, unknown)


def _read_description(directory: Path) -> dict[str, Any] | None:
    path = directory / "store.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        content = None
    if (
        not isinstance(content, dict)
        or not {"format", "store", "directory", "directories"} <= content.keys()
        or not isinstance(content["format"], int)
    ):
        if isinstance(content, dict) and content.get("kind") == "files":
            raise StoreError(f"{path} describes a files store; name it by files://{directory}")
        raise StoreError(f"{path} is not a store description; restore it or use another directory")
    if content["format"] > FORMAT:
        raise StoreFormatError(
            f"{directory} holds a store of format {content['format']}, this version reads up to "
            f"{FORMAT}; upgrade hicache-nixl or use another directory"
        )
    return content


def _read_note(path: Path) -> tuple[Namespace, int] | None:
    """A namespace and when it was cleared; None if the file is not there or is not whole."""
    try:
        content = json.loads(path.read_text())
        return namespace_from_manifest(content["manifest"]), int(content["cleared_at"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, HiCacheNixlError) as error:
        logger.warning("%s cannot be used: %s", path, error)
        return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)
