"""Reads one record with an ordinary read and says whether it is whole."""

import os

import numpy as np

from hicache_nixl import record
from hicache_nixl.identity import Namespace
from hicache_nixl.record import Trailer


def read_trailer(descriptor: int, offset: int, key: bytes, namespace: Namespace) -> Trailer | None:
    """The trailer of the record of a page at `offset` bytes; None if it is not there, not that
    page's, or its payload is not what was written. Blocks for a read of the record."""
    try:
        block = os.pread(descriptor, record.record_bytes(namespace.payload_bytes), offset)
    except OSError:
        return None
    return trailer_of(block, key, namespace)


def trailer_of(block: bytes, key: bytes, namespace: Namespace) -> Trailer | None:
    """The trailer of a record that was read, as `read_trailer`."""
    if len(block) != record.record_bytes(namespace.payload_bytes):
        return None
    whole = np.frombuffer(block, np.uint8)
    trailer = record.parse_trailer(whole[-record.TRAILER_BYTES :])
    if trailer is None or (trailer.namespace, trailer.key, trailer.payload_bytes) != (
        namespace.digest,
        key,
        namespace.payload_bytes,
    ):
        return None
    good = record.payload_hash(whole[: namespace.payload_bytes]) == trailer.payload_hash
    return trailer if good else None
