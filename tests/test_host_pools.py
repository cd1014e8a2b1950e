"""Which host pools are understood, and how the others are refused."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pools
from hicache_nixl.errors import RegistrationError
from hicache_nixl.geometry import describe_pool
from hicache_nixl.host_pools import BYTE_ORDERS, Block, pool_kind, read_pool


@pytest.mark.parametrize(
    ("layout", "outer"),
    [("layer_first", 6), ("page_first", 2), ("page_first_direct", 2), ("page_head", 2)],
)
def test_mha_pool_is_one_block(layout: str, outer: int) -> None:
    """K and V are one tensor; layer_first cuts a page once per layer and side."""
    pool = pools.make_mha_pool(layout, layers=3)
    known = read_pool(pool)
    assert (known.layout, known.pages, known.page_tokens) == (layout, 4, 4)
    assert known.blocks == (Block(pool.kv_buffer.data_ptr(), pool.kv_buffer.nbytes, outer),)
    assert layout in BYTE_ORDERS


def without(pool: Any, **changes: Any) -> Any:
    """The pool with some attributes replaced."""
    for name, value in changes.items():
        setattr(pool, name, value)
    return pool


def strided_pool() -> Any:
    """A pool whose buffer has the right shape but runs over every other head of another."""
    pool = pools.make_mha_pool("page_first", heads=4)
    return without(pool, kv_buffer=pool.kv_buffer[:, :, :, ::2], head_num=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: pools.make_mha_pool("page_unified"),
            "unknown layout 'page_unified' of pool class MHATokenToKVPoolHost",
        ),
        (
            lambda: pools.make_mla_pool("page_unified"),
            "unknown layout 'page_unified' of pool class MLATokenToKVPoolHost",
        ),
        (
            lambda: without(pools.make_mla_pool(), layout="page_first_kv_split"),
            "unknown layout 'page_first_kv_split' of pool class MLATokenToKVPoolHost",
        ),
        (
            lambda: without(pools.make_mla_pool(), layout="page_head"),
            "unknown layout 'page_head' of pool class MLATokenToKVPoolHost",
        ),
        (
            lambda: without(pools.make_mha_pool(v_head_dim=4), layout="layer_first"),
            "unknown layout 'layer_first' of pool class AsymmetricMHATokenToKVPoolHost",
        ),
        (lambda: without(pools.make_mla_pool(), dcp_size=2), "context parallel size 2"),
        (lambda: pools.make_mla_pool(packed_fp8=True), "packed fp8 rows"),
        (lambda: pools.make_mla_pool(layer_shard_enabled=True), "layers sharded"),
        (lambda: without(pools.make_mha_pool(), shared_allocation_domain=object()), "shared"),
        (pools.make_dummy_mla_pool, "kv_buffer is None"),
        (strided_pool, "is not contiguous"),
        (lambda: without(pools.make_mha_pool(), layer_num=0), "layer_num is 0"),
        (lambda: without(pools.make_mha_pool(), head_num=True), "head_num is True"),
        (lambda: without(pools.make_mha_pool(), head_num=3), "has shape"),
        (lambda: without(pools.make_mha_pool(), v_head_dim=4), "K width 8 and V width 4"),
        (lambda: without(pools.make_mha_pool(), page_num=5), "5 pages of 4 tokens are not"),
        (lambda: without(pools.make_mha_pool(), dtype=torch.float32), "elements of 2 bytes"),
        (
            lambda: without(
                pools.make_mha_pool(), kv_buffer=torch.empty((2, 16, 2, 2, 8), device="meta")
            ),
            "on device meta",
        ),
        (
            lambda: without(pools.make_mha_pool(), kv_buffer=(torch.empty(1), torch.empty(1))),
            "kv_buffer is a tuple, not one tensor",
        ),
        (
            lambda: without(pools.make_mha_pool(v_head_dim=4), kv_buffer=torch.empty(1)),
            "not a pair of K and V",
        ),
    ],
)
def test_pools_that_are_not_understood(make: Callable[[], Any], message: str) -> None:
    """A pool that stores pages in another way is refused by one line that says why."""
    with pytest.raises(RegistrationError, match=message) as caught:
        describe_pool(make())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pool_host.mha_mxfp8", "MHATokenToKVPoolMXFP8Host"),
        ("pool_host.mha", "MHATokenToKOnlyPoolHost"),
        ("pool_host.mha", "HiSparseMHATokenToKVPoolHost"),
        ("pool_host.mamba", "MambaPoolHost"),
        ("pool_host.dsa", "DSAIndexerPoolHost"),
        ("pool_host.page_interleave", "PageInterleaveHostPool"),
        ("pool_host.unified", "UnifiedPageEnvelopeHostPool"),
        ("pool_host.group", "HostPoolGroup"),
        ("memory_pool_host", "DeepSeekV4PagedHostPool"),
        ("memory_pool_host", "LogicalHostPool"),
    ],
)
def test_other_pool_classes_are_refused_by_name(module: str, name: str) -> None:
    """Classes that are not listed, subclasses of listed ones among them, are refused."""
    kind = getattr(importlib.import_module(f"sglang.srt.mem_cache.{module}"), name)
    with pytest.raises(RegistrationError, match=f"unknown pool class {name}"):
        describe_pool(object.__new__(kind))


def test_a_subclass_under_its_base_name_is_refused() -> None:
    """A subclass that calls itself like its base is not taken for it."""
    base = type(pools.make_mha_pool())
    impostor = type(base.__name__, (base,), {})
    with pytest.raises(RegistrationError, match="unknown pool class MHATokenToKVPoolHost"):
        describe_pool(object.__new__(impostor))


def test_pool_without_an_expected_attribute() -> None:
    """An attribute that another SGLang version dropped is named."""
    pool = pools.make_mha_pool()
    del pool.head_dim
    with pytest.raises(RegistrationError, match="MHATokenToKVPoolHost has no attribute 'head_dim'"):
        describe_pool(pool)


def test_kinds() -> None:
    """MHA pools shard heads over ranks, MLA pools do not."""
    assert pool_kind(pools.make_mha_pool()) == "mha"
    assert pool_kind(pools.make_mha_pool(v_head_dim=4)) == "mha"
    assert pool_kind(pools.make_mla_pool()) == "mla"
