"""Reads every record of a slab store and compares it with what index and trailer say.

With ordinary buffered reads, so that it works where O_DIRECT or NIXL do not.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hicache_nixl import record
from hicache_nixl.stores.base import CheckedPage, NamespaceUse
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_sql import Located


def verify_namespace(
    index: SlabIndex, directories: Sequence[Path], use: NamespaceUse
) -> Iterator[CheckedPage]:
    """Check every page of one namespace; damaged ones are forgotten."""
    digest = use.namespace.digest
    number = index.namespace_id(digest)
    if number is None:
        return
    payload_bytes = use.namespace.payload_bytes
    with contextlib.ExitStack() as stack:
        files: dict[int, int] = {}
        for segment in index.segments():
            with contextlib.suppress(OSError):
                descriptor = os.open(segment.path(directories), os.O_RDONLY | os.O_CLOEXEC)
                files[segment.id] = descriptor
                stack.callback(os.close, descriptor)
        for key, place in index.pages_of(number):
            good = _is_whole(files.get(place.segment), digest, key, place, payload_bytes)
            if not good:
                # A page that was evicted or moved while it was read is not forgotten: `forget`
                # looks at place and generation.
                index.forget(number, [(key, place)])
            yield CheckedPage(digest, key, good)


def _is_whole(
    descriptor: int | None, namespace: bytes, key: bytes, place: Located, payload_bytes: int
) -> bool:
    if descriptor is None:
        return False
    size = record.record_bytes(payload_bytes)
    try:
        block = os.pread(descriptor, size, place.slot * size)
    except OSError:
        return False
    if len(block) < size:
        return False
    whole = np.frombuffer(block, np.uint8)
    trailer = record.parse_trailer(whole[-record.TRAILER_BYTES :])
    return (
        trailer is not None
        and (trailer.namespace, trailer.key, trailer.generation)
        == (namespace, key, place.generation)
        and record.payload_hash(whole[:payload_bytes]) == trailer.payload_hash
    )
