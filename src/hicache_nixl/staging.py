"""Staging: registered, aligned memory within a byte budget, leased for one transfer and returned.

Pages whose segments cannot be moved in place travel through here, and so does every trailer.
This module owns who may use which bytes until when. It does not know what is in them.
"""

import threading
import time
from bisect import bisect_left
from collections import deque
from types import TracebackType

import numpy as np
import numpy.typing as npt

from hicache_nixl.memory import HostBuffer
from hicache_nixl.record import ALIGNMENT, padded


class Lease:
    """A range of staging memory. Its bytes are the holder's until `release`.

    A lease whose transfer is late must stay unreleased until that transfer has ended: it may still
    be written into. Until then it is in quarantine.
    """

    def __init__(self, arena: "StagingArena", offset: int, nbytes: int) -> None:
        self._arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.address = arena.address + offset
        self.view: npt.NDArray[np.uint8] = arena.view[offset : offset + nbytes]

    def quarantine(self) -> None:
        """Count the range as held by a late transfer, until `release`."""
        self._arena._quarantine(self)

    def release(self) -> None:
        """Give the range back. Idempotent."""
        self._arena._release(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class StagingArena:
    """First-fit allocator over one buffer; ranges are multiples of ALIGNMENT bytes.

    Safe for threads. Callers that wait are served in the order in which they came, so that many
    small leases cannot starve a large one. A caller that holds leases of transfers in flight must
    not wait for another one (`timeout=0`): callers that wait hold nothing, so that they cannot
    block each other.
    """

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        self.address = buffer.address
        self.nbytes = buffer.nbytes // ALIGNMENT * ALIGNMENT
        self.view = buffer.view()
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # (offset, bytes), by offset
        self._leases: set[Lease] = set()
        self._quarantined: set[Lease] = set()
        self._in_use = 0
        self.peak_bytes = 0

    @property
    def in_use_bytes(self) -> int:
        """Bytes that are leased."""
        return self._in_use

    @property
    def quarantined_bytes(self) -> int:
        """Those of them that late transfers hold."""
        with self._changed:
            return sum(lease.nbytes for lease in self._quarantined)

    def lease(self, nbytes: int, *, timeout: float) -> Lease | None:
        """A range of at least `nbytes`, or None when none came free within `timeout` seconds.

        Blocks for up to `timeout` seconds. ValueError if the arena could never hold it.
        """
        nbytes = padded(nbytes)
        if not 0 < nbytes <= self.nbytes:
            raise ValueError(f"a lease of {nbytes} bytes cannot come from {self.nbytes} bytes")
        deadline = time.monotonic() + timeout
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while self._waiting[0] is not me or (lease := self._take(nbytes)) is None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    self._changed.wait(left)
                return lease
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def _take(self, nbytes: int) -> Lease | None:
        for i, (offset, free) in enumerate(self._free):
            if free >= nbytes:
                self._free[i : i + 1] = [(offset + nbytes, free - nbytes)] if free > nbytes else []
                lease = Lease(self, offset, nbytes)
                self._leases.add(lease)
                self._in_use += nbytes
                self.peak_bytes = max(self.peak_bytes, self._in_use)
                return lease
        return None

    def _quarantine(self, lease: Lease) -> None:
        with self._changed:
            if lease in self._leases:
                self._quarantined.add(lease)

    def _release(self, lease: Lease) -> None:
        with self._changed:
            if lease not in self._leases:
                return
            self._leases.remove(lease)
            self._quarantined.discard(lease)
            self._in_use -= lease.nbytes
            start, end = lease.offset, lease.offset + lease.nbytes
            i = bisect_left(self._free, (start, 0))
            j = i
            if i > 0 and sum(self._free[i - 1]) == start:
                i -= 1
                start = self._free[i][0]
            if j < len(self._free) and self._free[j][0] == end:
                end += self._free[j][1]
                j += 1
            self._free[i:j] = [(start, end - start)]
            self._changed.notify_all()
