"""Reads every record of a slab store and compares it with what index and trailer say.

With ordinary buffered reads, so that it works where O_DIRECT or NIXL do not.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hicache_nixl.identity import Namespace
from hicache_nixl.record import record_bytes
from hicache_nixl.stores.base import CheckedPage, NamespaceUse
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_sql import Located
from hicache_nixl.stores.whole_record import read_trailer


def verify_namespace(
    index: SlabIndex, directories: Sequence[Path], use: NamespaceUse
) -> Iterator[CheckedPage]:
    """Check every page of one namespace; damaged ones are forgotten."""
    found = index.namespace(use.namespace.digest)
    if found is None:
        return
    with _Files(index, directories) as files:
        for key, place in index.pages_of(found[0]):
            good = _is_whole(files.get(place.segment), use.namespace, key, place)
            # A page that was evicted or moved meanwhile is neither good nor damaged.
            if good or index.forget(found[0], [(key, place)]):
                yield CheckedPage(use.namespace.digest, key, good)


class _Files(contextlib.ExitStack):
    """Segment files, opened as they come up."""

    def __init__(self, index: SlabIndex, directories: Sequence[Path]) -> None:
        super().__init__()
        self._index = index
        self._directories = directories
        self._open: dict[int, int | None] = {}

    def get(self, id_: int) -> int | None:
        """The file descriptor of a segment, None if it cannot be opened."""
        if id_ not in self._open:
            self._open[id_] = None
            segment = self._index.segment(id_)
            if segment is not None:
                with contextlib.suppress(OSError):
                    descriptor = os.open(
                        segment.path(self._directories), os.O_RDONLY | os.O_CLOEXEC
                    )
                    self.callback(os.close, descriptor)
                    self._open[id_] = descriptor
        return self._open[id_]


def _is_whole(descriptor: int | None, namespace: Namespace, key: bytes, place: Located) -> bool:
    if descriptor is None:
        return False
    offset = place.slot * record_bytes(namespace.payload_bytes)
    trailer = read_trailer(descriptor, offset, key, namespace)
    return trailer is not None and trailer.generation == place.generation
