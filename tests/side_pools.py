"""Real SGLang host pools of hybrid models on the CPU, small and filled with seeded bytes.

As `pools`, which must be imported before SGLang: the device side is a description of buffers, or a
namespace with the attributes that the host pool's constructor reads.
"""

from types import SimpleNamespace
from typing import Any

import torch

import pools  # isort: skip - makes SGLang importable
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo, PageRowBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost
from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host
from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import (
    MiniMaxM3Nvfp4IndexKPoolHost,
    MiniMaxM3Nvfp4MainKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.unified import UnifiedPageEnvelopeHostPool

ROW_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
MAMBA_LAYOUTS = ("page_first", "page_first_direct")


def _filled(pool: Any, seed: int | None) -> Any:
    if seed is not None:
        pools.fill(pool, seed)
    return pool


def make_logical_pool(*, pages: int = 4, page_size: int = 4, layout: str = "page_first") -> Any:
    """SGLang's anchor without bytes."""
    return LogicalHostPool(pages * page_size, page_size, layout=layout)


def make_mamba_pool(
    layout: str = "page_first",
    *,
    states: int = 5,
    layers: int = 2,
    temporal: tuple[int, ...] = (2, 4, 8),
    temporal_dtype: torch.dtype = torch.float32,
    conv: tuple[tuple[int, ...], ...] = ((12, 3), (6, 3)),
    conv_dtype: torch.dtype = torch.bfloat16,
    side: tuple[int, ...] | None = None,
    draft_layers: int = 0,
    seed: int | None = None,
) -> Any:
    """A `MambaPoolHost`: temporal and convolution states; with `side` one more state by slot."""

    def info(count: int) -> MambaStateBufferInfo:
        return MambaStateBufferInfo(
            temporal=torch.zeros((count, 1, *temporal), dtype=temporal_dtype),
            conv=tuple(torch.zeros((count, 1, *shape), dtype=conv_dtype) for shape in conv),
            extra_checkpoint_buffers=() if side is None else (torch.zeros((1, *side)),),
        )

    with host_memory_budget_scope(1 << 40):
        pool = MambaPoolHost(
            info(layers),
            # SGLang adds a state of padding.
            float(states - 1),
            0,
            device_capacity=1,
            pin_memory=False,
            layout=layout,
            mtp_draft_buffer_infos=[info(1) for _ in range(draft_layers)],
        )
    return _filled(pool, seed)


def make_dsa_indexer_pool(
    layout: str = "page_first",
    *,
    anchor: Any = None,
    layers: int = 3,
    skip: tuple[int, ...] = (),
    index_head_dim: int = 128,
    quant_block_size: int = 128,
    start_layer: int = 0,
    seed: int | None = None,
) -> Any:
    """A `DSAIndexerPoolHost` beside `anchor`, by default an MLA pool; layers in `skip` have no
    index."""
    anchor = anchor or pools.make_mla_pool(layout, layers=layers)
    row = index_head_dim + index_head_dim // quant_block_size * 4
    device = SimpleNamespace(
        device="cpu",
        store_dtype=torch.uint8,
        dtype=torch.float8_e4m3fn,
        layer_num=layers,
        start_layer=start_layer,
        end_layer=start_layer + layers,
        layer_shard_enabled=False,
        index_head_dim=index_head_dim,
        quant_block_size=quant_block_size,
        index_k_with_scale_buffer=[
            torch.zeros((1, row * anchor.page_size), dtype=torch.uint8) for _ in range(layers)
        ],
    )
    decl = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device,
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=row, dtype=torch.uint8),
        host_pool_builder=None,
        owned_device_layers=tuple(i for i in range(layers) if i not in skip),
    )
    with host_memory_budget_scope(1 << 40):
        pool = DSAIndexerPoolHost(decl, anchor, pin_memory=False)
    return _filled(pool, seed)


def make_compressed_pool(
    layout: str = "page_first",
    *,
    name: str = "deepseek_v4_c4",
    pages: int = 4,
    page_size: int = 4,
    layers: int = 2,
    row_bytes: int = 1300,
    device_dtype: torch.dtype = torch.uint8,
    seed: int | None = None,
) -> Any:
    """A `DeepSeekV4PagedHostPool`: one row of bytes for a page and layer."""
    with host_memory_budget_scope(1 << 40):
        pool = DeepSeekV4PagedHostPool(
            name,
            [torch.zeros((1, row_bytes), dtype=device_dtype) for _ in range(layers)],
            row_bytes,
            pages,
            page_size,
            layout,
            pin_memory=False,
        )
    return _filled(pool, seed)


def make_state_pool(
    layout: str = "page_first",
    *,
    pages: int = 4,
    page_size: int = 4,
    layers: int = 2,
    ring: int = 4,
    width: int = 24,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> Any:
    """A `DeepSeekV4StateHostPool`: compressor states of a sliding-window page."""
    states = [
        SimpleNamespace(
            ring_size=ring,
            kv_score_buffer=SimpleNamespace(kv_score=torch.zeros((ring, width), dtype=dtype)),
        )
        for _ in range(layers)
    ]
    with host_memory_budget_scope(1 << 40):
        pool = DeepSeekV4StateHostPool(
            "deepseek_v4_c4_state", states, pages, page_size, layout, pin_memory=False
        )
    return _filled(pool, seed)


def make_qsa_indexer_pool(
    layout: str = "page_first",
    *,
    anchor: Any = None,
    layers: int = 2,
    ratio: int = 2,
    width: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int | None = None,
) -> Any:
    """A `QSAIndexerPoolHost`: compressed keys of a page of `anchor`, by default an MHA pool."""
    anchor = anchor or pools.make_mha_pool(layout)
    groups = anchor.page_size // ratio
    device = SimpleNamespace(
        qsa_compress_ratio=ratio,
        qsa_compressed_k_buffer_pool=[
            torch.zeros((groups, 1, width), dtype=dtype) for _ in range(layers)
        ],
    )
    with host_memory_budget_scope(1 << 40):
        pool = QSAIndexerPoolHost(device, anchor)
    return _filled(pool, seed)


def make_k_only_pool(
    layout: str = "page_first",
    *,
    anchor: Any = None,
    layers: int = 2,
    heads: int = 1,
    head_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int | None = None,
) -> Any:
    """An `MHATokenToKOnlyPoolHost`: index keys beside `anchor`, by default an MHA pool."""
    device = SimpleNamespace(
        store_dtype=dtype,
        start_layer=0,
        end_layer=layers,
        head_num=heads,
        head_dim=head_dim,
        layer_num=layers,
        device="cpu",
        k_buffer=[torch.zeros((1, heads, head_dim), dtype=dtype) for _ in range(layers)],
    )
    with host_memory_budget_scope(1 << 40):
        pool = MHATokenToKOnlyPoolHost(
            device, anchor or pools.make_mha_pool(layout), layout, pin_memory=False
        )
    return _filled(pool, seed)


def make_mxfp8_pool(*, scale_bytes: tuple[int, int] = (32, 64), seed: int | None = None) -> Any:
    """An `MHATokenToKVPoolMXFP8Host`. Its constructor needs CUDA kernels, so this is an MHA pool
    that was given the class and the scale tensors which that constructor makes."""
    pool = pools.make_mha_pool("page_first", dtype=torch.float8_e4m3fn)
    pool.__class__ = MHATokenToKVPoolMXFP8Host
    for side, nbytes in zip("kv", scale_bytes, strict=True):
        setattr(pool, f"{side}_sf_page_bytes", nbytes)
        scales = torch.zeros((pool.page_num, pool.layer_num, nbytes), dtype=torch.uint8)
        setattr(pool, f"{side}_scale_host", scales)
    return _filled(pool, seed)


def make_nvfp4_pool(
    layout: str = "page_first",
    *,
    index: bool = False,
    pages: int = 4,
    page_size: int = 4,
    layers: int = 2,
    row_bytes: int = 144,
    seed: int | None = None,
) -> Any:
    """A `MiniMaxM3Nvfp4MainKVPoolHost`, or with `index` the pool of its index keys."""
    slab = torch.zeros((layers, 1, row_bytes), dtype=torch.uint8)
    info = PageRowBufferInfo(
        slab=slab, rows=tuple(slab), row_bytes=row_bytes, page_size=page_size, num_pages=1
    )
    with host_memory_budget_scope(1 << 40):
        pool = MiniMaxM3Nvfp4MainKVPoolHost(
            info,
            float(pages - 1),
            0,
            page_size,
            layout,
            pin_memory=False,
            device_capacity_tokens=page_size,
            start_layer=0,
            end_layer=layers,
        )
        if index:
            pool = MiniMaxM3Nvfp4IndexKPoolHost(
                info, pool, layout, pin_memory=False, start_layer=0, end_layer=layers
            )
    return _filled(pool, seed)


def make_envelope_pools(
    layout: str = "page_first",
    *,
    page_size: int = 4,
    layers: tuple[int, int] = (2, 3),
    heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    pages: int = 8,
) -> tuple[Any, Any]:
    """SGLang's pair of `UnifiedPageEnvelopeHostPool`: full and sliding-window attention in one
    allocation, from whose two ends they grow."""
    sizes = [n * 2 * heads * head_dim * dtype.itemsize * page_size for n in layers]
    raw = torch.zeros(pages * sum(sizes), dtype=torch.uint8)
    devices = [
        SimpleNamespace(
            page_size=page_size,
            size=pages * page_size,
            host_capacity_tokens=None,
            grow_direction=direction,
            layer_num=n,
            head_num=heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            dtype=dtype,
            start_layer=0,
            end_layer=n,
            get_page_envelope_buffer=lambda nbytes=nbytes: raw[: pages * nbytes].view(pages, -1),
            get_contiguous_buf_infos=lambda nbytes=nbytes: (
                [raw.data_ptr()],
                [raw.nbytes],
                [nbytes],
            ),
        )
        for n, nbytes, direction in zip(layers, sizes, ("up", "down"), strict=True)
    ]
    with host_memory_budget_scope(1 << 40):
        full, window = UnifiedPageEnvelopeHostPool.build_hybrid_swa_pool_pair(
            device_pools=devices,
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=page_size,
            layout=layout,
            allocator_type="default",
            pin_memory=False,
        )
    return full, window


SIDE_POOLS = {
    **{f"mamba {layout}": (make_mamba_pool, {"layout": layout}) for layout in MAMBA_LAYOUTS},
    "mamba with a side state": (make_mamba_pool, {"side": (7,)}),
    "mamba with a draft layer": (make_mamba_pool, {"draft_layers": 1}),
    "mamba without a temporal state": (make_mamba_pool, {"temporal": (0,)}),
    **{
        f"{name} {layout}": (make, {"layout": layout} | more)
        for layout in ROW_LAYOUTS
        for name, make, more in (
            ("dsa indexer", make_dsa_indexer_pool, {}),
            ("dsa indexer of some layers", make_dsa_indexer_pool, {"skip": (1,)}),
            ("compressed", make_compressed_pool, {}),
            ("compress state", make_state_pool, {}),
            ("qsa indexer", make_qsa_indexer_pool, {}),
            ("k only", make_k_only_pool, {}),
            ("nvfp4", make_nvfp4_pool, {}),
            ("nvfp4 index", make_nvfp4_pool, {"index": True}),
        )
    },
}
"""Builders, and what they are called with, of pools whose bytes SGLang itself gives by page."""


def make_side_pool(name: str, seed: int | None = None) -> Any:
    """One of `SIDE_POOLS`."""
    make, arguments = SIDE_POOLS[name]
    return make(**arguments, seed=seed)
