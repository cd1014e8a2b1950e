"""Reads every record of a files store and compares it with what its name and trailer say.

With ordinary buffered reads, so that it works where O_DIRECT or NIXL do not.
"""

import os
from collections.abc import Iterator

from hicache_nixl.identity import Namespace
from hicache_nixl.record import record_bytes
from hicache_nixl.stores.base import CheckedPage
from hicache_nixl.stores.files_layout import Entry, FilesRoot
from hicache_nixl.stores.whole_record import read_trailer


def verify_namespace(root: FilesRoot, namespace: Namespace) -> Iterator[CheckedPage]:
    """Check every page of one namespace; damaged ones are removed. OSError if it cannot be read."""
    for entry in root.pages(namespace):
        good = _check(entry, namespace)
        if good is not None:  # a page that was evicted meanwhile is neither good nor damaged
            yield CheckedPage(namespace.digest, entry.key, good)


def remove_if_same(path: str, facts: os.stat_result, directory: int | None = None) -> bool:
    """Remove a file, unless another one has taken its place; whether it went.

    `facts` are those of an open descriptor, which keeps its inode number from being used again.
    """
    try:
        now = os.stat(path, dir_fd=directory, follow_symlinks=False)
        if (now.st_dev, now.st_ino) != (facts.st_dev, facts.st_ino):
            return False
        os.unlink(path, dir_fd=directory)
    except OSError:
        return False
    return True


def _check(entry: Entry, namespace: Namespace) -> bool | None:
    try:
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        good = (
            facts.st_size == record_bytes(namespace.payload_bytes)
            and read_trailer(descriptor, 0, entry.key, namespace) is not None
        )
        return good or (False if remove_if_same(entry.path, facts) else None)
    finally:
        os.close(descriptor)
