"""The table of a connector's host pools, on a tier that only takes notes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pools
from connectors import LogicalHostPool, keys
from hicache_nixl.errors import RegistrationError
from hicache_nixl.geometry import PoolGeometry
from hicache_nixl.identity import Namespace, identify
from hicache_nixl.placement import Placement
from hicache_nixl.registered_pools import PoolTable, StoredKeys

DEADLINE = 7.0


class NotingTier:
    """Takes every pool, knows which pages are stored, and notes what it is asked."""

    def __init__(self, staging_bytes: int = 1 << 20) -> None:
        self.opened: list[Namespace] = []
        self.memory: list[PoolGeometry] = []
        self.stored: set[tuple[bytes, bytes]] = set()
        self.asked: list[str] = []
        self.staging = SimpleNamespace(nbytes=staging_bytes)
        self.mover = SimpleNamespace(placement=lambda g: Placement(g, direct_io=True))
        self.guard = self
        self.open_namespace = self.opened.append
        self.register_pool = self.memory.append

    def present(self, namespace: bytes, names: list[bytes], *, deadline: float) -> Any:
        assert deadline == DEADLINE
        self.asked.append("present")
        return np.array([(namespace, name) in self.stored for name in names], np.bool_)

    def exists(self, namespace: bytes, names: list[bytes], *, deadline: float) -> int:
        assert deadline == DEADLINE
        self.asked.append("exists")
        return int(np.append([(namespace, name) in self.stored for name in names], False).argmin())


def table(tier: NotingTier) -> PoolTable:
    def name_it(pool: Any, geometry: PoolGeometry, name: str) -> Namespace:
        settings = SimpleNamespace(model_revision=None, salt=None)
        config = pools.StorageConfig()
        return identify(
            pool=pool, geometry=geometry, storage_config=config, settings=settings, pool_name=name
        )

    return PoolTable(tier, name_it)  # type: ignore[arg-type]


def test_a_pool_has_one_name_and_one_namespace() -> None:
    """Each name has a namespace of its own; memory is registered once for a pool of two names."""
    tier = NotingTier()
    known = table(tier)
    pool = pools.make_mha_pool()
    kv, is_new = known.add(pool, "kv")
    assert is_new
    assert known.add(pool, "kv") == (kv, False)
    swa, is_new = known.add(pool, "swa")
    assert is_new
    known.add(pools.make_mha_pool(), "draft")
    assert len({namespace.digest for namespace in tier.opened}) == len(tier.opened) == 3
    assert len(tier.memory) == 2
    assert known["swa"] is swa
    assert [entry.name for entry in known.all()] == ["kv", "swa", "draft"]


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (pools.make_mha_pool, "kv", "another host pool 'kv' is registered already"),
        (object, "swa", "unknown pool class object"),
        (lambda: pools.make_mha_pool(page_size=64), "swa", "raise staging"),
    ],
    ids=["taken", "not understood", "too large"],
)
def test_what_is_refused_changes_nothing(make: Any, name: str, words: str) -> None:
    """A refused pool is one line; table, store and engines are as before."""
    tier = NotingTier(staging_bytes=8192)
    known = table(tier)
    entry, _ = known.add(pools.make_mha_pool(), "kv")
    with pytest.raises(RegistrationError, match=words) as caught:
        known.add(make(), name)
    assert "\n" not in str(caught.value)
    assert known.all() == [entry]
    assert len(tier.opened) == len(tier.memory) == 1


def test_a_name_that_is_not_there() -> None:
    """The error of an unknown name says which ones are known."""
    known = table(NotingTier())
    with pytest.raises(RegistrationError, match=r"'swa' is not registered \(registered: none\)"):
        known["swa"]
    known.add(pools.make_mha_pool(), "kv")
    with pytest.raises(RegistrationError, match=r"'swa' is not registered \(registered: kv\)"):
        known["swa"]


def test_batches_of_a_pool() -> None:
    """A batch has the pages of the indices under the pool's own namespace; no keys, no batch."""
    known = table(NotingTier())
    kv, _ = known.add(pools.make_mha_pool(pages=4), "kv")
    batch = kv.batch(keys(2), pools.token_indices([3, 1], 4))
    assert batch is not None
    assert batch.numbers.tolist() == [3, 1]
    assert [key.hex() for key in batch.keys] == keys(2)
    assert kv.page_bytes is not None
    assert batch.namespace == kv.page_bytes.namespace.digest
    assert kv.batch([], torch.empty(0, dtype=torch.int64)) is None


def test_a_pool_without_bytes() -> None:
    """A pool that only counts pages has no batch and every page; indices must fit all the same."""
    tier = NotingTier()
    known = table(tier)
    kv, _ = known.add(LogicalHostPool(32, 8), "kv")
    assert tier.opened == tier.memory == []
    assert kv.batch(keys(2), torch.arange(16)) is None
    for indices, found in ((torch.arange(8), "8"), (None, "no")):
        with pytest.raises(RegistrationError, match=f"'kv': {found} host indices for 2 keys: pass"):
            kv.batch(keys(2), indices)
    stored = StoredKeys(tier, known, keys(3), deadline=DEADLINE)  # type: ignore[arg-type]
    assert stored.leading_run("kv", 2) == 2
    assert stored.present("kv", 3).tolist() == [True] * 3
    assert tier.asked == []


def test_what_is_stored_is_asked_pool_by_pool() -> None:
    """Each question is one question to the store, in the namespace of its pool and no further than
    asked."""
    tier = NotingTier()
    known = table(tier)
    for name in ("kv", "swa"):
        known.add(pools.make_mha_pool(), name)
    kv, swa = (namespace.digest for namespace in tier.opened)
    names = [bytes.fromhex(key) for key in keys(4)]
    tier.stored = {(kv, names[0]), (kv, names[1]), (kv, names[3]), (swa, names[1])}
    stored = StoredKeys(tier, known, keys(4), deadline=DEADLINE)  # type: ignore[arg-type]
    assert stored.leading_run("kv", 4) == 2
    assert stored.leading_run("kv", 1) == 1
    assert stored.present("swa", 3).tolist() == [False, True, False]
    assert tier.asked == ["exists", "exists", "present"]
