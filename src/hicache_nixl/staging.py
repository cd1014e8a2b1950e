"""Staging: registered, aligned memory within a byte budget, leased for one transfer and returned.

Pages whose segments cannot be moved in place travel through here, and so does every trailer.
This module owns who may use which bytes until when. It does not know what is in them.
"""

import threading
import time
from bisect import bisect_left
from types import TracebackType

import numpy as np
import numpy.typing as npt

from hicache_nixl.memory import HostBuffer
from hicache_nixl.record import ALIGNMENT, padded


class Lease:
    """A range of staging memory. Its bytes are the holder's until `release`.

    A lease whose transfer is late must stay unreleased until that transfer has ended: the kernel
    may still write into it.
    """

    def __init__(self, arena: "StagingArena", offset: int, nbytes: int) -> None:
        self._arena: StagingArena | None = arena
        self.offset = offset
        self.nbytes = nbytes
        self.address = arena.address + offset
        self.view: npt.NDArray[np.uint8] = arena.view[offset : offset + nbytes]

    def release(self) -> None:
        """Give the range back. Idempotent."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena._release(self.offset, self.nbytes)

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

    Safe for threads. A caller that holds leases of transfers in flight must not wait for another
    one (`timeout=0`): callers that wait hold nothing, so that they cannot block each other.
    """

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        self.address = buffer.address
        self.nbytes = buffer.nbytes // ALIGNMENT * ALIGNMENT
        self.view = buffer.view()
        self._changed = threading.Condition()
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # (offset, bytes), by offset
        self._in_use = 0
        self.peak_bytes = 0

    @property
    def in_use_bytes(self) -> int:
        return self._in_use

    def lease(self, nbytes: int, *, timeout: float) -> Lease | None:
        """A range of at least `nbytes`, or None when none came free within `timeout` seconds.

        Blocks for up to `timeout` seconds. ValueError if the arena could never hold it.
        """
        nbytes = padded(nbytes)
        if not 0 < nbytes <= self.nbytes:
            raise ValueError(f"a lease of {nbytes} bytes cannot come from {self.nbytes} bytes")
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for i, (offset, free) in enumerate(self._free):
                    if free >= nbytes:
                        if free == nbytes:
                            del self._free[i]
                        else:
                            self._free[i] = (offset + nbytes, free - nbytes)
                        self._in_use += nbytes
                        self.peak_bytes = max(self.peak_bytes, self._in_use)
                        return Lease(self, offset, nbytes)
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None

    def _release(self, offset: int, nbytes: int) -> None:
        with self._changed:
            i = bisect_left(self._free, (offset, 0))
            if i < len(self._free) and self._free[i][0] == offset + nbytes:
                nbytes += self._free[i][1]
                del self._free[i]
            if i > 0 and sum(self._free[i - 1]) == offset:
                offset, before = self._free[i - 1]
                nbytes += before
                del self._free[i - 1]
                i -= 1
            self._free.insert(i, (offset, nbytes))
            self._in_use = self.nbytes - sum(free for _, free in self._free)
            self._changed.notify_all()
