"""The page record: how one page lies on the medium, and how a reader knows that it is that page.

    payload   the page's segments back to back, padded to ALIGNMENT bytes
    trailer   one ALIGNMENT-sized block: what this is, who wrote it, a checksum of the payload,
              zeros, and a checksum of the trailer itself in the last 8 bytes

The trailer makes a record self-describing: a store whose index is lost finds its pages again from
the trailers alone, and a reader who was pointed at the wrong or half-written place notices.
This module owns the format. It knows nothing of files, buckets, NIXL or SGLang.

Checksums are XXH3-64 (https://github.com/Cyan4973/xxHash), integers little-endian.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

ALIGNMENT = 4096
"""Bytes. O_DIRECT wants offsets, lengths and addresses in multiples of the device's logical block
(512 or 4096 bytes), and of the memory page on some file systems; 4096 suits all of them."""

TRAILER_BYTES = ALIGNMENT
FORMAT_VERSION = 1
MAGIC = b"HICACHE\x01"

ByteArray = npt.NDArray[np.uint8]

_HASHED_BYTES = TRAILER_BYTES - 8
_TRAILER = np.dtype(
    {
        "names": [
            "magic",
            "format",
            "depth",
            "namespace",
            "key",
            "payload_bytes",
            "payload_hash",
            "generation",
            "written_ns",
            "writer",
            "trailer_hash",
        ],
        "formats": ["8u1", "<u4", "<u4", "32u1", "32u1", "<u8", "<u8", "<u8", "<u8", "16u1", "<u8"],
        "offsets": [0, 8, 12, 16, 48, 80, 88, 96, 104, 112, _HASHED_BYTES],
        "itemsize": TRAILER_BYTES,
    }
)


@dataclass(frozen=True)
class Trailer:
    """What a trailer says of its record."""

    namespace: bytes
    key: bytes
    depth: int
    """Pages before this one in its prefix, as far as the writer knew."""
    payload_bytes: int
    payload_hash: int
    generation: int
    """Tick of the write; unique per slot, ever growing within a store."""
    written_ns: int
    writer: bytes


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def record_bytes(payload_bytes: int) -> int:
    """Bytes of the record of a page of `payload_bytes`."""
    return padded(payload_bytes) + TRAILER_BYTES


def payload_hash(payload: bytes | ByteArray) -> int:
    """Checksum of one contiguous payload (without padding)."""
    return int(xxhash.xxh3_64_intdigest(payload))  # type: ignore[arg-type]  # numpy is a buffer


def payload_hash_of(segments: Sequence[memoryview]) -> int:
    """Checksum of one payload that lies in several segments; equals `payload_hash` of the whole."""
    state = xxhash.xxh3_64()
    for segment in segments:
        state.update(segment)
    return int(state.intdigest())


def write_trailers(
    out: ByteArray,
    *,
    namespace: bytes,
    keys: Sequence[bytes],
    depths: npt.NDArray[np.int64],
    payload_bytes: int,
    payload_hashes: Sequence[int],
    generation: int,
    written_ns: int,
    writer: bytes,
) -> None:
    """Fill `out`, uint8 of shape (n, TRAILER_BYTES) with contiguous rows, for `n` pages.

    Namespace and keys have 32 bytes, the writer 16; ValueError if not.
    """
    out[:] = 0
    rows = _rows(out)
    rows["magic"] = _array(MAGIC)
    rows["format"] = FORMAT_VERSION
    rows["depth"] = np.minimum(depths, 0xFFFFFFFF)
    rows["namespace"] = _array(namespace)
    rows["key"] = _array(b"".join(keys)).reshape(len(keys), 32)
    rows["payload_bytes"] = payload_bytes
    rows["payload_hash"] = np.asarray(payload_hashes, dtype=np.uint64)
    rows["generation"] = generation
    rows["written_ns"] = written_ns
    rows["writer"] = _array(writer)
    rows["trailer_hash"] = _trailer_hashes(out)


def check_trailers(
    block: ByteArray,
    *,
    namespace: bytes,
    keys: Sequence[bytes],
    payload_bytes: int,
    generations: npt.NDArray[np.uint64] | None,
) -> npt.NDArray[np.bool_]:
    """Which of the trailers in `block`, uint8 (n, TRAILER_BYTES), are those of these pages.

    A trailer counts only if it is intact and names this namespace, key, payload size and, unless
    None, generation: a slot that was reused since the index was read fails here.
    """
    rows = _rows(block)
    good: npt.NDArray[np.bool_] = (
        (rows["magic"] == _array(MAGIC)).all(axis=1)
        & (rows["format"] == FORMAT_VERSION)
        & (rows["payload_bytes"] == payload_bytes)
        & (generations is None or rows["generation"] == generations)
        & (rows["key"] == _array(b"".join(keys)).reshape(len(keys), 32)).all(axis=1)
        & (rows["namespace"] == _array(namespace)).all(axis=1)
        & (rows["trailer_hash"] == _trailer_hashes(block))
    )
    return good


def stored_payload_hashes(block: ByteArray) -> npt.NDArray[np.uint64]:
    """The payload checksums that the trailers in `block` hold."""
    hashes: npt.NDArray[np.uint64] = _rows(block)["payload_hash"]
    return hashes


def parse_trailer(block: ByteArray) -> Trailer | None:
    """The trailer in one TRAILER_BYTES block, or None where there is no intact one."""
    one = block.reshape(1, TRAILER_BYTES)
    row = _rows(one)[0]
    if row["magic"].tobytes() != MAGIC or row["format"] != FORMAT_VERSION:
        return None
    if row["trailer_hash"] != _trailer_hashes(one)[0]:
        return None
    return Trailer(
        namespace=row["namespace"].tobytes(),
        key=row["key"].tobytes(),
        depth=int(row["depth"]),
        payload_bytes=int(row["payload_bytes"]),
        payload_hash=int(row["payload_hash"]),
        generation=int(row["generation"]),
        written_ns=int(row["written_ns"]),
        writer=row["writer"].tobytes(),
    )


def is_of_later_format(block: bytes) -> bool:
    """Whether a whole record has an intact trailer of a version after this one: magic, format and
    the trailer's checksum stay where they are."""
    trailer = np.frombuffer(block[-TRAILER_BYTES:], np.uint8)
    if len(trailer) < TRAILER_BYTES:
        return False
    row = _rows(trailer.reshape(1, TRAILER_BYTES))[0]
    return bool(
        row["magic"].tobytes() == MAGIC
        and row["format"] > FORMAT_VERSION
        and row["trailer_hash"] == payload_hash(trailer[:_HASHED_BYTES])
    )


def _rows(block: ByteArray) -> npt.NDArray[np.void]:
    return block.view(_TRAILER).reshape(-1)


def _array(data: bytes) -> ByteArray:
    return np.frombuffer(data, np.uint8)


def _trailer_hashes(block: ByteArray) -> npt.NDArray[np.uint64]:
    hashes = map(payload_hash, block[:, :_HASHED_BYTES])
    return np.fromiter(hashes, dtype=np.uint64, count=len(block))
