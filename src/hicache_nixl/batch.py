"""What one call moves: pages of a host pool, where their records lie, what becomes of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from hicache_nixl.geometry import PoolGeometry
from hicache_nixl.loan import Loan


class Outcome(IntEnum):
    """What became of one page."""

    FAILED = 0  # an I/O error, no time or no staging left: nothing is known of the record
    GOOD = 1
    FOREIGN = 2  # the record there is not that page (any more), or is damaged
    LATE = 3  # written, but still in flight at the deadline: the extent is not free yet


Outcomes = npt.NDArray[np.int8]

OnLate = Callable[[npt.NDArray[np.int64]], Callable[[], None]]
"""Called with the rows of a batch whose transfer is late, at once and in the same call. It keeps
their extents from any other use; the function it returns is called when the transfer has ended, on
another thread. It must not raise."""


@dataclass(frozen=True)
class Extents:
    """Where the records of `n` pages lie: open file descriptors and byte offsets, shape (n,)."""

    files: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True)
class ObjectNames:
    """Where the records of `n` pages lie in a bucket: the name of an object each."""

    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Batch:
    """Pages of one host pool that one call moves, with their names on the medium."""

    geometry: PoolGeometry
    numbers: npt.NDArray[np.int64]
    keys: Sequence[bytes]
    namespace: bytes
    loan: Loan = field(default_factory=Loan, compare=False)
    """Says until when the host pages may be touched."""

    def take(self, rows: npt.NDArray[np.int64]) -> "Batch":
        """The pages at `rows` of this batch."""
        return replace(self, numbers=self.numbers[rows], keys=[self.keys[i] for i in rows])


@dataclass(frozen=True)
class WriteStamp:
    """What a writer puts in the trailers of one batch."""

    generation: int
    writer: bytes
    depths: npt.NDArray[np.int64]
