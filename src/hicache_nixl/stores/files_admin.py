"""What people ask of a whole namespace: how much it holds, and away with it. Every file is seen."""

import time
from collections.abc import Iterator
from pathlib import Path

from hicache_nixl import record
from hicache_nixl.errors import StoreError
from hicache_nixl.identity import Namespace
from hicache_nixl.stores.base import NamespaceUse
from hicache_nixl.stores.files_crew import Crew
from hicache_nixl.stores.files_layout import FAN_OUT, Entry, FilesRoot, entries_of

_CALL_LIMIT_S = 60.0
"""For 256 directories."""


def namespace_use(root: FilesRoot, namespace: Namespace, crew: Crew) -> NamespaceUse:
    """What one namespace holds. Raises OSError, or StoreError where the file system hangs."""
    times = [entry.mtime_ns for entry in _pages(root, namespace.digest, crew)]
    size = record.record_bytes(namespace.payload_bytes)
    return NamespaceUse(
        namespace,
        pages=len(times),
        record_bytes=len(times) * size,
        oldest_use_ns=min(times, default=0),
        newest_use_ns=max(times, default=0),
    )


def clear_namespace(root: FilesRoot, namespace: bytes, crew: Crew) -> tuple[int, int]:
    """Remove every page of one namespace: how many went, and their bytes. Raises as above."""
    pages = nbytes = 0
    for first in FAN_OUT:
        entries = list(_pages(root, namespace, crew, first))
        deadline = time.monotonic() + _CALL_LIMIT_S
        for entry, gone in zip(entries, crew.map(_remove, entries, deadline=deadline), strict=True):
            if gone is None:
                raise _hangs(root)
            pages += gone
            nbytes += gone * entry.nbytes
    return pages, nbytes


def _pages(
    root: FilesRoot, namespace: bytes, crew: Crew, first: str | None = None
) -> Iterator[Entry]:
    for bucket in FAN_OUT if first is None else (first,):
        leaves = root.leaves(bucket, namespace)
        deadline = time.monotonic() + _CALL_LIMIT_S
        for entries in crew.map(entries_of, leaves, deadline=deadline):
            if entries is None:
                raise _hangs(root)
            yield from (entry for entry in entries if entry.owner is None)


def _remove(entry: Entry) -> bool:
    try:
        Path(entry.path).unlink()
    except FileNotFoundError:
        return False
    return True


def _hangs(root: FilesRoot) -> StoreError:
    return StoreError(f"{root.directory} does not answer; see whether its server is there")
