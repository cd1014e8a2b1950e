"""The record format: what a reader notices, and that the bytes do not change by accident."""

import hashlib
import itertools
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hicache_nixl import record
from hicache_nixl.record import ALIGNMENT, TRAILER_BYTES
from support import Bytes

NAMESPACE = bytes(range(32))
WRITER = b"writer-of-16-byt"

digests = st.binary(min_size=32, max_size=32)
counts = st.integers(0, 2**64 - 1)


def block_of(rows: int) -> Bytes:
    return np.full((rows, TRAILER_BYTES), 0xA5, np.uint8)


def written(
    keys: list[bytes],
    *,
    out: Bytes | None = None,
    namespace: bytes = NAMESPACE,
    payload_bytes: int = 3900,
    generation: int = 7,
    payload_hashes: list[int] | None = None,
) -> Bytes:
    block = block_of(len(keys)) if out is None else out
    record.write_trailers(
        block,
        namespace=namespace,
        keys=keys,
        depths=np.arange(len(keys)),
        payload_bytes=payload_bytes,
        payload_hashes=payload_hashes or [5] * len(keys),
        generation=generation,
        written_ns=1_700_000_000_000_000_000,
        writer=WRITER,
    )
    return block


def accepted(
    block: Bytes,
    keys: list[bytes],
    *,
    namespace: bytes = NAMESPACE,
    payload_bytes: int = 3900,
    generation: int = 7,
) -> list[bool]:
    return record.check_trailers(
        block,
        namespace=namespace,
        keys=keys,
        payload_bytes=payload_bytes,
        generations=np.full(len(keys), generation, np.uint64),
    ).tolist()


@given(
    keys=st.lists(digests, min_size=1, max_size=5),
    namespace=digests,
    writer=st.binary(min_size=16, max_size=16),
    payload_bytes=st.integers(1, 2**40),
    generation=counts,
    written_ns=counts,
    depth=st.integers(0, 2**32 - 1),
    hashes=st.lists(counts, min_size=5, max_size=5),
)
def test_a_trailer_comes_back_as_it_was_written(
    keys: list[bytes],
    namespace: bytes,
    writer: bytes,
    payload_bytes: int,
    generation: int,
    written_ns: int,
    depth: int,
    hashes: list[int],
) -> None:
    """Every field survives; a reader who expects it accepts it."""
    block = block_of(len(keys))
    record.write_trailers(
        block,
        namespace=namespace,
        keys=keys,
        depths=np.full(len(keys), depth),
        payload_bytes=payload_bytes,
        payload_hashes=hashes[: len(keys)],
        generation=generation,
        written_ns=written_ns,
        writer=writer,
    )
    assert all(
        accepted(
            block,
            keys,
            namespace=namespace,
            payload_bytes=payload_bytes,
            generation=generation,
        )
    )
    assert record.stored_payload_hashes(block).tolist() == hashes[: len(keys)]
    for row, key, payload_hash in zip(block, keys, hashes, strict=False):
        assert record.parse_trailer(row) == record.Trailer(
            namespace, key, depth, payload_bytes, payload_hash, generation, written_ns, writer
        )


def test_every_flipped_bit_of_a_trailer_is_noticed() -> None:
    """No bit of the 4096 bytes can change unseen, whether the trailer is checked or parsed."""
    good = written([b"k" * 32])
    bits = np.arange(TRAILER_BYTES * 8)
    for some in np.array_split(bits, 64):
        flipped = np.repeat(good, len(some), axis=0)
        flipped[np.arange(len(some)), some // 8] ^= (1 << (some % 8)).astype(np.uint8)
        assert not any(accepted(flipped, [b"k" * 32] * len(some)))
        assert all(record.parse_trailer(row) is None for row in flipped)


def test_every_flipped_bit_of_a_payload_is_noticed() -> None:
    """No bit of a payload can change without its checksum changing."""
    payload = np.random.default_rng(1).integers(0, 256, 1300, dtype=np.uint8)
    right = record.payload_hash(payload)
    for bit in range(payload.size * 8):
        payload[bit // 8] ^= 1 << bit % 8
        assert record.payload_hash(payload) != right
        payload[bit // 8] ^= 1 << bit % 8
    assert record.payload_hash(payload) == right


@pytest.mark.parametrize(
    "expected",
    [
        {"namespace": bytes(32)},
        {"payload_bytes": 3901},
        {"generation": 8},
        {"generation": 6},
    ],
    ids=["namespace", "payload_bytes", "newer", "older"],
)
def test_a_trailer_of_something_else_is_refused(expected: dict[str, object]) -> None:
    """An intact trailer counts only for its own namespace, payload size and generation."""
    keys = [b"k" * 32, b"l" * 32]
    block = written(keys)
    assert accepted(block, keys) == [True, True]
    assert accepted(block, keys, **expected) == [False, False]  # type: ignore[arg-type]


def test_only_the_page_with_another_key_is_refused() -> None:
    """Two records that were swapped are refused; their neighbours are not."""
    keys = [bytes([i]) * 32 for i in range(4)]
    block = written(keys)
    assert accepted(block, [keys[0], keys[2], keys[1], keys[3]]) == [True, False, False, True]


def test_nothing_is_no_trailer() -> None:
    """Zeros, noise and a trailer of another format version are not trailers."""
    noise = np.random.default_rng(2).integers(0, 256, TRAILER_BYTES, dtype=np.uint8)
    other_version = written([b"k" * 32])
    other_version[0, 8:12] = (2, 0, 0, 0)
    other_version[0, -8:] = np.frombuffer(
        struct.pack("<Q", xxhash.xxh3_64_intdigest(other_version[0, :-8])), np.uint8
    )
    for block in (np.zeros((1, TRAILER_BYTES), np.uint8), noise.reshape(1, -1), other_version):
        assert record.parse_trailer(block[0]) is None
        assert accepted(block, [b"k" * 32]) == [False]


def test_trailers_may_lie_behind_their_payloads() -> None:
    """Rows that are not next to each other are written and checked; the rest is not touched."""
    records = np.full((3, 3 * ALIGNMENT), 0xEE, np.uint8)
    keys = [bytes([i]) * 32 for i in range(3)]
    written(keys, out=records[:, -TRAILER_BYTES:])
    assert accepted(records[:, -TRAILER_BYTES:], keys) == [True] * 3
    assert np.array_equal(records[:, -TRAILER_BYTES:], written(keys))
    assert (records[:, :-TRAILER_BYTES] == 0xEE).all()


@given(st.binary(min_size=1, max_size=4000), st.lists(st.integers(0, 4000), max_size=5))
def test_a_checksum_does_not_depend_on_how_the_payload_is_cut(
    payload: bytes, cuts: list[int]
) -> None:
    """Segments one after the other have the checksum of the whole."""
    edges = [0, *sorted(min(cut, len(payload)) for cut in cuts), len(payload)]
    segments = [memoryview(payload)[a:b] for a, b in itertools.pairwise(edges)]
    assert record.payload_hash_of(segments) == record.payload_hash(payload)


def test_wrong_widths_are_errors() -> None:
    """A namespace, key or writer of another length cannot be written."""
    with pytest.raises(ValueError, match="reshape"):
        written([b"short"])
    with pytest.raises(ValueError, match="broadcast"):
        written([b"k" * 32], namespace=bytes(31))


def test_sizes() -> None:
    """A record is the payload, padded to 4 KiB, and one more block of 4 KiB."""
    assert [record.padded(n) for n in (1, 4095, 4096, 4097)] == [4096, 4096, 4096, 8192]
    assert record.record_bytes(3 * 1300) == 8192
    assert record.record_bytes(1 << 20) == (1 << 20) + 4096


def test_the_format_is_pinned() -> None:
    """Trailers of earlier releases stay readable: the bytes of one are fixed here."""
    key = bytes(range(32, 64))
    block = written(
        [key], payload_bytes=3900, generation=2**63 + 9, payload_hashes=[0x1122334455667788]
    )
    head = struct.pack(
        "<8sII32s32sQQQQ16s",
        b"HICACHE\x01",
        1,
        0,
        NAMESPACE,
        key,
        3900,
        0x1122334455667788,
        2**63 + 9,
        1_700_000_000_000_000_000,
        WRITER,
    )
    body = head.ljust(TRAILER_BYTES - 8, b"\0")
    assert block.tobytes() == body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    assert (
        hashlib.sha256(block.tobytes()).hexdigest()
        == "ec79b944e097415180a33a2c760199864983103f7d61c9206142a3f28468d138"
    )
    # XXH3-64 of nothing and of three bytes, from the reference implementation
    assert record.payload_hash(b"") == 0x2D06800538D394C2
    assert record.payload_hash(b"abc") == 0x78AF5F94892F3950


@pytest.mark.parametrize(
    ("format_version", "intact", "later"),
    [
        (record.FORMAT_VERSION, True, False),
        (record.FORMAT_VERSION + 1, True, True),
        (record.FORMAT_VERSION + 256, True, True),
        (record.FORMAT_VERSION + 1, False, False),
    ],
)
def test_a_later_format_is_told_from_damage(format_version: int, intact: bool, later: bool) -> None:
    """By magic, number and the trailer's own checksum; what is too short is neither."""
    block = bytearray(bytes(ALIGNMENT) + written([bytes(32)]).tobytes())
    trailer = memoryview(block)[-TRAILER_BYTES:]
    trailer[8:12] = format_version.to_bytes(4, "little")
    if intact:
        trailer[-8:] = record.payload_hash(bytes(trailer[:-8])).to_bytes(8, "little")
    assert record.is_of_later_format(bytes(block)) == later
    assert not record.is_of_later_format(bytes(block[-TRAILER_BYTES:][1:]))
