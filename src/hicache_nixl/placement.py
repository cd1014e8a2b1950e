"""In place or through staging: how the pages of one pool become NIXL descriptors.

In place, a page's segments move between host pool and medium by scatter-gather, and only the
trailer lies in staging. With O_DIRECT that takes segments aligned to ALIGNMENT. Through staging,
payload and trailer lie there back to back and the record moves as one extent.

Records of many small extents go through staging although they could go in place: a device handles
one extent of 2 MiB faster than 64 of 32 KiB, and copying costs less than the difference. Where an
extent has 48 KiB both ways are equally fast, and in place costs a third less CPU.

Objects always go through staging: what failed, and what is late, is written all the same.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hicache_nixl import record
from hicache_nixl.batch import Batch, Extents
from hicache_nixl.geometry import PoolGeometry
from hicache_nixl.record import TRAILER_BYTES
from hicache_nixl.registrations import Descriptors
from hicache_nixl.staging import Lease

IN_PLACE_EXTENT_BYTES = 40 * 1024
"""Payload bytes per extent, on the average and with the trailer as one, from which on a record
moves in place."""


class Placement:
    """For one pool: what its pages need of staging, and the descriptors of a part of a batch."""

    def __init__(
        self, geometry: PoolGeometry, *, direct_io: bool, always_staged: bool = False
    ) -> None:
        self.geometry = geometry
        extents = len(geometry.lengths) + 1
        self.in_place = (
            (not always_staged)
            and (geometry.is_aligned() or not direct_io)
            and (geometry.payload_bytes // extents >= IN_PLACE_EXTENT_BYTES)
        )
        self.record_bytes = record.record_bytes(geometry.payload_bytes)
        self.staging_bytes = TRAILER_BYTES if self.in_place else self.record_bytes
        """Staging bytes that one page takes."""

    def trailers(self, lease: Lease, count: int) -> npt.NDArray[np.uint8]:
        """The trailers of `count` pages in staging: a view (count, TRAILER_BYTES)."""
        return self._staged(lease, count)[:, -TRAILER_BYTES:]

    def payloads(self, lease: Lease, count: int) -> npt.NDArray[np.uint8]:
        """The staged payloads: a view (count, payload_bytes). Only when not in place."""
        return self._staged(lease, count)[:, : self.geometry.payload_bytes]

    def fill(self, lease: Lease, numbers: npt.NDArray[np.int64]) -> None:
        """Copy pages into staging, with zeros up to the trailer. Nothing to do in place."""
        if not self.in_place:
            records = self._staged(lease, len(numbers))
            self.geometry.gather(numbers, records)
            records[:, self.geometry.payload_bytes : -TRAILER_BYTES] = 0

    def payload_hashes(
        self, lease: Lease, numbers: npt.NDArray[np.int64], which: npt.NDArray[np.int64]
    ) -> Iterator[int]:
        """Checksum of the payload of each page of `which` of `numbers`, wherever it lies."""
        if self.in_place:
            windows = self.geometry.windows
            for number in numbers[which]:
                yield record.payload_hash_of([window[number].data for window in windows])
        else:
            payloads = self.payloads(lease, len(numbers))
            yield from (record.payload_hash(payloads[i]) for i in which)

    def descriptors(
        self, batch: Batch, rows: npt.NDArray[np.int64], lease: Lease, extents: Extents
    ) -> tuple[Descriptors, Descriptors]:
        """Memory and file descriptors that move the pages at `rows` of a batch."""
        n = len(rows)
        addresses = self._addresses(lease, n)[:, None]
        if self.in_place:
            addresses = np.hstack([self.geometry.addresses(batch.numbers[rows]), addresses])
        lengths, starts = self._row
        columns = len(lengths)
        memory = np.zeros((n * columns, 3), np.uint64)
        memory[:, 0] = addresses.reshape(-1)
        memory[:, 1] = np.tile(lengths, n)
        file = np.empty((n * columns, 3), np.uint64)
        file[:, 0] = (extents.offsets[rows][:, None] + starts).reshape(-1)
        file[:, 1] = memory[:, 1]
        file[:, 2] = np.repeat(extents.files[rows], columns)
        return memory, file

    def staged_records(self, lease: Lease, count: int) -> Descriptors:
        """Memory descriptors of `count` records in staging, one each. Only when not in place."""
        memory = np.zeros((count, 3), np.uint64)
        memory[:, 0] = self._addresses(lease, count)
        memory[:, 1] = self.record_bytes
        return memory

    def _addresses(self, lease: Lease, count: int) -> npt.NDArray[np.uint64]:
        """Where the part of each page that is in staging starts."""
        step = np.uint64(self.staging_bytes)
        return np.uint64(lease.address) + np.arange(count, dtype=np.uint64) * step

    @cached_property
    def _row(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Lengths of the extents of one record, and where each starts in it."""
        if not self.in_place:
            return np.array([self.record_bytes]), np.zeros(1, np.int64)
        lengths = self.geometry.lengths
        starts = np.cumsum(lengths) - lengths
        return np.append(lengths, TRAILER_BYTES), np.append(
            starts, self.record_bytes - TRAILER_BYTES
        )

    def _staged(self, lease: Lease, count: int) -> npt.NDArray[np.uint8]:
        return lease.view[: count * self.staging_bytes].reshape(count, self.staging_bytes)
