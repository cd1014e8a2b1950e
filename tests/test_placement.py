"""In place or through staging, and the descriptors that follow."""

import numpy as np
import pytest

from hicache_nixl import record
from hicache_nixl.batch import Batch, Extents
from hicache_nixl.memory import allocate
from hicache_nixl.placement import Placement
from hicache_nixl.record import ALIGNMENT, TRAILER_BYTES
from hicache_nixl.staging import Lease, StagingArena
from support import HostPool, host_pool, page_keys

BIG = 128 * 1024
ROWS = np.array([1, 2, 0])
"""Rows of the batch that are placed, in this order."""


@pytest.mark.parametrize(
    ("segments", "segment_bytes", "aligned", "direct_io", "in_place"),
    [
        (2, BIG, True, True, True),
        (1, 80 * 1024, True, True, True),
        (1, 76 * 1024, True, True, False),
        (3, 56 * 1024, True, True, True),
        (3, 52 * 1024, True, True, False),
        (15, 52 * 1024, True, True, True),
        (64, 32 * 1024, True, True, False),
        (2, BIG, False, True, False),
        (2, BIG + 100, True, True, False),
        (2, BIG, False, False, True),
        (2, BIG + 100, False, False, True),
        (3, 1300, True, True, False),
        (3, 1300, True, False, False),
    ],
)
def test_which_pools_move_in_place(
    segments: int, segment_bytes: int, aligned: bool, direct_io: bool, in_place: bool
) -> None:
    """In place: extents of 40 KiB on the average, and aligned if files are open with O_DIRECT."""
    pool = host_pool(1, 2, segments, segment_bytes, aligned)
    placement = Placement(pool.geometry, direct_io=direct_io)
    assert placement.in_place == in_place
    assert placement.record_bytes == record.record_bytes(segments * segment_bytes)
    assert placement.staging_bytes == (TRAILER_BYTES if in_place else placement.record_bytes)


def test_where_all_is_staged_nothing_moves_in_place() -> None:
    """Whatever the geometry, a record is one extent of staging."""
    placement = Placement(host_pool(1, 2, 2, BIG).geometry, direct_io=False, always_staged=True)
    assert not placement.in_place
    lease = StagingArena(allocate(3 * placement.staging_bytes)).lease(
        3 * placement.staging_bytes, timeout=0
    )
    assert lease is not None
    size = placement.record_bytes
    assert placement.staging_bytes == size == record.record_bytes(2 * BIG)
    assert placement.staged_records(lease, 3).tolist() == [
        [lease.address + i * size, size, 0] for i in range(3)
    ]


def placed(pool: HostPool, *, direct_io: bool = True) -> tuple[Placement, Lease, Batch, Extents]:
    placement = Placement(pool.geometry, direct_io=direct_io)
    arena = StagingArena(allocate(8 * placement.staging_bytes))
    arena.lease(ALIGNMENT, timeout=0)
    lease = arena.lease(len(ROWS) * placement.staging_bytes, timeout=0)
    assert lease is not None
    numbers = np.array([4, 0, 3])
    extents = Extents(
        files=np.array([7, 8, 7]), offsets=np.array([0, 5, 9]) * placement.record_bytes
    )
    return placement, lease, Batch(pool.geometry, numbers, page_keys(3), bytes(32)), extents


@pytest.mark.parametrize("page_contiguous", [False, True])
@pytest.mark.parametrize("segment_bytes", [BIG, 2 * BIG])
def test_descriptors_in_place(segment_bytes: int, page_contiguous: bool) -> None:
    """Each segment of each page goes straight to its place in the record, then its trailer from
    staging to the end; memory and file cover the record without a gap."""
    pool = host_pool(1, 5, 3, segment_bytes, page_contiguous=page_contiguous)
    placement, lease, batch, extents = placed(pool)
    memory, file = placement.descriptors(batch, ROWS, lease, extents)
    assert memory.dtype == file.dtype == np.uint64
    expected_memory, expected_file = [], []
    for i, row in enumerate(ROWS):
        at = int(extents.offsets[row])
        for address in pool.geometry.addresses(batch.numbers)[row]:
            expected_memory.append((int(address), segment_bytes, 0))
            expected_file.append((at, segment_bytes, int(extents.files[row])))
            at += segment_bytes
        expected_memory.append((lease.address + i * TRAILER_BYTES, TRAILER_BYTES, 0))
        expected_file.append((at, TRAILER_BYTES, int(extents.files[row])))
    assert memory.tolist() == [list(row) for row in expected_memory]
    assert file.tolist() == [list(row) for row in expected_file]


@pytest.mark.parametrize("segment_bytes", [1300, ALIGNMENT])
def test_descriptors_through_staging(segment_bytes: int) -> None:
    """One extent a record, all of them inside of the lease."""
    placement, lease, batch, extents = placed(host_pool(1, 5, 3, segment_bytes))
    memory, file = placement.descriptors(batch, ROWS, lease, extents)
    size = placement.record_bytes
    assert memory.tolist() == [[lease.address + i * size, size, 0] for i in range(3)]
    assert file.tolist() == [[5 * size, size, 8], [9 * size, size, 7], [0, size, 7]]


def test_unaligned_payloads_in_place_leave_the_padding_alone() -> None:
    """Without O_DIRECT the padding is not moved; the trailer still ends the record."""
    pool = host_pool(1, 5, 2, BIG + 100, aligned=False)
    placement, lease, batch, extents = placed(pool, direct_io=False)
    _, file = placement.descriptors(batch, ROWS[:1], lease, extents)
    at = int(extents.offsets[1])
    assert file[:, 0].tolist() == [
        at,
        at + BIG + 100,
        at + placement.record_bytes - TRAILER_BYTES,
    ]


@pytest.mark.parametrize("segment_bytes", [1300, ALIGNMENT, BIG])
def test_a_filled_record_is_payload_zeros_and_trailer(segment_bytes: int) -> None:
    """Through staging the payload is copied and padded with zeros; the checksums are those of the
    pages either way."""
    pool = host_pool(1, 5, 3, segment_bytes)
    placement, lease, batch, _ = placed(pool)
    lease.view[:] = 0xEE
    placement.trailers(lease, 3)[:] = 0xCC
    placement.fill(lease, batch.numbers)
    for which in (np.arange(3), np.array([2, 0]), np.array([], np.int64)):
        hashes = list(placement.payload_hashes(lease, batch.numbers, which))
        assert hashes == [record.payload_hash(page) for page in pool.pages(batch.numbers[which])]
    assert (placement.trailers(lease, 3) == 0xCC).all()
    staged = lease.view.reshape(3, -1)
    if not placement.in_place:
        payload_bytes = pool.geometry.payload_bytes
        for row, page in zip(staged, pool.pages(batch.numbers), strict=True):
            assert row[:payload_bytes].tobytes() == page
            assert not row[payload_bytes:-TRAILER_BYTES].any()
        assert np.array_equal(placement.payloads(lease, 3), staged[:, :payload_bytes])
