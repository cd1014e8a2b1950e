"""What the bytes of a pool mean, written and read without the library under test.

Pages are arrays [K and V, layer, page, token, head, byte] and a function of what they mean, not of
the version or layout they are stored in: whatever is read under a name must be what its reader
would have written.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from versions.engine import PAGE, Shape

Pages = npt.NDArray[np.uint8]

# Axes: s(ide) l(ayer) p(age) t(oken) h(ead), bytes last.
_ORDERS = {
    "layer_first": "slpth",
    "page_first": "sptlh",
    "page_first_direct": "splth",
    "page_head": "sphtl",
}
_UNWRITTEN = 0xA5


def meaning(text: str, shape: Shape, count: int) -> Pages:
    """`count` pages that mean `text`."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    sides, heads, width = shape.row
    size = (sides, shape.layers, count, PAGE, heads, width)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def in_pool(pool: Any, shape: Shape) -> Pages:
    """All pages of a host pool, as a view of its memory."""
    sides, heads, width = shape.row
    sizes = {"s": sides, "l": shape.layers, "p": pool.page_num, "t": PAGE, "h": heads}
    order = _ORDERS[pool.layout]
    memory = pool.kv_buffer.view(-1).view(torch.uint8).numpy()
    stored = memory.reshape([sizes[axis] for axis in order] + [width])
    return stored.transpose([*(order.index(axis) for axis in "slpth"), 5])


def unwrite(pool: Any, shape: Shape) -> None:
    """Fill a host pool with what no page consists of."""
    in_pool(pool, shape)[:] = _UNWRITTEN


def is_unwritten(pages: Pages) -> bool:
    """Whether nothing was written to these pages since `unwrite`."""
    return bool((pages == _UNWRITTEN).all())


def indices(numbers: list[int]) -> torch.Tensor:
    """Token indices of pages, as SGLang passes them."""
    starts = torch.tensor(numbers)[:, None] * PAGE
    return (starts + torch.arange(PAGE)).reshape(-1)


def device_rows(pool: Any, shape: Shape, rows: torch.Tensor) -> Pages:
    """Rows of a device pool as pages, a copy."""
    sides = (pool.kv_buffer,) if shape.kind == "mla" else (pool.k_buffer, pool.v_buffer)
    layers = [[layer[rows].contiguous().view(torch.uint8).numpy() for layer in s] for s in sides]
    _, heads, width = shape.row
    return np.array(layers).reshape(len(sides), shape.layers, -1, PAGE, heads, width)


def set_device_rows(pool: Any, shape: Shape, rows: torch.Tensor, pages: Pages) -> None:
    """Write pages to rows of a device pool."""
    sides = (pool.kv_buffer,) if shape.kind == "mla" else (pool.k_buffer, pool.v_buffer)
    for side, layers in enumerate(sides):
        for number, layer in enumerate(layers):
            flat = torch.from_numpy(pages[side, number].reshape(len(rows), -1))
            layer[rows] = flat.view(layer.dtype).reshape(len(rows), *layer.shape[1:])
