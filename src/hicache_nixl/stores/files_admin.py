"""What people ask of a whole namespace: how much it holds, and away with it. Every file is seen."""

import math
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


def clear_namespace(root: FilesRoot, namespace: bytes, crew: Crew, *, deadline: float) -> int:
    """Remove every page of one namespace; how many went.

    Raises as above, and StoreError where pages are left at `deadline`.
    """
    pages = 0
    for first in FAN_OUT:
        entries = list(_pages(root, namespace, crew, first, deadline))
        results = crew.map(_remove, entries, deadline=_soon(deadline))
        pages += sum(done is True for done in results)
        if None in results:
            raise _hangs(root, pages)
    return pages


def _pages(
    root: FilesRoot,
    namespace: bytes,
    crew: Crew,
    first: str | None = None,
    deadline: float = math.inf,
) -> Iterator[Entry]:
    for bucket in FAN_OUT if first is None else (first,):
        (leaves,) = crew.map(
            lambda bucket: root.leaves(bucket, namespace), [bucket], deadline=_soon(deadline)
        )
        if leaves is None:
            raise _hangs(root)
        for entries in crew.map(entries_of, leaves, deadline=_soon(deadline)):
            if entries is None:
                raise _hangs(root)
            yield from (entry for entry in entries if entry.owner is None)


def _remove(entry: Entry) -> bool:
    try:
        Path(entry.path).unlink()
    except FileNotFoundError:
        return False
    return True


def _soon(deadline: float) -> float:
    return min(time.monotonic() + _CALL_LIMIT_S, deadline)


def _hangs(root: FilesRoot, cleared: int | None = None) -> StoreError:
    if cleared:
        return StoreError(f"{cleared} pages went in time, not all of them; clear again")
    return StoreError(f"{root.directory} does not answer; see whether its server is there")
