"""The files of one namespace: looked at, opened, written under another name, put in place.

Each function makes a few file system calls for one page and runs on a thread that may be held up
(`files_crew.py`). Existence is asked page by page: the 512 keys of a call lie in as many of the
65,536 directories, so that listing them would be a call or more for each as well.

A client of NFS may answer from its cache for up to a minute. A page of another host that it does
not show yet is only a miss; one that it still shows is opened before it is read, which asks the
server.
"""

import ctypes
import errno
import itertools
import logging
import os
import resource
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hicache_nixl import record
from hicache_nixl.errors import StoreError
from hicache_nixl.identity import Namespace
from hicache_nixl.stores.directory import NO_ROOM
from hicache_nixl.stores.files_layout import FilesRoot, Owner, page_path, temporary_path
from hicache_nixl.stores.files_verify import remove_if_same

logger = logging.getLogger(__name__)

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_GONE = (errno.ENOENT, errno.ESTALE)
_NO_PAGE = (errno.ENOENT, errno.ENOTDIR)
_IN_OUR_PLACE = (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)
_ATTEMPTS = 4  # directories go while they are empty, which they are for an instant only
_LOG_PAUSE_S = 60.0
_MOST_DESCRIPTORS = 512
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class OpenPage:
    """A page that is open for reading; its descriptor belongs to whoever has this."""

    key: bytes
    descriptor: int
    facts: os.stat_result


@dataclass(frozen=True)
class Draft:
    """A page that is being written under another name; as OpenPage."""

    key: bytes
    descriptor: int
    path: str


def stat_page(path: str, directory: int) -> os.stat_result:
    """The one call that `exists` makes for a page."""
    return os.stat(path, dir_fd=directory, follow_symlinks=False)


class PageFiles:
    """Safe for threads.

    Args:
        direct_io: open files with O_DIRECT.

    Raises StoreError when the directory of the namespace cannot be made.
    """

    def __init__(
        self, root: FilesRoot, namespace: Namespace, owner: Owner, *, direct_io: bool
    ) -> None:
        self.record_bytes = record.record_bytes(namespace.payload_bytes)
        self.place = f"namespaces/{namespace.digest.hex()}"
        """Below the store's directory."""
        self._root = root
        self._namespace = namespace
        self._owner = owner
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct_io else 0)
        self._lock = threading.Lock()
        self._logged_at = -_LOG_PAUSE_S
        self._reserves = True
        self.troubles = 0
        """How often the file system failed, but for lack of room and for what is not ours."""
        self.last_trouble = ""
        self.next_look = 0.0
        """When to `follow` next (`time.monotonic`)."""
        root.note_namespace(namespace)
        self._directory = self._open_directory()

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._directory)

    def follow(self) -> bool:
        """See that the open directory is the one of that name, or take the one that is now.

        True. Raises StoreError if the store is gone; then nothing of it is held open.
        """
        place = self._root.namespace_directory(self._namespace.digest)
        there = None
        try:
            there = place.stat()
        except OSError as error:
            if error.errno not in (*_NO_PAGE, *_GONE):
                return True  # it cannot be told
        with self._lock:
            if there is None or not self._is_open(there):
                try:
                    self._root.see_that_it_is_there()
                except StoreError:
                    self._replace_directory(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                    raise
                self._open_anew()
        return True

    def _is_open(self, there: os.stat_result) -> bool:
        try:
            mine = os.fstat(self._directory)
        except OSError:  # NFS: it is gone from the server
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    # -- looking ----------------------------------------------------------------------------------

    def look(self, key: bytes) -> int | None:
        """When a page was used last, in ns; None if it is not there with its exact size."""
        try:
            facts = stat_page(page_path(key), self._directory)
        except OSError as error:
            if error.errno not in _NO_PAGE:
                self.note_trouble("a page cannot be looked at", error)
            return None
        return facts.st_mtime_ns if facts.st_size == self.record_bytes else None

    # -- reading ----------------------------------------------------------------------------------

    def open(self, key: bytes) -> OpenPage | None:
        """Open a page for reading; None if it is not there. One of a wrong size is removed."""
        path = page_path(key)
        try:
            # Of a pipe that somebody put there an open would wait for a writer.
            flags = os.O_RDONLY | os.O_NONBLOCK | self._flags
            descriptor = os.open(path, flags, dir_fd=self._directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note_trouble("a page cannot be opened", error)
            return None
        page = None
        try:
            page = OpenPage(key, descriptor, os.fstat(descriptor))
            whole = page.facts.st_size == self.record_bytes
            if whole and stat.S_ISREG(page.facts.st_mode):
                return page
            self.remove(page)
        except OSError as error:  # NFS: the server has forgotten it
            self.note_trouble("a page cannot be looked at", error)
        os.close(descriptor)
        return None

    def remove(self, page: OpenPage) -> bool:
        """Remove a damaged page, unless it was replaced meanwhile; whether it went."""
        return remove_if_same(page_path(page.key), page.facts, self._directory)

    # -- writing ----------------------------------------------------------------------------------

    def drafts(self) -> Callable[[bytes], Draft | None]:
        """A function that makes an empty file for a page, of its full size; None if it cannot.

        After the first for which the file system has no room, it makes no more.
        """
        full = threading.Event()

        def draft(key: bytes) -> Draft | None:
            if full.is_set():
                return None
            path = temporary_path(key, self._owner, next(_numbers))
            descriptor = None
            try:
                descriptor = self._create(path)
                self._reserve(descriptor)
            except OSError as error:
                if error.errno in NO_ROOM:
                    full.set()
                self.note_trouble("a page cannot be written", error)
                if descriptor is not None:
                    self.drop(Draft(key, descriptor, path))
                return None
            return Draft(key, descriptor, path)

        return draft

    def publish(self, draft: Draft, used_ns: int) -> bool | None:
        """Put a written page in its place and close it; None if that failed and nothing is left.

        What was written is handed to the system first, but not forced to the medium: after a power
        loss a page may be there in part, and the reader's checksum notices.
        """
        try:
            try:
                os.utime(draft.descriptor, ns=(used_ns, used_ns))
            finally:
                os.close(draft.descriptor)  # NFS: this may be where a write fails
            os.rename(
                draft.path,
                page_path(draft.key),
                src_dir_fd=self._directory,
                dst_dir_fd=self._directory,
            )
        except OSError as error:
            self.note_trouble("a page cannot be published", error)
            self._unlink(draft.path)
            return None
        return True

    def drop(self, draft: Draft) -> None:
        """Close and remove what did not become a page."""
        os.close(draft.descriptor)
        self._unlink(draft.path)

    def _unlink(self, path: str) -> None:
        try:
            os.unlink(path, dir_fd=self._directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.note_trouble("a leftover cannot be removed", error)

    def _create(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | self._flags
        for _ in range(_ATTEMPTS):
            try:
                return os.open(path, flags, 0o600, dir_fd=self._directory)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            self._make_leaf(path[:5])
        return os.open(path, flags, 0o600, dir_fd=self._directory)

    def _make_leaf(self, leaf: str) -> None:
        """Make a directory of the lowest level, and what is missing above it."""
        for place in (leaf[:2], leaf):
            try:
                os.mkdir(place, 0o700, dir_fd=self._directory)
            except FileExistsError:
                continue
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                self._make_anew()

    def _make_anew(self) -> None:
        """Make the directory of the namespace again, if it was removed under us."""
        with self._lock:
            try:
                if os.fstat(self._directory).st_nlink:
                    return
            except OSError:  # NFS: it is gone from the server
                pass
            self._open_anew()

    def _open_anew(self) -> None:
        self._root.note_namespace(self._namespace)
        self._replace_directory(self._open_directory())

    def _replace_directory(self, fresh: int) -> None:
        os.dup2(fresh, self._directory, inheritable=False)
        os.close(fresh)

    def _open_directory(self) -> int:
        place = self._root.namespace_directory(self._namespace.digest)
        return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _reserve(self, descriptor: int) -> None:
        """Allocate the blocks of a page, so that a lack of room shows now; else only its length.

        posix_fallocate would write to every block where the file system cannot do it.
        """
        if self._reserves:
            if _libc.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(self.record_bytes)):
                code = ctypes.get_errno()
                if code not in _UNSUPPORTED:
                    raise OSError(code, os.strerror(code))
                self._reserves = False
            else:
                return
        os.ftruncate(descriptor, self.record_bytes)

    def note_trouble(self, what: str, error: OSError) -> None:
        """Count what the file system failed at, and log it now and then."""
        with self._lock:
            if error.errno not in (*NO_ROOM, *_IN_OUR_PLACE):
                self.troubles += 1
                self.last_trouble = f"{what}: {error.strerror or error}"
            if time.monotonic() - self._logged_at < _LOG_PAUSE_S:
                return
            self._logged_at = time.monotonic()
        place = self._root.directory
        advice = "; free space or lower capacity" if error.errno in NO_ROOM else ""
        logger.warning("%s: %s: %s%s", place, what, error.strerror or error, advice)


class Descriptors:
    """How many files a store may have open for its calls. Safe for threads."""

    @classmethod
    def within_limits(cls) -> "Descriptors":
        """As many as are of use, and no more than a quarter of what the process may have open."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(max(1, min(_MOST_DESCRIPTORS, soft // 4)))

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._changed = threading.Condition()

    def take(self, count: int, deadline: float) -> int:
        """Up to `count` of them, at least one; none if there are none by `deadline`."""
        with self._changed:
            self._changed.wait_for(lambda: self._free > 0, max(0.0, deadline - time.monotonic()))
            taken = min(count, self._free)
            self._free -= taken
        return taken

    def give(self, count: int) -> None:
        """Give back what was taken."""
        with self._changed:
            self._free += count
            self._changed.notify_all()
