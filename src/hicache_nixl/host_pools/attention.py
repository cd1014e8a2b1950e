"""Readers of pools that hold K and V, or a latent row, of tokens."""

from typing import Any

from hicache_nixl.errors import RegistrationError
from hicache_nixl.host_pools import mirrored
from hicache_nixl.host_pools.reading import (
    Buffer,
    Facts,
    Reading,
    attribute,
    by_layout,
    count,
    dtype_name,
    held_tensor,
    item_bytes,
    layers,
    slots,
)

_ORDERS = {
    "layer_first": "layer-major",
    "page_first": "token-major",
    "page_first_direct": "layer-major",
    "page_head": "head-major",
    "page_unified": "group-major",
}


def mha(pool: Any) -> Reading:
    """`MHATokenToKVPoolHost`: K and V of one width in one tensor."""
    pages, tokens, total = slots(pool)
    n, heads, width = (count(pool, name) for name in ("layer_num", "head_num", "head_dim"))
    if (v_width := count(pool, "v_head_dim")) != width:
        raise RegistrationError(
            f"{type(pool).__name__} with K width {width} and V width {v_width}: "
            "one tensor can't hold both"
        )
    groups = count(pool, "head_group_num") if attribute(pool, "layout") == "page_unified" else 1
    if heads % groups:
        raise RegistrationError(
            f"{type(pool).__name__} has {heads} heads in {groups} groups: not a whole number each"
        )
    outer, shape = by_layout(
        pool,
        {
            "layer_first": (2 * n, (2, n, total, heads, width)),
            "page_first": (2, (2, total, n, heads, width)),
            "page_first_direct": (2, (2, pages, n, tokens, heads, width)),
            "page_head": (2, (2, pages, heads, tokens, n, width)),
            "page_unified": (1, (pages, groups, n, 2, tokens, heads // groups, width)),
        },
    )
    buffer = Buffer("kv_buffer", held_tensor(pool), shape, item_bytes(pool), outer, pages)
    return Reading(
        pages=pages,
        page_tokens=tokens,
        byte_order=_ORDERS[pool.layout],
        buffers=(buffer,),
        facts=_head_facts(pool) | {"head_groups": groups},
        dtype=dtype_name(pool.dtype),
    )


def asymmetric_mha(pool: Any) -> Reading:
    """`AsymmetricMHATokenToKVPoolHost`: K and V of different widths, a tensor each."""
    pages, tokens, total = slots(pool)
    n, heads = count(pool, "layer_num"), count(pool, "head_num")
    pair = held_tensor(pool)
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise RegistrationError(f"{type(pool).__name__}.kv_buffer is not a pair of K and V tensors")
    buffers = []
    for name, tensor, size in (
        ("k_buffer", pair[0], "head_dim"),
        ("v_buffer", pair[1], "v_head_dim"),
    ):
        width = count(pool, size)
        shape = by_layout(
            pool,
            {
                "page_first": (total, n, heads, width),
                "page_first_direct": (pages, n, tokens, heads, width),
            },
        )
        buffers.append(Buffer(name, tensor, shape, item_bytes(pool), 1, pages))
    return Reading(
        pages=pages,
        page_tokens=tokens,
        byte_order=_ORDERS[pool.layout],
        buffers=tuple(buffers),
        facts=_head_facts(pool),
        dtype=dtype_name(pool.dtype),
    )


def mxfp8_mha(pool: Any) -> Reading:
    """`MHATokenToKVPoolMXFP8Host`: K and V, and blocks of scales for each page and layer."""
    by_layout(pool, {"page_first": None})
    plain = mha(pool)
    n = count(pool, "layer_num")
    sizes = {side: count(pool, f"{side}_sf_page_bytes") for side in ("k", "v")}
    scales = tuple(
        Buffer(
            f"{side}_scale_host",
            attribute(pool, f"{side}_scale_host"),
            (plain.pages, n, nbytes),
            1,
            1,
            plain.pages,
        )
        for side, nbytes in sizes.items()
    )
    return Reading(
        pages=plain.pages,
        page_tokens=plain.page_tokens,
        byte_order=plain.byte_order,
        buffers=plain.buffers + scales,
        facts=plain.facts | {f"{side}_scale_bytes": n for side, n in sizes.items()},
        dtype=plain.dtype,
    )


def k_only(pool: Any) -> Reading:
    """`MHATokenToKOnlyPoolHost`: index keys of sparse attention, without values."""
    pages, tokens, total = slots(pool)
    n, heads, width = (count(pool, name) for name in ("layer_num", "head_num", "head_dim"))
    outer, shape = by_layout(
        pool,
        {
            "layer_first": (n, (n, total, heads, width)),
            "page_first": (1, (total, n, heads, width)),
            "page_first_direct": (1, (pages, n, tokens, heads, width)),
        },
    )
    buffer = Buffer("k_buffer", attribute(pool, "k_buffer"), shape, item_bytes(pool), outer, pages)
    return Reading(
        pages=pages,
        page_tokens=tokens,
        byte_order=_ORDERS[pool.layout],
        buffers=(buffer,),
        facts=layers(pool, target="layer_num") | {"heads": heads, "k_width": width},
        dtype=dtype_name(pool.dtype),
    )


def mla(pool: Any) -> Reading:
    """`MLATokenToKVPoolHost`: a latent row; with packed fp8 its scales are part of the row.

    Under decode context parallelism the engine's indices count the tokens of all ranks, of which
    this one holds every `dcp_size`-th: a page of the engine is a page of the pool, of fewer rows.
    """
    if attribute(pool, "_layer_shard_enabled"):
        # Each context-parallel rank then holds other layers, and unused rows behind them.
        raise RegistrationError(
            "MLATokenToKVPoolHost with layers sharded over context-parallel ranks is not "
            "supported: switch the layer split off"
        )
    pages, rows, total = slots(pool)
    n, width = count(pool, "layer_num"), count(pool, "kv_cache_dim")
    outer, shape = by_layout(
        pool,
        {
            "layer_first": (n, (n, total, 1, width)),
            "page_first": (1, (total, n, 1, width)),
            "page_first_direct": (1, (pages, n, rows, 1, width)),
            "page_unified": (1, (pages, n, rows, width)),
        },
    )
    packed = attribute(pool, "dsa_kv_cache_store_fp8")
    return Reading(
        pages=pages,
        page_tokens=rows * getattr(pool, "dcp_size", 1),
        byte_order="layer-major" if pool.layout == "page_unified" else _ORDERS[pool.layout],
        buffers=(Buffer("kv_buffer", held_tensor(pool), shape, item_bytes(pool), outer, pages),),
        facts=layers(pool)
        | {
            "row_layout": "latent, packed" if packed else "latent",
            "row_width": width,
            "latent_width": count(pool, "kv_lora_rank"),
            "rotary_width": count(pool, "qk_rope_head_dim"),
        },
        dtype=dtype_name(pool.dtype),
    )


def _head_facts(pool: Any) -> Facts:
    return layers(pool) | {
        "row_layout": _row_layout(pool),
        "heads": count(pool, "head_num"),
        "k_width": count(pool, "head_dim"),
        "v_width": count(pool, "v_head_dim"),
    }


def _row_layout(pool: Any) -> str:
    """Axis order inside one token row, which the host pool copies from the device pool as it is."""
    if hasattr(pool, "device_pool") and not hasattr(pool, "_buffer_infos"):
        drafts = getattr(pool, "mtp_draft_device_pools", ())
        found = mirrored.row_layouts([pool.device_pool, *drafts])
    else:
        infos = attribute(pool, "_buffer_infos")
        found = {str(info.buffers.layout.value) for info in infos}
    if len(found) != 1:
        raise RegistrationError(
            f"{type(pool).__name__} mirrors device pools of layouts {sorted(found)}: one is needed"
        )
    return found.pop()
