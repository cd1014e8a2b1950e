"""Readers of pools that keep a row of bytes for each page and layer.

A page has the same bytes in every layout of these pools, layer after layer.
"""

from typing import Any

from hicache_nixl.errors import RegistrationError
from hicache_nixl.host_pools.reading import (
    Buffer,
    Facts,
    Reading,
    RowFormat,
    attribute,
    by_layout,
    count,
    dtype_name,
    held_tensor,
    integer,
    item_bytes,
    layers,
    tensor_format,
)


def dsa_indexer(pool: Any) -> Reading:
    """`DSAIndexerPoolHost`: packed index keys and their scales. Its tensor has spare rows."""
    device = attribute(pool, "device_pool")
    if getattr(device, "layer_shard_enabled", False):
        raise RegistrationError(
            "DSAIndexerPoolHost with layers sharded over context-parallel ranks is not supported: "
            "switch the layer split off"
        )
    pages, n = count(pool, "page_num"), count(pool, "layer_num")
    rows, row_bytes = count(pool, "indexer_page_num"), count(pool, "indexer_page_stride_size")
    page_first = (1, (rows, n, 1, row_bytes))
    outer, shape = by_layout(
        pool,
        {
            "layer_first": (n, (n, rows, row_bytes)),
            "page_first": page_first,
            "page_first_direct": page_first,
        },
    )
    itemsize = item_bytes(pool, "indexer_dtype")
    tensor = held_tensor(pool, "index_k_with_scale_buffer")
    return Reading(
        pages=pages,
        page_tokens=count(pool, "page_size"),
        byte_order="rows",
        buffers=(Buffer("index_k_with_scale_buffer", tensor, shape, itemsize, outer, rows),),
        facts=layers(pool)
        | {
            "indexed_layers": ",".join(map(str, attribute(pool, "_live_target_layers"))),
            "row_bytes": row_bytes * itemsize,
            "index_width": count(device, "index_head_dim"),
            "scale_block": count(device, "quant_block_size"),
            "device_dtype": dtype_name(attribute(device, "dtype")),
        },
        dtype=dtype_name(pool.indexer_dtype),
        row_format=RowFormat.DESCRIBED,
    )


def compressed(pool: Any) -> Reading:
    """`DeepSeekV4PagedHostPool`: rows of compressed KV, of an indexer or of its scales."""
    facts: Facts = {"device_dtype": dtype_name(attribute(pool, "device_buffers")[0].dtype)}
    return _rows(pool, "slot_page_size", "item_bytes", facts, RowFormat.ENGINE)


def qsa_indexer(pool: Any) -> Reading:
    """`QSAIndexerPoolHost`: the compressed keys of a page as one row."""
    device = attribute(pool, "device_pool")
    keys = attribute(device, "qsa_compressed_k_buffer_pool")
    facts: Facts = {
        "compress_ratio": count(device, "qsa_compress_ratio"),
        "keys": ";".join(sorted({tensor_format(key, 1) for key in keys})),
    }
    return _rows(pool, "slot_page_size", "item_bytes", facts, RowFormat.DESCRIBED)


def compress_state(pool: Any) -> Reading:
    """`DeepSeekV4StateHostPool`: the ring of compressor states of a sliding-window page."""
    states = {
        tensor_format(state.kv_score_buffer.kv_score, 1) for state in attribute(pool, "state_pools")
    }
    facts: Facts = {"ring": count(pool, "ring_size"), "states": ";".join(sorted(states))}
    return _rows(pool, "swa_page_size", "state_page_bytes", facts, RowFormat.DESCRIBED)


def nvfp4(pool: Any) -> Reading:
    """`MiniMaxM3Nvfp4MainKVPoolHost` and `…IndexKPoolHost`: NVFP4 values with their scales."""
    pages, n, row_bytes = (count(pool, name) for name in ("page_num", "layer_num", "row_bytes"))
    page_first = (1, (pages, n, 1, row_bytes))
    outer, shape = by_layout(
        pool,
        {
            "layer_first": (n, (n, pages, row_bytes)),
            "page_first": page_first,
            "page_first_direct": page_first,
        },
    )
    return Reading(
        pages=pages,
        page_tokens=count(pool, "page_size"),
        byte_order="rows",
        buffers=(Buffer("kv_buffer", held_tensor(pool), shape, 1, outer, pages),),
        facts=layers(pool) | {"row_bytes": row_bytes},
        dtype=dtype_name(pool.dtype),
        row_format=RowFormat.DESCRIBED,
    )


def envelope(pool: Any) -> Reading:
    """`UnifiedPageEnvelopeHostPool`: K and V of all layers by token, in memory that SGLang shares
    between pools and compacts. It keeps pages where they are while it calls the storage."""
    device = attribute(pool, "device_pool")
    backing = attribute(pool, "shared_allocation_domain")
    label = attribute(pool, "pool_label")
    pages, row_bytes = count(pool, "page_num"), count(pool, "item_bytes")
    tensor = held_tensor(pool, "_host_page_buffer_view")
    translate = attribute(backing, "translate_indices")

    def resolve(indices: Any) -> Any:
        try:
            return translate(label, indices)
        except AssertionError as error:
            raise RegistrationError(f"host pool {label!r}: {error}") from error

    return Reading(
        pages=pages,
        page_tokens=count(pool, "page_size"),
        byte_order="envelope",
        buffers=(Buffer("page envelopes", tensor, (pages, row_bytes), 1, 1, pages),),
        facts={
            "layer_start": integer(pool, "start_layer"),
            "layer_end": integer(pool, "end_layer"),
            "layers": count(device, "layer_num"),
            "heads": count(device, "head_num"),
            "k_width": count(device, "head_dim"),
            "v_width": count(device, "v_head_dim"),
            "row_bytes": row_bytes,
        },
        dtype=dtype_name(attribute(device, "dtype")),
        resolve=resolve,
    )


def _rows(pool: Any, tokens: str, nbytes: str, facts: Facts, row_format: RowFormat) -> Reading:
    """A pool with a tensor per layer in `layer_first` and one for all in the others."""
    pages, row_bytes = count(pool, "num_host_pages"), count(pool, nbytes)
    n = count(pool, "layer_num")
    tensor = held_tensor(pool)
    if attribute(pool, "layout") == "layer_first":
        if not isinstance(tensor, list) or len(tensor) != n:
            raise RegistrationError(
                f"{type(pool).__name__}.kv_buffer is not a list of {n} tensors, one per layer"
            )
        buffers = tuple(
            Buffer(f"kv_buffer[{i}]", layer, (pages, row_bytes), 1, 1, pages)
            for i, layer in enumerate(tensor)
        )
    else:
        shape = by_layout(
            pool,
            {
                "layer_first": None,
                "page_first": (pages, n, row_bytes),
                "page_first_direct": (pages, n, 1, row_bytes),
            },
        )
        buffers = (Buffer("kv_buffer", tensor, shape, 1, 1, pages),)
    facts = facts | {"layers": n, "row_bytes": row_bytes}
    return Reading(
        pages=pages,
        page_tokens=count(pool, tokens),
        byte_order="rows",
        buffers=buffers,
        facts=facts,
        dtype=dtype_name(attribute(pool, "dtype")),
        row_format=row_format,
    )
