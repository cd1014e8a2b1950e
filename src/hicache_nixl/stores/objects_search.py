"""Which keys of a sequence are stored, with few requests: search, and what was seen lately.

Must not know how a key is looked for.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

WIDTH = 32
"""Probes of a round: 512 keys take two rounds."""


def leading_run(
    count: int, probe: Callable[[list[int]], Sequence[bool]], *, start: int = 0, width: int = WIDTH
) -> int:
    """Length of the leading run that is there, of `count` things of which those before `start` are.

    `probe` says of some positions which are there. What is stored of a sequence is its front,
    almost always, so that a few positions tell where it ends: key n-1 is then there and key n is
    not (or n is `count`). A hole before n can go unnoticed.
    """
    low, high = start, count
    while low < high:
        positions = _spread(low, high, width)
        there = probe(positions)
        for position, is_there in zip(positions, there, strict=True):
            if not is_there:
                high = position
                break
            low = position + 1
    return low


def _spread(low: int, high: int, width: int) -> list[int]:
    """Positions from `low` to `high - 1`, both among them, evenly apart."""
    positions: list[int] = np.unique(
        np.linspace(low, high - 1, min(width, high - low)).round().astype(np.int64)
    ).tolist()
    return positions


class Seen:
    """Objects that were seen to be there, for a short while. What was missing is not remembered.

    Safe for threads.

    Args:
        life_s: seconds that one is believed to be still there.
        limit: how many are remembered; the oldest go first.
    """

    def __init__(self, *, life_s: float, limit: int) -> None:
        self._life_s = life_s
        self._limit = limit
        self._lock = threading.Lock()
        self._until: dict[tuple[bytes, bytes], float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Remember that these are there now."""
        until = time.monotonic() + self._life_s
        with self._lock:
            for key in keys:
                self._until.pop((namespace, key), None)  # so that it is the youngest again
                self._until[namespace, key] = until
            while len(self._until) > self._limit:
                del self._until[next(iter(self._until))]

    def which(self, namespace: bytes, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Those of `keys` that were seen lately, shape (n,)."""
        now = time.monotonic()
        with self._lock:
            return np.array(
                [self._until.get((namespace, key), 0.0) > now for key in keys], np.bool_
            )

    def forget(self, namespace: bytes, keys: Sequence[bytes] | None = None) -> None:
        """They may be gone; all of the namespace if None."""
        with self._lock:
            if keys is None:
                keys = [key for space, key in self._until if space == namespace]
            for key in keys:
                self._until.pop((namespace, key), None)
