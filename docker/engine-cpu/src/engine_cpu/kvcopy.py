"""Copies of KV rows between SGLang's device pool and its host pool, both in ordinary memory.

Owns one primitive, `copy_rows`, and the translation of SGLang's kernel arguments to it. The
functions carry the names and keyword arguments of ``sgl_kernel.kvcacheio``, because the host pools
call them so. Every one blocks until its bytes are copied.

Vocabulary: a *row* is one token's bytes of one layer of K or V (``item_size`` bytes); a *table* is
a uint64 tensor of addresses, one a layer; *lf*, *pf* and *ph* are the layer-first, page-first and
page-head layouts of SGLang's names.

Must not know: NIXL, storage, or any pool class.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Equal rows in memory: row r is `width` bytes at ``address + r * stride``.

    `limit` is the number of bytes behind `address` that are known to be allocated, or None where
    only an address was given.
    """

    address: int
    stride: int
    width: int
    limit: int | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, stride: int, width: int, offset: int = 0) -> "Rows":
        """Rows inside a contiguous tensor, the first one `offset` bytes behind its start."""
        if not tensor.is_contiguous():
            raise ValueError(
                f"KV rows need a contiguous tensor, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        return cls(tensor.data_ptr() + offset, stride, width, tensor.nbytes - offset)

    def view(self, last_row: int) -> npt.NDArray[np.uint8]:
        """Rows 0 to `last_row` as a writable (last_row + 1, width) array; nothing is copied."""
        span = last_row * self.stride + self.width
        if self.limit is not None and span > self.limit:
            raise IndexError(
                f"row {last_row} of {self.width} bytes ends {span - self.limit} bytes "
                f"behind the pool's {self.limit}"
            )
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(self.address))
        return np.lib.stride_tricks.as_strided(memory, (last_row + 1, self.width), (self.stride, 1))


def copy_rows(source: Rows, source_rows: Index, target: Rows, target_rows: Index) -> None:
    """Copy ``source[source_rows[i]]`` to ``target[target_rows[i]]`` for every i."""
    if len(source_rows) != len(target_rows):
        raise ValueError(f"{len(source_rows)} source rows for {len(target_rows)} target rows")
    if not len(source_rows):
        return
    if min(source_rows.min(), target_rows.min()) < 0:
        raise IndexError("negative KV row index")
    taken = source.view(int(source_rows.max()))[source_rows]
    target.view(int(target_rows.max()))[target_rows] = taken


def _index(indices: torch.Tensor) -> Index:
    rows: Index = indices.to(device="cpu", dtype=torch.int64).numpy()
    return rows


def _table(table: torch.Tensor, layers: int) -> list[int]:
    return [int(address) for address in table.cpu().numpy().view(np.uint64)[:layers]]


# --- one layer, host -> device -----------------------------------------------------------------


def transfer_kv_per_layer_mla(
    *,
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_launch: object,
) -> None:
    """One buffer of one layer, both sides layer-first."""
    copy_rows(
        Rows.of(src, item_size, item_size),
        _index(src_indices),
        Rows.of(dst, item_size, item_size),
        _index(dst_indices),
    )


def transfer_kv_per_layer_mla_pf_lf(
    *,
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_launch: object,
) -> None:
    """One buffer of one layer, from page-first rows of `src_layout_dim` bytes."""
    copy_rows(
        Rows.of(src, src_layout_dim, item_size, offset=layer_id * item_size),
        _index(src_indices),
        Rows.of(dst, item_size, item_size),
        _index(dst_indices),
    )


def transfer_kv_per_layer(
    *,
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    **rest: Any,
) -> None:
    """K and V of one layer, both sides layer-first."""
    transfer_kv_per_layer_mla(src=src_k, dst=dst_k, **rest)
    transfer_kv_per_layer_mla(src=src_v, dst=dst_v, **rest)


def transfer_kv_per_layer_pf_lf(
    *,
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    **rest: Any,
) -> None:
    """K and V of one layer, from page-first rows."""
    transfer_kv_per_layer_mla_pf_lf(src=src_k, dst=dst_k, **rest)
    transfer_kv_per_layer_mla_pf_lf(src=src_v, dst=dst_v, **rest)


# --- all layers, device -> host ----------------------------------------------------------------


def transfer_kv_all_layer_mla(
    *,
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_launch: object,
) -> None:
    """One buffer a layer, both sides tables of layer-first buffers."""
    sources, targets = _table(src_layers, num_layers), _table(dst_layers, num_layers)
    for source, target in zip(sources, targets, strict=True):
        copy_rows(
            Rows(source, item_size, item_size),
            _index(src_indices),
            Rows(target, item_size, item_size),
            _index(dst_indices),
        )


def transfer_kv_all_layer_mla_lf_pf(
    *,
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_launch: object,
) -> None:
    """One buffer a layer, into page-first rows of `dst_layout_dim` bytes."""
    for layer, source in enumerate(_table(src_layers, num_layers)):
        copy_rows(
            Rows(source, item_size, item_size),
            _index(src_indices),
            Rows.of(dst, dst_layout_dim, item_size, offset=layer * item_size),
            _index(dst_indices),
        )


def transfer_kv_all_layer(
    *,
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    **rest: Any,
) -> None:
    """K and V of every layer, both sides layer-first."""
    transfer_kv_all_layer_mla(src_layers=src_k_layers, dst_layers=dst_k_layers, **rest)
    transfer_kv_all_layer_mla(src_layers=src_v_layers, dst_layers=dst_v_layers, **rest)


def transfer_kv_all_layer_lf_pf(
    *,
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    **rest: Any,
) -> None:
    """K and V of every layer, into page-first rows."""
    transfer_kv_all_layer_mla_lf_pf(src_layers=src_k_layers, dst=dst_k, **rest)
    transfer_kv_all_layer_mla_lf_pf(src_layers=src_v_layers, dst=dst_v, **rest)


# --- page-head: [page, head, token in page, layer, head bytes] ---------------------------------


def _head_rows(tokens: Index, page_size: int, heads: int) -> Iterator[Index]:
    """For each head, the row of every token; a row holds all layers of one head of one token."""
    first_head = tokens // page_size * page_size * heads + tokens % page_size
    for head in range(heads):
        yield first_head + head * page_size


def transfer_kv_per_layer_ph_lf(
    *,
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **_launch: object,
) -> None:
    """K and V of one layer, from page-head pages."""
    width, stride = item_size // head_num, src_layout_dim // head_num
    target_rows = _index(dst_indices)
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        pages = Rows.of(source, stride, width, offset=layer_id * width)
        for head, rows in enumerate(_head_rows(_index(src_indices), page_size, head_num)):
            slot = Rows.of(target, item_size, width, offset=head * width)
            copy_rows(pages, rows, slot, target_rows)


def transfer_kv_all_layer_lf_ph(
    *,
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **_launch: object,
) -> None:
    """K and V of every layer, into page-head pages."""
    width, stride = item_size // head_num, dst_layout_dim // head_num
    source_rows = _index(src_indices)
    for table, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(_table(table, num_layers)):
            pages = Rows.of(target, stride, width, offset=layer * width)
            for head, rows in enumerate(_head_rows(_index(dst_indices), page_size, head_num)):
                copy_rows(Rows(address + head * width, item_size, width), source_rows, pages, rows)


# --- the "direct" back-end: tensors instead of tables -----------------------------------------


def _token_rows(tensor: torch.Tensor, axes: int) -> Rows:
    """The rows of a tensor whose first `axes` dimensions count rows."""
    width = tensor[(0,) * axes].nbytes
    return Rows.of(tensor, width, width)


def _page_rows(tokens: Index, pages: torch.Tensor, layer: int) -> Index:
    """The rows of `tokens` of one layer in a [page, layer, token in page, …] buffer."""
    layers, page_size = int(pages.shape[1]), int(pages.shape[2])
    return (tokens // page_size * layers + layer) * page_size + tokens % page_size


def transfer_kv_direct(
    *,
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    **_launch: object,
) -> None:
    """Equal lists of layer-first buffers, in either direction."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        copy_rows(
            _token_rows(source, 1),
            _index(src_indices),
            _token_rows(target, 1),
            _index(dst_indices),
        )


def transfer_kv_per_layer_direct_pf_lf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    **_launch: object,
) -> None:
    """One layer, from [page, layer, token in page, …] buffers to layer-first ones."""
    for pages, layer in zip(src_ptrs, dst_ptrs, strict=True):
        rows = _page_rows(_index(src_indices), pages, layer_id)
        copy_rows(_token_rows(pages, 3), rows, _token_rows(layer, 1), _index(dst_indices))


def transfer_kv_all_layer_direct_lf_pf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    **_launch: object,
) -> None:
    """Every layer, to [page, layer, token in page, …] buffers.

    `src_ptrs` holds the layers of the first buffer, then those of the second.
    """
    sources = iter(src_ptrs)
    for pages in dst_ptrs:
        for layer in range(pages.shape[1]):
            rows = _page_rows(_index(dst_indices), pages, layer)
            copy_rows(
                _token_rows(next(sources), 1), _index(src_indices), _token_rows(pages, 3), rows
            )


# --- Mamba states: one row a slot, page-first ---------------------------------------------------


def transfer_kv_mamba_pf_lf(**arguments: Any) -> None:
    """One layer of one state, from page-first slots."""
    transfer_kv_per_layer_mla_pf_lf(**arguments)


def transfer_kv_mamba_lf_pf(*, src_ptrs: torch.Tensor, **rest: Any) -> None:
    """Every layer of one state, into page-first slots."""
    transfer_kv_all_layer_mla_lf_pf(src_layers=src_ptrs, **rest)


OPERATIONS: dict[str, Callable[..., None]] = {
    operation.__name__: operation
    for operation in (
        transfer_kv_per_layer,
        transfer_kv_per_layer_mla,
        transfer_kv_per_layer_pf_lf,
        transfer_kv_per_layer_mla_pf_lf,
        transfer_kv_per_layer_ph_lf,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer,
        transfer_kv_all_layer_mla,
        transfer_kv_all_layer_lf_pf,
        transfer_kv_all_layer_mla_lf_pf,
        transfer_kv_all_layer_lf_ph,
        transfer_kv_all_layer_direct_lf_pf,
        transfer_kv_direct,
        transfer_kv_mamba_pf_lf,
        transfer_kv_mamba_lf_pf,
    )
}
"""Every operation by the name SGLang calls it."""
