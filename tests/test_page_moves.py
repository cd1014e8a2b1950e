"""Several pools in one call, on a store that only takes notes."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_nixl.batch import Batch
from hicache_nixl.errors import StoreError
from hicache_nixl.guard import Guard
from hicache_nixl.metrics import Meter
from hicache_nixl.page_moves import PageMoves, PoolPages

PAYLOAD = 1000
DEADLINE_S = 30.0


def pages(count: int, namespace: bytes = b"a") -> PoolPages:
    """Pages of a pool; its namespace tells it apart."""
    geometry: Any = SimpleNamespace(payload_bytes=PAYLOAD)
    keys = [bytes([i]) for i in range(count)]
    return PoolPages(count, Batch(geometry, np.arange(count), keys, namespace), [namespace])


def moves_on(
    get: Callable[..., Any] | None = None, put: Callable[..., Any] | None = None
) -> tuple[PageMoves, Meter]:
    """Moves on a store of these two calls."""
    store: Any = SimpleNamespace(get=get, put=put)
    guard = Guard(store, deadline_s=DEADLINE_S)
    tier: Any = SimpleNamespace(mover="mover", guard=guard)
    return PageMoves(tier, guard.meter, DEADLINE_S), guard.meter


def good(mover: Any, batch: Batch, prefix: Any, *, deadline: float) -> Any:
    """All pages but the first of pool b."""
    assert mover == "mover"
    assert prefix == [batch.namespace]
    return np.array([batch.namespace != b"b" or i > 0 for i in range(len(batch.keys))], np.bool_)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_results_and_samples(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results come pool by pool, in order; a call is one sample of the pages that moved and of
    their bytes in a second."""
    clock = SimpleNamespace(perf_counter=iter((10.0, 12.0, 13.0, 14.0)).__next__)
    monkeypatch.setattr("hicache_nixl.metrics.time", clock)
    moves, meter = moves_on(good, good)
    parts = [pages(3), PoolPages(2, None), pages(2, b"b"), pages(0, b"c"), pages(1, b"d")]
    results = getattr(moves, operation)(parts)
    assert results == [[True] * 3, [True] * 2, [False, True], [], [True]]
    samples = dict(zip(("read", "write"), meter.drain(), strict=True))
    assert samples.pop(operation) == [(5, 5 * PAYLOAD / 2.0 / 1e9)]
    assert samples.popitem()[1] == []
    assert getattr(moves, operation)([]) == []


@pytest.mark.parametrize("operation", ["read", "write"])
def test_trouble_is_a_miss_of_its_pool(operation: str, caplog: pytest.LogCaptureFixture) -> None:
    """A store that cannot answer for one pool costs that pool's pages alone, and is logged."""

    def failing(mover: Any, batch: Batch, prefix: Any, *, deadline: float) -> Any:
        if batch.namespace == b"b":
            raise StoreError("the index is gone")
        return good(mover, batch, prefix, deadline=deadline)

    moves, _ = moves_on(failing, failing)
    parts = [pages(2), pages(2, b"b"), pages(1, b"c")]
    assert getattr(moves, operation)(parts) == [[True, True], [False, False], [True]]
    assert "became a miss: the index is gone" in caplog.text


@pytest.mark.parametrize("operation", ["read", "write"])
def test_what_is_not_expected_is_raised(operation: str) -> None:
    """An error that is not of storage is not made a miss."""

    def broken(mover: Any, batch: Batch, prefix: Any, *, deadline: float) -> Any:
        if batch.namespace == b"b":
            raise ZeroDivisionError
        return good(mover, batch, prefix, deadline=deadline)

    moves, _ = moves_on(broken, broken)
    with pytest.raises(ZeroDivisionError):
        getattr(moves, operation)([pages(1), pages(1, b"b")])


@pytest.mark.parametrize("operation", ["read", "write"])
def test_one_deadline(operation: str) -> None:
    """All pools of a call share one deadline, that of the settings from now on; the store gets it
    with what its answer may take off."""
    given: list[float] = []

    def note(mover: Any, batch: Batch, prefix: Any, *, deadline: float) -> Any:
        given.append(deadline)
        return np.ones(len(batch.keys), np.bool_)

    moves, _ = moves_on(note, note)
    start = time.monotonic()
    getattr(moves, operation)([pages(1), pages(1, b"b"), pages(1, b"c")])
    assert len(given) == 3
    assert max(given) - min(given) < 1e-6
    assert start + DEADLINE_S - 0.5 <= given[0] <= time.monotonic() + DEADLINE_S - 0.5
