"""Which host pools are understood, and how the others are refused."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pools
import side_pools
from hicache_nixl.errors import RegistrationError
from hicache_nixl.geometry import describe_pool
from hicache_nixl.host_pools import Block, is_replicated, pool_kind, read_pool
from hicache_nixl.host_pools.registry import KINDS


@pytest.mark.parametrize(
    ("layout", "outer", "byte_order"),
    [
        ("layer_first", 6, "layer-major"),
        ("page_first", 2, "token-major"),
        ("page_first_direct", 2, "layer-major"),
        ("page_head", 2, "head-major"),
        ("page_unified", 1, "group-major"),
    ],
)
def test_mha_pool_is_one_block(layout: str, outer: int, byte_order: str) -> None:
    """K and V are one tensor; layer_first cuts a page once per layer and side."""
    pool = pools.make_mha_pool(layout, layers=3)
    known = read_pool(pool)
    assert (known.layout, known.byte_order) == (layout, byte_order)
    assert (known.pages, known.page_tokens) == (4, 4)
    assert known.blocks == (Block(pool.kv_buffer.data_ptr(), pool.kv_buffer.nbytes, outer, 4),)


@pytest.mark.parametrize("layout", pools.MLA_LAYOUTS)
def test_pages_of_decode_context_parallelism(layout: str) -> None:
    """An engine's page covers the tokens of all ranks, and one page of this rank's pool."""
    pool = pools.make_mla_pool(layout, page_size=4, dcp_rank=1, dcp_size=2, seed=3)
    geometry = describe_pool(pool)
    assert (geometry.pages, geometry.page_tokens) == (4, 8)
    numbers = geometry.page_numbers(pools.token_indices([2, 0], 8), 2)
    assert numbers.tolist() == [2, 0]
    out = np.zeros((2, geometry.payload_bytes), np.uint8)
    geometry.gather(numbers, out)
    for page, payload in zip([2, 0], out, strict=True):
        flat = pool.get_data_page(page * 8).contiguous().view(torch.uint8)
        assert payload.tobytes() == flat.numpy().tobytes()


@pytest.mark.parametrize("groups", [1, 2])
def test_pages_in_head_groups(groups: int) -> None:
    """A page_unified page is SGLang's block of it: head group, layer, K and V, token, head."""
    pool = pools.make_mha_pool("page_unified", heads=4)
    pool.head_group_num = groups
    shape = (4, groups, 2, 2, 4, 4 // groups, 8)
    pool.kv_buffer = torch.arange(np.prod(shape)).to(torch.bfloat16).reshape(shape)
    geometry = describe_pool(pool)
    out = np.zeros((1, geometry.payload_bytes), np.uint8)
    geometry.gather([3], out)
    assert out.tobytes() == pool.kv_buffer[3].view(torch.uint8).numpy().tobytes()


def without(pool: Any, **changes: Any) -> Any:
    """The pool with some attributes replaced."""
    for name, value in changes.items():
        setattr(pool, name, value)
    return pool


def sharded_indexer() -> Any:
    """An indexer pool whose device pool was sharded by layers."""
    pool = side_pools.make_dsa_indexer_pool()
    pool.device_pool.layer_shard_enabled = True
    return pool


def strided_pool() -> Any:
    """A pool whose buffer has the right shape but runs over every other head of another."""
    pool = pools.make_mha_pool("page_first", heads=4)
    return without(pool, kv_buffer=pool.kv_buffer[:, :, :, ::2], head_num=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: without(pools.make_mha_pool(), layout="page_sideways"),
            "unknown layout 'page_sideways' of pool class MHATokenToKVPoolHost",
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
        (lambda: without(pools.make_mha_pool(), dcp_size=2), "context parallel size 2"),
        (
            lambda: without(pools.make_mha_pool("page_unified"), head_group_num=3),
            "2 heads in 3 groups",
        ),
        (sharded_indexer, "layers sharded"),
        (lambda: without(side_pools.make_mamba_pool(), kv_buffer=None), "kv_buffer is None"),
        (lambda: without(side_pools.make_mamba_pool(), conv_buffer=[]), "0 convolution tensors"),
        (lambda: without(side_pools.make_mamba_pool(), layout="layer_first"), "'layer_first'"),
        (
            lambda: without(side_pools.make_compressed_pool("layer_first"), layer_num=3),
            "not a list of 3 tensors",
        ),
        (lambda: without(side_pools.make_compressed_pool(), item_bytes=4096), "has shape"),
        (lambda: without(side_pools.make_k_only_pool(), k_buffer=torch.empty(1)), "has shape"),
        (lambda: without(side_pools.make_nvfp4_pool(), kv_buffer=None), "kv_buffer is None"),
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
        ("pool_host.mha", "HiSparseMHATokenToKVPoolHost"),
        ("pool_host.page_interleave", "PageInterleaveHostPool"),
        ("pool_host.group", "HostPoolGroup"),
        ("memory_pool_host", "LogicalHostPool"),
    ],
)
def test_other_pool_classes_are_refused_by_name(module: str, name: str) -> None:
    """Classes that are not listed, subclasses of listed ones among them, are refused."""
    kind = getattr(importlib.import_module(f"sglang.srt.mem_cache.{module}"), name)
    with pytest.raises(RegistrationError, match=f"unknown pool class {name}"):
        describe_pool(object.__new__(kind))


def test_every_host_pool_of_sglang_is_listed_or_refused() -> None:
    """A class of host pool that a new SGLang brings is noticed here."""
    names = set()
    pool_host = importlib.import_module("sglang.srt.mem_cache.pool_host")
    memory_pool_host = importlib.import_module("sglang.srt.mem_cache.memory_pool_host")
    for module in pkgutil.iter_modules(pool_host.__path__):
        loaded = importlib.import_module(f"{pool_host.__name__}.{module.name}")
        names |= {n for n, v in vars(loaded).items() if isinstance(v, type) and "Host" in n}
    names |= {name for name in vars(memory_pool_host) if name.endswith("HostPool")}
    helpers = {
        "HiSparseHostPoolMixin",
        "HostKVCache",
        "HostPoolBuilder",
        "HostPoolDecl",
        "HostPoolStorageInfo",
        "DSAIndexerHostPoolBuilder",
        "HostTensorAllocator",
        "MLAHostAllocation",
        "ShmHostTensorAllocator",
        "_SharedPageEnvelopeHostBacking",
    }
    refused = {
        "HiSparseMHATokenToKVPoolHost",
        "PageInterleaveHostPool",
        "HostPoolGroup",
        "LogicalHostPool",
    }
    assert names - helpers == KINDS.keys() | refused


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


@pytest.mark.parametrize(
    ("make", "kind", "replicated"),
    [
        (pools.make_mha_pool, "mha", False),
        (lambda: pools.make_mha_pool(v_head_dim=4), "mha", False),
        (side_pools.make_mxfp8_pool, "mha", False),
        (side_pools.make_nvfp4_pool, "mha", False),
        (lambda: side_pools.make_envelope_pools()[1], "mha", False),
        (pools.make_mla_pool, "mla", True),
        (side_pools.make_dsa_indexer_pool, "indexer", True),
        (side_pools.make_k_only_pool, "indexer", False),
        (side_pools.make_qsa_indexer_pool, "indexer", False),
        (side_pools.make_compressed_pool, "compressed", True),
        (side_pools.make_state_pool, "state", True),
        (side_pools.make_mamba_pool, "state", False),
    ],
)
def test_kinds(make: Callable[[], Any], kind: str, replicated: bool) -> None:
    """Pools with heads, and states of heads, are sharded over TP ranks; latent rows are not."""
    pool = make()
    assert (pool_kind(pool), is_replicated(pool)) == (kind, replicated)


def test_logical_pool() -> None:
    """SGLang's anchor without bytes is told apart, and can't be described."""
    pool = side_pools.make_logical_pool()
    assert pool_kind(pool) == "logical"
    with pytest.raises(RegistrationError, match="unknown pool class LogicalHostPool"):
        describe_pool(pool)
