"""Real SGLang host pools on the CPU, small and filled with seeded bytes.

The pools are built from device buffer descriptions with one token per layer, so no device pool of
full size, no server arguments and no platform plug-in are needed.

Import this module before SGLang: it makes SGLang importable where torch is a CPU build and
torchvision is not.

SGLang's own constructors ask for at least as many pages as layers in `page_head` and, for MLA, in
`page_first_direct`.
"""

from dataclasses import dataclass
from typing import Any

import torch

# A torchvision built for CUDA skips its compiled operators beside a CPU torch, then fails to
# describe them. Declaring the two that it describes lets it import.
for _operator in ("nms", "qnms"):
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, _operator):
        torch.library.define(
            f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
        )

from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402, F401 - for whoever imports this
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation, MLATokenToKVPoolHost  # noqa: E402

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
ASYMMETRIC_LAYOUTS = ("page_first", "page_first_direct")


def _pointers(buffers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)


def _mha_info(
    layers: int,
    heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    page_size: int,
    row_layout: str,
) -> MHABufferInfo:
    k = tuple(torch.zeros((1, heads, head_dim), dtype=dtype) for _ in range(layers))
    v = tuple(torch.zeros((1, heads, v_head_dim), dtype=dtype) for _ in range(layers))
    return MHABufferInfo(
        buffers=KVBuffers(
            k=k,
            v=v,
            k_data_ptrs=_pointers(k),
            v_data_ptrs=_pointers(v),
            layout=KVBufferLayout(row_layout),
        ),
        page_size=page_size,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def make_mha_pool(
    layout: str = "page_first",
    *,
    pages: int = 4,
    page_size: int = 4,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    start_layer: int = 0,
    end_layer: int | None = None,
    draft_layers: int = 0,
    row_layout: str = "nhd",
    seed: int | None = None,
) -> Any:
    """An `MHATokenToKVPoolHost`, or the asymmetric class where `v_head_dim` differs.

    `layers` counts the target's; `draft_layers` more are packed behind them. With `seed` the pool
    is filled with random bytes.
    """
    width = (heads, head_dim, v_head_dim or head_dim, dtype, page_size, row_layout)
    info = _mha_info(layers, *width)
    with host_memory_budget_scope(1 << 40):
        pool = get_mha_host_pool_cls(info)(
            info,
            1.0,
            0,
            page_size,
            layout,
            pin_memory=False,
            device_capacity_tokens=0,
            start_layer=start_layer,
            end_layer=start_layer + layers if end_layer is None else end_layer,
            draft_buffer_infos=tuple(_mha_info(1, *width) for _ in range(draft_layers)),
            host_token_capacity=pages * page_size,
        )
    if seed is not None:
        fill(pool, seed)
    return pool


def make_mla_pool(
    layout: str = "page_first",
    *,
    pages: int = 4,
    page_size: int = 4,
    layers: int = 2,
    kv_lora_rank: int = 16,
    qk_rope_head_dim: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    start_layer: int = 0,
    end_layer: int | None = None,
    packed_fp8: bool = False,
    layer_shard_enabled: bool = False,
    dcp_rank: int = 0,
    dcp_size: int = 1,
    seed: int | None = None,
) -> Any:
    """An `MLATokenToKVPoolHost`; with `seed` filled with random bytes.

    `page_size` and `pages` are what one rank holds; under decode context parallelism the engine's
    pages have `dcp_size` times the tokens.
    """
    width = kv_lora_rank + qk_rope_head_dim
    buffers = tuple(torch.zeros((1, 1, width), dtype=dtype) for _ in range(layers))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_pointers(buffers),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page_size,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        kv_cache_dim=width,
        dtype=dtype,
        device=torch.device("cpu"),
        packed_fp8=packed_fp8,
    )
    with host_memory_budget_scope(1 << 40):
        pool = MLATokenToKVPoolHost(
            info,
            1.0,
            0,
            page_size * dcp_size,
            layout,
            pin_memory=False,
            device_capacity_tokens=0,
            start_layer=start_layer,
            end_layer=start_layer + layers if end_layer is None else end_layer,
            dcp_rank=dcp_rank,
            dcp_size=dcp_size,
            target_layer_num=layers,
            layer_shard_enabled=layer_shard_enabled,
            host_token_capacity=pages * page_size,
        )
    if seed is not None:
        fill(pool, seed)
    return pool


def make_dummy_mla_pool() -> Any:
    """SGLang's allocator-only MLA pool, which has no buffer."""
    return MLATokenToKVPoolHost(
        MLAHostAllocation(
            dtype=torch.bfloat16,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            kv_cache_dim=16,
            size_per_token=32,
        ),
        1.0,
        0,
        4,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=16,
        start_layer=0,
        end_layer=1,
        target_layer_num=1,
    )


_BUFFERS = {
    "MHATokenToKOnlyPoolHost": ("k_buffer",),
    "DSAIndexerPoolHost": ("index_k_with_scale_buffer",),
    "MHATokenToKVPoolMXFP8Host": ("kv_buffer", "k_scale_host", "v_scale_host"),
    "UnifiedPageEnvelopeHostPool": ("_host_page_buffer_view",),
}


def buffers_of(pool: Any) -> tuple[torch.Tensor, ...]:
    """All tensors of a pool, in the order of a page's bytes."""
    found: list[torch.Tensor] = []
    for name in _BUFFERS.get(type(pool).__name__, ("kv_buffer",)):
        value = getattr(pool, name)
        found += [value] if isinstance(value, torch.Tensor) else value
    return tuple(found)


def fill(pool: Any, seed: int) -> None:
    """Overwrite every byte of the pool with seeded random bytes."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        raw = buffer.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def clear(pool: Any) -> None:
    """Set every byte of the pool to zero."""
    for buffer in buffers_of(pool):
        buffer.view(-1).view(torch.uint8).zero_()


def page_bytes(pool: Any, page: int) -> bytes:
    """The bytes SGLang itself gives for a page."""
    flat = pool.get_data_page(page * pool.page_size, flat=True)
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


def token_indices(pages: list[int], page_size: int) -> torch.Tensor:
    """Host indices of `pages` as the engine passes them: int64, one per token."""
    starts = torch.tensor(pages, dtype=torch.int64)[:, None] * page_size
    return (starts + torch.arange(page_size)).reshape(-1)


@dataclass
class StorageConfig:
    """The fields of SGLang's `HiCacheStorageConfig` that say what a rank's bytes are."""

    model_name: str | None = "org/model"
    is_mla_model: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dp_rank: int = 0
    dcp_rank: int = 0
    dcp_size: int = 1
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
