"""The v2 calls as SGLang makes them: models whose page lies in several host pools.

The pools are SGLang's own. Attention pools of other shapes stand in for other kinds where only
names and policies matter.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pools
import side_pools
from connectors import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    LogicalHostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    config,
    corrupt,
    keys,
)
from hicache_nixl import HiCacheNixlConnector
from hicache_nixl.errors import RegistrationError

ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
GROUPS = PoolHitPolicy.BLOCK_GROUPS
PAGES = 12
PREFIX = HiCacheStorageExtraInfo(prefix_keys=[])


def mha(seed: int = 1, **changes: Any) -> Any:
    """An MHA pool of PAGES pages with random bytes; 16 KiB a page in two segments."""
    shape = {"pages": PAGES, "page_size": 16, "layers": 4, "heads": 2, "head_dim": 32}
    layout = changes.pop("layout", "page_first")
    return pools.make_mha_pool(layout, seed=seed, **(shape | changes))


def mla(seed: int = 2, **changes: Any) -> Any:
    """An MLA pool of PAGES pages with random bytes; 5200 bytes a page, no multiple of 4 KiB."""
    shape = {"pages": PAGES, "page_size": 8, "layers": 5, "kv_lora_rank": 57, "qk_rope_head_dim": 8}
    layout = changes.pop("layout", "page_first")
    return pools.make_mla_pool(layout, seed=seed, **(shape | changes))


def mamba(seed: int = 4, layout: str = "page_first") -> Any:
    """A pool of PAGES recurrent states with random bytes, in two types and several segments."""
    return side_pools.make_mamba_pool(layout, states=PAGES, layers=3, seed=seed)


def hybrid(layout: str = "page_first", **changes: Any) -> dict[str, Any]:
    """A KV pool and three beside it, each with bytes of its own."""
    return {
        "kv": mha(1, layout=layout, **changes),
        "indexer": mla(2, layout=layout),
        "swa": mha(3, layout=layout, layers=2, head_dim=64),
        "mamba": mamba(4, layout="page_first" if layout == "layer_first" else layout),
    }


def move(
    name: str,
    pool: Any,
    names: Sequence[str],
    places: Sequence[int] | None = None,
    policy: PoolHitPolicy = ALL,
) -> PoolTransfer:
    """A transfer of pages at `places`, by default the first ones, under their keys."""
    where = list(range(len(names))) if places is None else list(places)
    return PoolTransfer(
        PoolName(name),
        host_indices=pools.token_indices(where, pool.page_size),
        keys=list(names),
        hit_policy=policy,
    )


def ask(name: str, policy: PoolHitPolicy = ALL, trailing: int = 1, **fields: Any) -> PoolTransfer:
    """A transfer as it comes with a query: no indices, and keys that only count."""
    names = None if policy is ALL else ["__placeholder__"] * trailing
    return PoolTransfer(PoolName(name), keys=names, hit_policy=policy, **fields)


def page_bytes(pool: Any, places: Sequence[int] | None = None) -> list[bytes]:
    return [pools.page_bytes(pool, page) for page in (range(PAGES) if places is None else places)]


Connect = Callable[..., HiCacheNixlConnector]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Makes connectors with pools registered in SGLang's sequence, all closed at the end."""
    opened: list[HiCacheNixlConnector] = []

    def make(host_pools: dict[str, Any], **changes: Any) -> HiCacheNixlConnector:
        connector = HiCacheNixlConnector(config(tmp_path / "store", **changes), {})
        opened.append(connector)
        anchor = next(iter(host_pools.values()))
        connector.register_mem_pool_host(anchor)
        for name, pool in host_pools.items():
            connector.register_mem_host_pool_v2(pool, PoolName(name))
        connector.on_host_pools_registered()
        return connector

    yield make
    for connector in opened:
        connector.close()


def store_everything(connector: HiCacheNixlConnector, host_pools: dict[str, Any]) -> None:
    """Store all PAGES pages of every pool, the pools beside the anchor first."""
    beside = [move(name, pool, keys(PAGES)) for name, pool in host_pools.items() if name != "kv"]
    results = connector.batch_set_v2(beside, PREFIX)
    assert results == {transfer.name: [True] * PAGES for transfer in beside}
    indices = pools.token_indices(list(range(PAGES)), host_pools["kv"].page_size)
    assert connector.batch_set_v1(keys(PAGES), indices, PREFIX) == [True] * PAGES


# -- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_direct_io", [True, False])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_every_pool_round_trips(connect: Connect, layout: str, use_direct_io: bool) -> None:
    """Pages of every pool, also those of odd size, come back byte for byte in every layout."""
    host_pools = hybrid(layout)
    wanted = {name: page_bytes(pool) for name, pool in host_pools.items()}
    connector = connect(host_pools, use_direct_io=use_direct_io)
    store_everything(connector, host_pools)
    for pool in host_pools.values():
        pools.clear(pool)
    got = connector.batch_get_v2(
        [move(name, pool, keys(PAGES)) for name, pool in host_pools.items()], PREFIX
    )
    assert got == {name: [True] * PAGES for name in host_pools}
    for name, pool in host_pools.items():
        assert page_bytes(pool) == wanted[name], name


@pytest.mark.parametrize("kind", side_pools.SIDE_POOLS)
def test_every_kind_of_pool_round_trips(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Every kind of pool that stands beside a KV pool comes back byte for byte, in each layout."""
    monkeypatch.setattr("hicache_nixl.connector_versions.kv_dtype", lambda _: "fp8_e4m3")
    pool = side_pools.make_side_pool(kind, seed=5)
    connector = connect({"kv": mha(1), "indexer": pool})
    wanted = page_bytes(pool, range(4))
    transfer = move("indexer", pool, keys(4))
    assert connector.batch_set_v2([transfer], PREFIX) == {"indexer": [True] * 4}
    pools.clear(pool)
    assert connector.batch_get_v2([transfer], PREFIX) == {"indexer": [True] * 4}
    assert page_bytes(pool, range(4)) == wanted


def test_equal_shapes_stay_apart(connect: Connect) -> None:
    """Two pools of one shape have pages of their own under the same keys."""
    host_pools = {"kv": mha(1), "draft": mha(2)}
    wanted = page_bytes(host_pools["draft"])
    connector = connect(host_pools)
    store_everything(connector, host_pools)
    pools.clear(host_pools["draft"])
    assert connector.batch_get_v2([move("draft", host_pools["draft"], keys(PAGES))], PREFIX)
    assert page_bytes(host_pools["draft"]) == wanted


def test_pages_move_to_the_places_asked_for(connect: Connect) -> None:
    """Each pool's pages go to the host pages that its own indices name, and to no others."""
    host_pools = hybrid()
    wanted = {name: page_bytes(pool) for name, pool in host_pools.items()}
    connector = connect(host_pools)
    store_everything(connector, host_pools)
    places = {"swa": [7, 2], "mamba": [9]}
    for name in places:
        pools.fill(host_pools[name], 9)
    before = {name: page_bytes(host_pools[name]) for name in places}
    names = {"swa": keys(PAGES)[3:5], "mamba": [keys(PAGES)[4]]}
    transfers = [
        move(name, host_pools[name], names[name], places[name], TRAILING) for name in places
    ]
    assert connector.batch_get_v2(transfers, PREFIX) == {"swa": [True, True], "mamba": [True]}
    after = {name: page_bytes(host_pools[name]) for name in places}
    assert [after["swa"][7], after["swa"][2]] == wanted["swa"][3:5]
    assert after["mamba"][9] == wanted["mamba"][4]
    for name, taken in places.items():
        rest = [page for page in range(PAGES) if page not in taken]
        assert [after[name][page] for page in rest] == [before[name][page] for page in rest]


def test_more_pages_than_staging(connect: Connect) -> None:
    """200 pages of two pools in one call round-trip with staging for a few."""
    shape = {"pages": 200, "layers": 8, "heads": 4, "head_dim": 64}  # 128 KiB a page
    host_pools = {"kv": mha(1, **shape), "draft": mha(2, **shape)}
    wanted = {name: page_bytes(pool, range(200)) for name, pool in host_pools.items()}
    connector = connect(host_pools, staging=8 * (128 + 4) * 1024)
    transfers = [move(name, pool, keys(200)) for name, pool in host_pools.items()]
    assert connector.batch_set_v2(transfers, PREFIX) == {"kv": [True] * 200, "draft": [True] * 200}
    for pool in host_pools.values():
        pools.clear(pool)
    assert connector.batch_get_v2(transfers, PREFIX) == {"kv": [True] * 200, "draft": [True] * 200}
    for name, pool in host_pools.items():
        assert page_bytes(pool, range(200)) == wanted[name]


def test_a_page_costs_no_more_transfers_than_segments(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of all pools takes one transfer a pool, of its segments and trailer at the most."""
    big = {"layers": 8, "heads": 4, "head_dim": 128}  # segments of 128 KiB move in place
    host_pools = {"kv": mha(1, **big), "draft": mha(2), "indexer": mla(3)}
    connector = connect(host_pools)
    posted: list[int] = []
    for engine in (connector._tier.reader, connector._tier.writer):
        post = engine.post

        def counting(operation: Any, memory: Any, file: Any, post: Any = post) -> Any:
            posted.append(len(memory))
            return post(operation, memory, file)

        monkeypatch.setattr(engine, "post", counting)
    transfers = [move(name, pool, keys(1)) for name, pool in host_pools.items()]
    for call in (connector.batch_set_v2, connector.batch_get_v2):
        posted.clear()
        assert all(results == [True] for results in call(transfers, PREFIX).values())
        assert posted == [2 + 1, 1, 1]


def test_results_are_found_by_name_and_text(connect: Connect) -> None:
    """Results are under SGLang's name of the pool and under its text."""
    host_pools = hybrid()
    connector = connect(host_pools)
    results = connector.batch_set_v2([move("swa", host_pools["swa"], keys(2))], PREFIX)
    assert results[PoolName.SWA] == results["swa"] == [True, True]


def test_pages_outlive_the_connector(connect: Connect) -> None:
    """A connector that is attached later, with the same pools, finds the pages of all."""
    host_pools = hybrid()
    wanted = {name: page_bytes(pool) for name, pool in host_pools.items()}
    first = connect(host_pools)
    store_everything(first, host_pools)
    first.close()
    second = connect(host_pools)
    needs = [ask("indexer"), ask("swa", TRAILING, 3), ask("mamba", TRAILING)]
    assert second.batch_exists_v2(keys(PAGES), needs).kv_hit_pages == PAGES
    for pool in host_pools.values():
        pools.clear(pool)
    second.batch_get_v2([move(n, p, keys(PAGES)) for n, p in host_pools.items()], PREFIX)
    assert {name: page_bytes(pool) for name, pool in host_pools.items()} == wanted


# -- what can be restored -------------------------------------------------------------------------


def test_a_prefix_needs_all_its_pools(connect: Connect) -> None:
    """The KV alone restores nothing; with a state at page 5 it is pages 0 to 4, and so on."""
    host_pools = hybrid()
    connector = connect(host_pools)
    kv, state = host_pools["kv"], host_pools["mamba"]
    connector.batch_set_v1(keys(PAGES), pools.token_indices(list(range(PAGES)), kv.page_size))
    need = [ask("mamba", TRAILING)]
    assert connector.batch_exists_v2(keys(PAGES), need).kv_hit_pages == 0
    assert connector.batch_exists_v2(keys(PAGES)).kv_hit_pages == PAGES
    for place in (4, 8):
        connector.batch_set_v2([move("mamba", state, [keys(PAGES)[place]], [place], TRAILING)])
    result = connector.batch_exists_v2(keys(PAGES), need)
    assert result.kv_hit_pages == 9
    assert result.restorable_prefix_pages == [5, 9]
    assert result.extra_pool_hit_pages == {"kv": PAGES, "mamba": 9}
    assert connector.batch_exists_v2(keys(PAGES)[:8], need).restorable_prefix_pages == [5]


def test_a_window_is_as_long_as_its_keys(connect: Connect) -> None:
    """As many trailing pages are needed as the transfer has keys; nearer the start, all of them."""
    host_pools = hybrid()
    connector = connect(host_pools)
    there = [0, 1, 3, 4, 5, 7, 8]
    names = keys(PAGES)
    connector.batch_set_v2(
        [
            move("kv", host_pools["kv"], names),
            move("swa", host_pools["swa"], [names[i] for i in there], there),
        ],
        PREFIX,
    )
    for trailing, restorable in ((1, [1, 2, 4, 5, 6, 8, 9]), (2, [1, 2, 5, 6, 9]), (3, [1, 2, 6])):
        result = connector.batch_exists_v2(names, [ask("swa", TRAILING, trailing)])
        assert result.restorable_prefix_pages == restorable


def test_a_gap_in_512_pages(connect: Connect) -> None:
    """Of 512 pages of which a pool beside the KV misses page 200, 200 can be restored."""
    shape = {"page_size": 1, "layers": 1, "pages": 512}
    host_pools = {"kv": mha(1, **shape), "indexer": mla(2, **shape)}
    connector = connect(host_pools)
    names = keys(512)
    there = [i for i in range(512) if i != 200]
    transfers = [
        move("kv", host_pools["kv"], names),
        move("indexer", host_pools["indexer"], [names[i] for i in there], there),
    ]
    assert all(all(results) for results in connector.batch_set_v2(transfers, PREFIX).values())
    result = connector.batch_exists_v2(names, [ask("indexer")])
    assert result.kv_hit_pages == 200
    assert result.extra_pool_hit_pages == {"kv": 512, "indexer": 200}


def test_block_groups_gate_nothing(connect: Connect) -> None:
    """A pool of block groups says what it covers and leaves the KV hit as it is."""
    host_pools = hybrid()
    connector = connect(host_pools)
    kv, groups = host_pools["kv"], host_pools["indexer"]
    connector.batch_set_v2([move("kv", kv, keys(3))], PREFIX)
    ends = [keys(PAGES)[i] for i in (3, 7)]
    connector.batch_set_v2([move("indexer", groups, ends, policy=GROUPS)], PREFIX)
    need = ask("indexer", GROUPS, block_pages=4, group_pages=1)
    result = connector.batch_exists_v2(keys(PAGES), [need])
    assert result.kv_hit_pages == 3
    assert result.extra_pool_hit_pages == {"kv": 3, "indexer": 8}


def test_nothing_asked(connect: Connect) -> None:
    """No keys, no transfers and transfers without pages have empty answers."""
    host_pools = hybrid()
    connector = connect(host_pools)
    assert connector.batch_exists_v2([], [ask("swa", TRAILING, 3)]).kv_hit_pages == 0
    assert connector.batch_exists_v2(keys(2), None).restorable_prefix_pages == []
    assert connector.batch_get_v2([]) == connector.batch_set_v2([]) == {}
    nothing = PoolTransfer(PoolName.SWA)
    assert connector.batch_get_v2([nothing]) == {"swa": []}
    assert connector.batch_set_v2([move("swa", host_pools["swa"], [])]) == {"swa": []}


situations = st.tuples(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=6),
    st.lists(
        st.tuples(
            st.sampled_from(["indexer", "swa", "mamba"]),
            st.sampled_from([ALL, TRAILING]),
            st.integers(1, 4),
        ),
        unique_by=lambda need: need[0],
        max_size=3,
    ),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(situations)
def test_agrees_with_sglang(
    connect: Connect,
    tmp_path_factory: pytest.TempPathFactory,
    situation: tuple[list[list[bool]], list[tuple[str, PoolHitPolicy, int]]],
) -> None:
    """Whatever pages of whatever pools are stored, the answer is that of SGLang's file backend
    with the same pages, through which they were also stored."""
    presence, needs = situation
    host_pools, connector = shared_hybrid(connect)
    assert connector.clear()
    names = keys(len(presence))
    theirs = HiCacheFile(config(Path()), str(tmp_path_factory.mktemp("file")))
    transfers = []
    for column, (name, pool) in enumerate(host_pools.items()):
        theirs.register_mem_host_pool_v2(pool, PoolName(name))
        rows = [i for i, row in enumerate(presence) if row[column]]
        transfers.append(move(name, pool, [names[i] for i in rows], rows))
    assert theirs.batch_set_v2(transfers) == connector.batch_set_v2(transfers, PREFIX)
    question = [ask(name, policy, n) for name, policy, n in needs]
    ours = connector.batch_exists_v2(names, question, PREFIX)
    wanted = theirs.batch_exists_v2(names, question, PREFIX)
    assert ours.kv_hit_pages == wanted.kv_hit_pages
    assert ours.restorable_prefix_pages == (wanted.restorable_prefix_pages or [])
    assert ours.extra_pool_hit_pages == wanted.extra_pool_hit_pages


_shared: dict[int, tuple[dict[str, Any], HiCacheNixlConnector]] = {}


def shared_hybrid(connect: Connect) -> tuple[dict[str, Any], HiCacheNixlConnector]:
    """One connector for all examples of a test."""
    if id(connect) not in _shared:
        host_pools = hybrid()
        _shared[id(connect)] = (host_pools, connect(host_pools))
    return _shared[id(connect)]


# -- pages that went ------------------------------------------------------------------------------


def test_an_evicted_page_of_a_sidecar(connect: Connect) -> None:
    """A page that is evicted from one pool cuts the prefix there, and is stored again later."""
    host_pools = hybrid()
    connector = connect(host_pools)
    store_everything(connector, host_pools)
    namespace = connector._pools["indexer"].page_bytes.namespace.digest
    opening = connector._tier.store._opening
    number, key = opening.number(namespace), bytes.fromhex(keys(PAGES)[6])
    assert opening.index.forget(number, list(opening.index.locate(number, [key]).items())) == 1
    needs = [ask("indexer"), ask("swa", TRAILING, 2)]
    result = connector.batch_exists_v2(keys(PAGES), needs)
    assert result.kv_hit_pages == 6
    assert result.extra_pool_hit_pages == {"kv": PAGES, "indexer": 6, "swa": PAGES}
    got = connector.batch_get_v2([move("indexer", host_pools["indexer"], keys(PAGES))], PREFIX)
    assert got["indexer"][:7] == [True] * 6 + [False]
    store_everything(connector, host_pools)
    assert connector.batch_exists_v2(keys(PAGES), needs).kv_hit_pages == PAGES


def test_a_damaged_page_of_a_sidecar(connect: Connect, tmp_path: Path) -> None:
    """A flipped bit in one pool's page is a miss of that page alone; afterwards the prefix is cut
    there."""
    host_pools = hybrid()
    wanted = {name: page_bytes(pool) for name, pool in host_pools.items()}
    connector = connect(host_pools, use_direct_io=False)
    store_everything(connector, host_pools)
    corrupt(tmp_path / "store", wanted["swa"][3][:64])
    for pool in host_pools.values():
        pools.clear(pool)
    got = connector.batch_get_v2([move(n, p, keys(PAGES)) for n, p in host_pools.items()], PREFIX)
    assert got["swa"][:4] == [True, True, True, False]
    assert all(all(got[name]) for name in host_pools if name != "swa")
    for name, results in got.items():
        for page, found in enumerate(results):
            assert not found or pools.page_bytes(host_pools[name], page) == wanted[name][page]
    result = connector.batch_exists_v2(keys(PAGES), [ask("swa", TRAILING)])
    assert 4 not in result.restorable_prefix_pages
    assert connector.batch_exists_v2(keys(PAGES), [ask("swa")]).kv_hit_pages == 3


def test_storage_trouble_is_a_miss(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """With an index that fails, v2 calls return misses and log one line each kind."""
    host_pools = hybrid()
    connector = connect(host_pools)
    store_everything(connector, host_pools)
    connector._tier.store._opening.index.close()
    caplog.clear()
    transfers = [move(name, pool, keys(2)) for name, pool in host_pools.items()]
    for _ in range(2):
        result = connector.batch_exists_v2(keys(2), [ask("swa")])
        assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (0, {})
        for call in (connector.batch_get_v2, connector.batch_set_v2):
            assert call(transfers, PREFIX) == {name: [False] * 2 for name in host_pools}
    troubles = [r for r in caplog.records if "became a miss" in r.message]
    assert len(troubles) == 3


# -- topologies and several connectors ------------------------------------------------------------


def ranks(connect: Connect, **pools_of: Callable[[int], Any]) -> list[tuple[dict[str, Any], Any]]:
    """Two TP ranks of an MLA model, each with its own pools and connector."""
    found = []
    for rank in (0, 1):
        host_pools = {name: make(rank) for name, make in pools_of.items()}
        connector = connect(host_pools, is_mla_model=True, tp_rank=rank, tp_size=2)
        found.append((host_pools, connector))
    return found


def test_sharded_state_beside_shared_kv(connect: Connect) -> None:
    """State that differs between TP ranks is stored by every rank and comes back to its own,
    beside MLA pages that one rank stores for all."""
    both = ranks(
        connect,
        kv=lambda rank: mla(7),
        indexer=lambda rank: mla(8, layers=2),
        mamba=lambda rank: mamba(10 + rank),
    )
    wanted = [page_bytes(host_pools["mamba"], range(2)) for host_pools, _ in both]
    assert wanted[0] != wanted[1]
    need = [ask("indexer"), ask("mamba", TRAILING, 1)]
    for rank in (1, 0):
        host_pools, connector = both[rank]
        # SGLang itself leaves out all but the state on rank 1; whatever it sends is right.
        transfers = [move(name, pool, keys(2)) for name, pool in host_pools.items()]
        assert all(all(r) for r in connector.batch_set_v2(transfers, PREFIX).values())
        if rank == 1:
            assert connector.batch_exists(keys(2)) == 0
            assert connector.batch_exists_v2(keys(2), need).kv_hit_pages == 0
    for rank, (host_pools, connector) in enumerate(both):
        assert connector.batch_exists_v2(keys(2), need).restorable_prefix_pages == [1, 2]
        shared = page_bytes(host_pools["kv"], range(2))
        for pool in host_pools.values():
            pools.clear(pool)
        got = connector.batch_get_v2([move(n, p, keys(2)) for n, p in host_pools.items()], PREFIX)
        assert all(all(results) for results in got.values())
        assert page_bytes(host_pools["mamba"], range(2)) == wanted[rank]
        assert page_bytes(host_pools["kv"], range(2)) == shared


def test_a_rank_reads_only_its_own_state(connect: Connect) -> None:
    """What rank 0 alone has stored of a sharded pool is missing on rank 1."""
    (pools0, first), (pools1, second) = ranks(
        connect, kv=lambda rank: mla(7), mamba=lambda rank: mamba(10 + rank)
    )
    transfers = [move(name, pool, keys(2)) for name, pool in pools0.items()]
    assert all(all(results) for results in first.batch_set_v2(transfers, PREFIX).values())
    assert second.batch_exists(keys(2)) == 2
    assert second.batch_exists_v2(keys(2), [ask("mamba", TRAILING)]).kv_hit_pages == 0
    before = page_bytes(pools1["mamba"])
    assert second.batch_get_v2([move("mamba", pools1["mamba"], keys(2))]) == {"mamba": [False] * 2}
    assert page_bytes(pools1["mamba"]) == before


def test_pools_that_sglang_never_stores(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """On a rank that does not store KV, a sharded pool other than the state is warned of."""
    ranks(connect, kv=lambda rank: mla(7), draft=lambda rank: mha(9))
    warnings = [r.message for r in caplog.records if "no prefix that needs it" in r.message]
    assert len(warnings) == 1
    assert "'draft'" in warnings[0]
    caplog.clear()
    ranks(connect, kv=lambda rank: mla(7), mamba=lambda rank: mamba(9), indexer=lambda rank: mla(8))
    assert "no prefix that needs it" not in caplog.text


def test_two_connectors_on_one_store(connect: Connect) -> None:
    """Replicas share the pages of every pool; another model shares none, and clearing one model
    leaves the other's."""
    ours, replica, other = hybrid(), hybrid(), hybrid()
    first, second = connect(ours), connect(replica)
    third = connect(other, model_name="org/other")
    needs = [ask("indexer"), ask("swa", TRAILING, 2), ask("mamba", TRAILING)]
    store_everything(first, ours)
    assert second.batch_exists_v2(keys(PAGES), needs).kv_hit_pages == PAGES
    assert third.batch_exists_v2(keys(PAGES), needs).extra_pool_hit_pages == {}
    transfers = [move(name, pool, keys(2)) for name, pool in other.items()]
    assert third.batch_get_v2(transfers, PREFIX) == {name: [False] * 2 for name in other}
    store_everything(third, other)
    assert first.clear() is True
    assert second.batch_exists_v2(keys(PAGES), needs).extra_pool_hit_pages == {}
    for name, pool in replica.items():
        assert second.batch_get_v2([move(name, pool, keys(1))]) == {name: [False]}
    assert third.batch_exists_v2(keys(PAGES), needs).kv_hit_pages == PAGES


def test_threads_together(connect: Connect) -> None:
    """Threads that set, ask for and get pages of all pools at once never see a wrong byte."""
    host_pools = hybrid(pages=3 * PAGES)
    host_pools = {
        "kv": mha(1, pages=36),
        "swa": mha(3, pages=36, layers=2),
        "indexer": mla(2, pages=36),
    }
    wanted = {name: page_bytes(pool) for name, pool in host_pools.items()}
    connector = connect(host_pools)
    failures: list[str] = []

    def backup() -> None:
        for _ in range(15):
            transfers = [move(name, pool, keys(PAGES)) for name, pool in host_pools.items()]
            connector.batch_set_v2(transfers, PREFIX)
            connector.clear()

    def prefetch(offset: int) -> None:
        places = list(range(offset, offset + PAGES))
        for _ in range(15):
            connector.batch_exists_v2(keys(PAGES), [ask("indexer"), ask("swa", TRAILING, 3)])
            transfers = [move(n, pool, keys(PAGES), places) for n, pool in host_pools.items()]
            for name, results in connector.batch_get_v2(transfers, PREFIX).items():
                failures.extend(
                    f"page {i} of {name} is wrong"
                    for i, found in enumerate(results)
                    if found and pools.page_bytes(host_pools[name], places[i]) != wanted[name][i]
                )

    work = [backup, backup, lambda: prefetch(PAGES), lambda: prefetch(2 * PAGES)]
    threads = [threading.Thread(target=target) for target in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert {name: page_bytes(pool) for name, pool in host_pools.items()} == wanted


# -- an anchor without bytes ----------------------------------------------------------------------


def test_an_anchor_without_bytes(connect: Connect) -> None:
    """Its v1 calls have nothing to move and say True; what is there follows from the others."""
    host_pools = {"kv": LogicalHostPool(PAGES * 8, 8), "deepseek_v4_c4": mla(3), "swa": mla(4)}
    connector = connect(host_pools)
    indices = torch.arange(2 * 8)
    needs = [ask("deepseek_v4_c4"), ask("swa", TRAILING, 2)]
    assert connector.batch_set_v1(keys(2), indices, PREFIX) == [True, True]
    assert connector.batch_exists_v2(keys(3), needs).extra_pool_hit_pages == {}
    transfers = [move(name, host_pools[name], keys(3)) for name in ("deepseek_v4_c4", "swa")]
    wanted = {name: page_bytes(host_pools[name], range(3)) for name in ("deepseek_v4_c4", "swa")}
    assert all(all(results) for results in connector.batch_set_v2(transfers, PREFIX).values())
    result = connector.batch_exists_v2(keys(4), needs)
    assert result.restorable_prefix_pages == [1, 2, 3]
    assert result.extra_pool_hit_pages == {"deepseek_v4_c4": 3, "swa": 3}
    assert connector.batch_get_v1(keys(2), indices, PREFIX) == [True, True]
    for name in wanted:
        pools.clear(host_pools[name])
    connector.batch_get_v2(transfers, PREFIX)
    assert {name: page_bytes(host_pools[name], range(3)) for name in wanted} == wanted
    assert connector.batch_exists(keys(3)) == 0
    assert connector.batch_exists_v2(keys(3)).kv_hit_pages == 0
    with pytest.raises(RegistrationError, match=r"'kv': 16 host indices for 3 keys: pass 24"):
        connector.batch_get_v1(keys(3), indices)
    assert connector.clear()
    assert connector.batch_exists_v2(keys(4), needs).kv_hit_pages == 0


def test_an_anchor_without_bytes_or_sidecar(connect: Connect) -> None:
    """Nothing but an anchor without bytes is one line, when the pools are complete."""
    with pytest.raises(RegistrationError, match="no host pool with bytes is registered") as caught:
        connect({"kv": LogicalHostPool(64, 8)})
    assert "kv" in str(caught.value)
    assert "\n" not in str(caught.value)


# -- misuse ---------------------------------------------------------------------------------------


def refused(call: Callable[[], Any], words: str) -> None:
    """The call is refused in one line with these words."""
    with pytest.raises(RegistrationError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_transfers_before_registration(tmp_path: Path) -> None:
    """v2 calls before a pool is registered, and after close, are one clear error."""
    pool = mha()
    connector = HiCacheNixlConnector(config(tmp_path / "store"), {})
    calls = (
        lambda: connector.batch_exists_v2(keys(1), [ask("swa")]),
        lambda: connector.batch_get_v2([move("swa", pool, keys(1))]),
        lambda: connector.batch_set_v2([move("swa", pool, keys(1))]),
    )
    for call in calls:
        refused(call, "register_mem_pool_host first")
    refused(connector.on_host_pools_registered, r"registered: none")
    connector.register_mem_pool_host(pool)
    connector.close()
    for call in (*calls, lambda: connector.register_mem_host_pool_v2(mha(), "swa")):
        refused(call, "closed")


def test_unknown_pool(connect: Connect) -> None:
    """A transfer that names a pool which is not registered is refused, and names those that are."""
    host_pools = {"kv": mha(1), "swa": mha(2)}
    connector = connect(host_pools)
    words = r"host pool 'mamba' is not registered \(registered: kv, swa\)"
    good, bad = move("swa", host_pools["swa"], keys(2)), move("mamba", host_pools["swa"], keys(2))
    refused(lambda: connector.batch_exists_v2(keys(2), [ask("mamba", TRAILING)]), words)
    refused(lambda: connector.batch_exists_v2([], [ask("mamba", TRAILING)]), words)
    refused(lambda: connector.batch_set_v2([good, bad]), words)
    refused(lambda: connector.batch_get_v2([good, bad]), words)
    assert connector.batch_get_v2([good]) == {"swa": [False, False]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host_indices": None}, "host pool 'draft': host indices are missing"),
        ({"keys": None}, "host pool 'draft': 32 host indices for 0 keys"),
        ({"keys": keys(3)}, "host pool 'draft': 32 host indices for 3 keys: pass 48"),
        ({"keys": keys(1)}, "host pool 'draft': 32 host indices for 1 keys: pass 16"),
        ({"host_indices": torch.arange(8, 40)}, "host index 8 starts a page"),
        ({"host_indices": torch.arange(32) + PAGES * 16}, "host index 192 is outside the pool"),
        ({"keys": [keys(1)[0], ""]}, "host pool 'draft': page key is empty"),
        ({"name": PoolName.SWA}, "host pool 'swa' is named twice in one call"),
    ],
)
def test_nothing_is_touched_by_a_call_that_is_wrong(
    connect: Connect, change: dict[str, Any], words: str
) -> None:
    """One transfer that does not fit refuses the whole call: no other page is stored or read."""
    host_pools = {"kv": mha(1), "swa": mha(2), "draft": mha(3)}
    connector = connect(host_pools)
    good, bad = (move(name, host_pools[name], keys(2)) for name in ("swa", "draft"))
    for field, value in change.items():
        setattr(bad, field, value)
    refused(lambda: connector.batch_set_v2([good, bad], PREFIX), words)
    assert connector.batch_exists_v2(keys(2), [ask("swa")]).extra_pool_hit_pages == {}
    connector.batch_set_v2([good], PREFIX)
    pools.clear(host_pools["swa"])
    refused(lambda: connector.batch_get_v2([good, bad], PREFIX), words)
    assert not any(any(page) for page in page_bytes(host_pools["swa"]))


def test_queries_that_are_wrong(connect: Connect) -> None:
    """A policy that is not known, and groups without pages, are refused by the pool's name."""
    connector = connect({"kv": mha(1), "swa": mha(2)})
    need = ask("swa")
    need.hit_policy = "some_pages"
    refused(lambda: connector.batch_exists_v2(keys(1), [need]), "'swa' has the hit policy 'some_")
    refused(lambda: connector.batch_exists_v2(keys(1), [ask("swa", GROUPS)]), "'swa' has groups of")


def test_register_again(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """The same pool under its name changes nothing; another pool under it, and a pool that is not
    understood, are refused and change nothing either."""
    host_pools = {"kv": mha(1), "swa": mha(2)}
    connector = connect(host_pools)
    connector.register_mem_host_pool_v2(host_pools["swa"], "swa")
    connector.register_mem_host_pool_v2(host_pools["swa"], PoolName.SWA)
    refused(
        lambda: connector.register_mem_host_pool_v2(mha(3), PoolName.SWA),
        "another host pool 'swa' is registered already",
    )
    odd = mha(4)
    odd.layout = "page_last"
    refused(lambda: connector.register_mem_host_pool_v2(odd, PoolName.MAMBA), "page_last")
    refused(lambda: connector.batch_exists_v2(keys(1), [ask("mamba")]), "'mamba' is not registered")
    store_everything(connector, host_pools)
    assert connector.batch_exists_v2(keys(PAGES), [ask("swa")]).kv_hit_pages == PAGES


# -- what is said ---------------------------------------------------------------------------------


def test_pools_are_listed(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """One block names every pool, its bytes, segments and way; a later pool gets a line."""
    caplog.set_level(logging.INFO, "hicache_nixl")
    big = mha(1, layers=8, heads=4, head_dim=128)
    connector = connect({"kv": big, "indexer": mla(2), "draft": LogicalHostPool(64, 16)})
    blocks = [r.message for r in caplog.records if r.message.startswith("host pools")]
    assert len(blocks) == 1
    lines = blocks[0].splitlines()
    assert (
        "  kv: page_first, 12 pages of 16 tokens, 262144 bytes in 2 segments, in place" in lines[1]
    )
    assert "  indexer: page_first, 12 pages of 8 tokens, 5200 bytes in 1 segments, " in lines[2]
    assert "through staging; namespace" in lines[2]
    assert lines[3] == "  draft: no bytes of its own, pages of 16 tokens"
    caplog.clear()
    connector.register_mem_host_pool_v2(mha(5), PoolName.SWA)
    connector.register_mem_host_pool_v2(big, PoolName.KV)
    assert [r.message.split(",")[0] for r in caplog.records] == ["host pool swa: page_first"]


def test_pools_are_listed_where_sglang_does_not_say_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a version of SGLang that does not announce the end, each pool gets a line at once."""
    caplog.set_level(logging.INFO, "hicache_nixl")
    monkeypatch.delattr(HiCacheStorage, "on_host_pools_registered")
    connector = HiCacheNixlConnector(config(tmp_path / "store"), {})
    try:
        connector.register_mem_pool_host(mha(1))
        connector.register_mem_host_pool_v2(mha(2), "swa")
    finally:
        connector.close()
    lines = [r.message.split(",")[0] for r in caplog.records if r.message.startswith("host pool")]
    assert lines == ["host pool kv: page_first", "host pool swa: page_first"]


def test_stats_count_v2(connect: Connect) -> None:
    """A v2 call is one sample, of the pages of all its pools that really moved."""
    host_pools = hybrid()
    connector = connect(host_pools)
    both = {name: host_pools[name] for name in ("swa", "mamba")}
    connector.batch_set_v2([move(name, pool, keys(3)) for name, pool in both.items()], PREFIX)
    connector.batch_get_v2([move(name, pool, keys(4)) for name, pool in both.items()], PREFIX)
    stats = connector.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([6], [6])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1


def test_what_the_store_is_given(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """One deadline holds for all pools of a call; the prefix is in use by pools that need all of
    it, and not by those that need its end."""
    host_pools = hybrid()
    connector = connect(host_pools)
    given: list[tuple[float, int]] = []

    def put(mover: Any, batch: Any, prefix: Sequence[bytes], *, deadline: float) -> Any:
        given.append((deadline, len(prefix)))
        return np.ones(len(batch.keys), np.bool_)

    monkeypatch.setattr(connector._tier.store, "put", put)
    transfers = [
        move("indexer", host_pools["indexer"], keys(3)),
        move("swa", host_pools["swa"], keys(2), policy=TRAILING),
    ]
    connector.batch_set_v2(transfers, HiCacheStorageExtraInfo(prefix_keys=keys(5, "p")))
    assert [prefix for _, prefix in given] == [5, 0]
    assert len({deadline for deadline, _ in given}) == 1


def test_prefix_keys_are_wanted(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Without prefix keys, v2 calls that use them warn once."""
    host_pools = hybrid()
    connector = connect(host_pools)
    connector.batch_set_v2([move("swa", host_pools["swa"], keys(1), policy=TRAILING)])
    assert "hicache_storage_pass_prefix_keys" not in caplog.text
    for _ in range(2):
        connector.batch_set_v2([move("indexer", host_pools["indexer"], keys(1))])
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1
