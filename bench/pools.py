"""Real SGLang host pools on the CPU, with bytes that tell every page of every batch apart.

Owns the seeded contents and their comparison. Does not know who moves the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.plan import BenchError, PageShape, shape_of

# A torchvision built for CUDA cannot register its operators beside a CPU torch, and SGLang
# imports it; declaring them is enough for an import.
if torch.version.cuda is None:
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _operator):
            _LIBRARY.define(f"{_operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")

_POISON = 0xA5


def build_pool(layout: str, shape: PageShape, pages: int) -> Any:
    """SGLang's `MHATokenToKVPoolHost` of `pages` pages on unpinned host memory."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    dtype = torch.bfloat16
    # The device side is described, never used: one token per layer is enough.
    device = tuple(
        torch.zeros((1, shape.heads, shape.head_dim), dtype=dtype) for _ in range(shape.layers)
    )
    pointers = torch.tensor([layer.data_ptr() for layer in device], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=device,
            v=device,
            k_data_ptrs=pointers,
            v_data_ptrs=pointers,
            layout=KVBufferLayout("nhd"),
        ),
        page_size=shape.tokens,
        head_num=shape.heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(2 * pages * shape.nbytes):
        return MHATokenToKVPoolHost(
            info,
            1.0,
            0,
            shape.tokens,
            layout,
            pin_memory=False,
            device_capacity_tokens=0,
            start_layer=0,
            end_layer=shape.layers,
            host_token_capacity=pages * shape.tokens,
        )


class HostPages:
    """A host pool that holds exactly one batch, and a copy of what it should hold.

    Every byte is seeded random data that differs from page to page; `stamp` puts the number of the
    batch into each 4 KiB, so a page of another batch is told apart too.
    """

    def __init__(self, page: int, layout: str, pages: int, seed: int = 1) -> None:
        self.shape = shape_of(page)
        self.page_bytes, self.layout, self.count = page, layout, pages
        self.pool = build_pool(layout, self.shape, pages)
        self.indices = torch.arange(pages * self.shape.tokens, dtype=torch.int64)
        raw: npt.NDArray[np.uint8] = self.pool.kv_buffer.view(-1).view(torch.uint8).numpy()
        self._bytes = raw
        self._words: npt.NDArray[np.uint64] = raw.view(np.uint64)
        random = np.random.default_rng(seed)
        self._expected = random.integers(0, 1 << 64, self._words.size, dtype=np.uint64)
        self._step = min(4096, self.shape.tokens * self.shape.row) // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the batch."""
        return self.count * self.page_bytes

    def stamp(self, batch: int) -> None:
        """Fill the pool with the bytes of batch number `batch`."""
        self._expected[:: self._step] = batch
        self._words[:] = self._expected

    def poison(self) -> None:
        """Overwrite the pool, so that bytes that were never read cannot pass for read ones."""
        self._bytes.fill(_POISON)

    def verified(self, batch: int, results: list[bool]) -> int:
        """Pages reported as read and equal, byte by byte, to batch `batch`.

        Raises `BenchError` at the first page that was reported as read and is not what was written.
        """
        if len(results) != self.count:
            raise BenchError(f"{len(results)} results for {self.count} pages")
        self._expected[:: self._step] = batch
        if all(results) and np.array_equal(self._words, self._expected):
            return self.count
        seen, wanted = self._by_page(self._words), self._by_page(self._expected)
        for number, read in enumerate(results):
            if read and not np.array_equal(seen[:, :, number], wanted[:, :, number]):
                raise BenchError(f"page {number} of batch {batch} came back with wrong bytes")
        return sum(results)

    def _by_page(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """A view of shape (2, layers or 1, pages, words)."""
        outer = self.shape.layers if self.layout == "layer_first" else 1
        return words.reshape(2, outer, self.count, -1)

    def copy_to(self, flat: npt.NDArray[np.uint8]) -> None:
        """Put the pages back to back into `flat`, shape (pages, bytes)."""
        self._flat_view(flat)[:] = self._by_page(self._words)

    def copy_from(self, flat: npt.NDArray[np.uint8]) -> None:
        """Take the pages back from where `copy_to` put them."""
        self._by_page(self._words)[:] = self._flat_view(flat)

    def _flat_view(self, flat: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
        """`flat` in the axes of `_by_page`."""
        kinds, outer, pages, words = self._by_page(self._words).shape
        return flat.view(np.uint64).reshape(pages, kinds, outer, words).transpose(1, 2, 0, 3)

    def segments(self) -> tuple[npt.NDArray[np.uint64], int]:
        """Addresses of each page's memory segments, shape (pages, segments), and their length.

        `layer_first` scatters a page over 2 x layers segments; the others keep K and V whole.
        """
        by_page = self._by_page(self._words)
        kinds, outer, _, words = by_page.shape
        length = words * 8
        starts = np.arange(kinds * outer, dtype=np.uint64) * np.uint64(self.count * length)
        steps = np.arange(self.count, dtype=np.uint64) * np.uint64(length)
        base = np.uint64(self.pool.kv_buffer.data_ptr())
        return base + steps[:, None] + starts[None, :], length

    @property
    def region(self) -> tuple[int, int]:
        """Address and bytes of the whole pool."""
        return int(self.pool.kv_buffer.data_ptr()), int(self._bytes.nbytes)
