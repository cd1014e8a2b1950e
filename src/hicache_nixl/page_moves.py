"""Moves the pages of one call, which may lie in several pools, within one deadline.

Trouble with storage is a miss, pool by pool (`guard.py`). Must not know: SGLang, host pools, keys.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_nixl.batch import Batch
from hicache_nixl.metrics import Meter
from hicache_nixl.startup import Tier
from hicache_nixl.stores.base import Flags


@dataclass(frozen=True)
class PoolPages:
    """Pages of one pool in a call. Without `batch` there is nothing to move, and all are good."""

    count: int
    batch: Batch | None
    prefix: Sequence[bytes] = ()


class PageMoves:
    """Safe for threads. Results are one boolean per page, pool by pool.

    Pools move one after the other: two that wait for one device do not get it sooner.

    Args:
        tier: whose guard and mover do the work.
        meter: gets one sample for each call that moved something, all pools together.
        deadline_s: seconds that a call may take.
    """

    def __init__(self, tier: Tier, meter: Meter, deadline_s: float) -> None:
        self._tier = tier
        self._meter = meter
        self._deadline_s = deadline_s

    def read(self, parts: Sequence[PoolPages]) -> list[list[bool]]:
        """Get pages; True for each that is there, whole and right."""
        return self._move("get", self._tier.guard.get, parts)

    def write(self, parts: Sequence[PoolPages]) -> list[list[bool]]:
        """Put pages; True for each that is stored now."""
        return self._move("set", self._tier.guard.put, parts)

    def _move(
        self, name: str, operation: Callable[..., Flags], parts: Sequence[PoolPages]
    ) -> list[list[bool]]:
        deadline = time.monotonic() + self._deadline_s
        results: list[list[bool]] = []
        with self._meter.moving(name, sum(part.count for part in parts)) as measured:
            for part in parts:
                if part.batch is None:
                    results.append([True] * part.count)
                    continue
                flags: list[bool] = operation(
                    self._tier.mover, part.batch, part.prefix, deadline=deadline
                ).tolist()
                measured.hits += sum(flags)
                measured.nbytes += sum(flags) * part.batch.geometry.payload_bytes
                results.append(flags)
        return results
