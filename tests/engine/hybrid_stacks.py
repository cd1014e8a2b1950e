"""Small device pools of hybrid models on the CPU, with what SGLang's radix cache needs beside.

Each class in `STACKS` is one kind of model: the pools SGLang would make for it, its allocators and
the components of its radix cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

PAGES = 6
"""Pages of a prompt."""
CAPACITY = 32
"""Pages of a device pool."""
STATES = 8
HEADS, WIDTH = 4, 32
DTYPE = torch.bfloat16

Buffers = dict[str, list[torch.Tensor]]


def _kv(pool: Any) -> list[torch.Tensor]:
    return [*pool.k_buffer, *pool.v_buffer]


class Stack:
    """One kind of model. Subclasses make the pools and say which rows belong to a prompt."""

    page = 16
    window_pages = 4
    checkpoints: tuple[int, ...] = (PAGES,)
    """The prefixes, in pages, that a prompt is inserted by."""
    restorable = PAGES - 1
    """What comes back of a prompt that shares all pages but the last."""
    without_bytes: frozenset[str] = frozenset()
    """Host pools that keep nothing."""
    draft: Any = None
    components: tuple[ComponentType, ...] = (ComponentType.FULL,)

    def __init__(self, group: Any) -> None:
        self.requests = self._requests()
        self.allocator = self._allocator()
        self.parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            tp_cache_group=group,
            sliding_window_size=self.page * self.window_pages,
            enable_mamba_extra_buffer=ComponentType.MAMBA in self.components,
            tree_components=self.components,
        )

    @property
    def size(self) -> int:
        """Tokens of a device pool."""
        return CAPACITY * self.page

    def _requests(self) -> Any:
        return ReqToTokenPool(
            size=4, max_context_len=self.size, device="cpu", enable_memory_saver=False
        )

    def _allocator(self) -> Any:
        raise NotImplementedError

    def _paged(self, pool: Any) -> Any:
        return PagedTokenToKVPoolAllocator(
            self.size, self.page, DTYPE, "cpu", pool, need_sort=False
        )

    def buffers(self) -> Buffers:
        """Every device buffer by the name of its pool."""
        raise NotImplementedError

    def allocate(self, tokens: int) -> torch.Tensor:
        """Rows of the full pool for a prompt of whole pages."""
        rows = self.allocator.alloc(tokens)
        if rows is None:
            raise AssertionError("the pools of this test are too small")
        return rows

    def allocate_state(self) -> torch.Tensor | None:
        """A slot for a recurrent state, where the model has one."""
        return None

    def clear(self) -> None:
        """Give all rows back."""
        self.allocator.clear()

    def fill(
        self,
        rows: torch.Tensor | None,
        state: torch.Tensor | None,
        generator: torch.Generator,
    ) -> None:
        """Put random bytes into the buffers of a prompt's rows, or of its state."""
        for pool, buffers in self.buffers().items():
            if (pool == "mamba") != (state is not None):
                continue
            places = self.places(pool, rows, state)
            for buffer in buffers:
                raw = buffer.view(torch.uint8)
                shape = raw[places].shape
                raw[places] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def read(self, rows: torch.Tensor, state: torch.Tensor | None) -> Buffers:
        """A copy of a prompt's bytes in every pool and layer."""
        return {
            pool: [buffer[self.places(pool, rows, state)].clone() for buffer in buffers]
            for pool, buffers in self.buffers().items()
        }

    def places(self, pool: str, rows: Any, state: Any) -> torch.Tensor:
        """Where a prompt at `rows` lies in the buffers of `pool`."""
        del pool, state
        places: torch.Tensor = rows
        return places

    def needed(self, pool: str, pages: int) -> tuple[int, int]:
        """Which of the rows that `read` gives a prefix of `pages` needs."""
        del pool
        return 0, pages * self.page

    def leave_window(self, rows: torch.Tensor, parameters: InsertParams) -> None:
        """Give up rows of a window that no query sees any more, before the insertion."""


class DraftStack(Stack):
    """Plain attention with the KV of a draft model beside it."""

    def _allocator(self) -> Any:
        self.pool = MHATokenToKVPool(self.size, self.page, DTYPE, HEADS, WIDTH, 3, "cpu", False)
        self.draft = MHATokenToKVPool(self.size, self.page, DTYPE, 2, 16, 1, "cpu", False)
        return self._paged(self.pool)

    def buffers(self) -> Buffers:
        return {"kv": _kv(self.pool), "draft": _kv(self.draft)}


class DsaStack(Stack):
    """Sparse attention: a latent KV and the keys of its indexer."""

    page = 64

    def _allocator(self) -> Any:
        self.pool = DSATokenToKVPool(
            size=self.size,
            page_size=self.page,
            kv_lora_rank=64,
            dtype=DTYPE,
            qk_rope_head_dim=16,
            layer_num=3,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=80,
        )
        return self._paged(self.pool)

    def buffers(self) -> Buffers:
        return {"kv": list(self.pool.kv_buffer), "indexer": self.pool.index_k_with_scale_buffer}

    def places(self, pool: str, rows: Any, state: Any) -> torch.Tensor:
        places = rows if pool == "kv" else rows[:: self.page] // self.page
        return super().places(pool, places, state)

    def needed(self, pool: str, pages: int) -> tuple[int, int]:
        return super().needed(pool, pages) if pool == "kv" else (0, pages)


class SwaStack(Stack):
    """Layers with full attention and layers with a window."""

    components = (ComponentType.FULL, ComponentType.SWA)
    # Only the last window is kept, so no shorter prefix has one.
    restorable = 0
    swa_layers: tuple[int, ...] = (0, 2)
    full_layers: tuple[int, ...] = (1, 3, 4)

    def _window_pool(
        self, full_layers: Sequence[int], swa_layers: Sequence[int], heads: int
    ) -> Any:
        return SWAKVPool(
            size=self.size,
            size_swa=self.size,
            page_size=self.page,
            dtype=DTYPE,
            head_num=heads,
            head_dim=WIDTH,
            swa_attention_layer_ids=list(swa_layers),
            full_attention_layer_ids=list(full_layers),
            device="cpu",
        )

    def _allocator(self) -> Any:
        self.pool = self._window_pool(self.full_layers, self.swa_layers, HEADS)
        return SWATokenToKVPoolAllocator(
            self.size, self.size, self.page, DTYPE, "cpu", self.pool, need_sort=False
        )

    def allocate(self, tokens: int) -> torch.Tensor:
        rows = self.allocator.full_attn_allocator.alloc(tokens)
        # A page more, so that a prompt's rows are others in the two pools.
        window = self.allocator.swa_attn_allocator.alloc(tokens + self.page)
        if rows is None or window is None:
            raise AssertionError("the pools of this test are too small")
        self.allocator.set_full_to_swa_mapping(rows, window[self.page :])
        return rows

    def buffers(self) -> Buffers:
        return {"kv": _kv(self.pool.full_kv_pool), "swa": _kv(self.pool.swa_kv_pool)}

    def places(self, pool: str, rows: Any, state: Any) -> torch.Tensor:
        return super().places(pool, rows if pool == "kv" else self.window_rows(rows), state)

    def window_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Where rows of the full pool lie in the window's."""
        places: torch.Tensor = self.allocator.full_to_swa_index_mapping[rows]
        return places

    def needed(self, pool: str, pages: int) -> tuple[int, int]:
        first, last = super().needed(pool, pages)
        return (first if pool == "kv" else max(first, last - self.page * self.window_pages)), last

    def leave_window(self, rows: torch.Tensor, parameters: InsertParams) -> None:
        outside = (PAGES - self.window_pages) * self.page
        self.allocator.free_swa(rows[:outside])
        parameters.set_evicted_seqlen(ComponentType.SWA, outside)


class SwaDraftStack(SwaStack):
    """The same with a draft model of one windowed layer, whose rows are the window's."""

    def _allocator(self) -> Any:
        allocator = super()._allocator()
        self.draft = self._window_pool([], [0], 2)
        return allocator

    def buffers(self) -> Buffers:
        return super().buffers() | {"draft_swa": _kv(self.draft.swa_kv_pool)}


class CompressedStack(SwaStack):
    """DeepSeek-V4: a window, compressed KV with an indexer, states, and an anchor without bytes."""

    page = 256
    window_pages = 1
    without_bytes = frozenset({"kv"})
    _FULL = ("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")

    def _allocator(self) -> Any:
        self.pool = DeepSeekV4TokenToKVPool(
            max_num_reqs=2,
            swa_size=self.size,
            c4_size=self.size // 4,
            c128_size=self.size // 128,
            c4_state_pool_size=CAPACITY * 8,
            c128_state_pool_size=self.page,
            page_size=self.page,
            swa_page_size=self.page,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=4,
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=[0, 4, 128, 4],
            start_layer=0,
            end_layer=4,
        )
        return SWATokenToKVPoolAllocator(
            self.size, self.size, self.page, DTYPE, "cpu", self.pool, need_sort=False
        )

    def buffers(self) -> Buffers:
        pool = self.pool
        return {
            "swa": pool.swa_kv_pool.kv_buffer,
            "deepseek_v4_c4": pool.c4_kv_pool.kv_buffer,
            "deepseek_v4_c4_indexer": pool.c4_indexer_kv_pool.index_k_with_scale_buffer,
            "deepseek_v4_c128": pool.c128_kv_pool.kv_buffer,
            "deepseek_v4_c4_state": _states_by_page(pool.compress_state_pools, 4),
            "deepseek_v4_c4_indexer_state": _states_by_page(pool.indexer_compress_state_pools, 4),
        }

    def places(self, pool: str, rows: Any, state: Any) -> torch.Tensor:
        places = super().places("kv" if pool in self._FULL else pool, rows, state)
        return places[:: self.page] // self.page

    def needed(self, pool: str, pages: int) -> tuple[int, int]:
        return (0 if pool in self._FULL else pages - self.window_pages), pages


def _states_by_page(pools: Sequence[Any], ratio: int) -> list[torch.Tensor]:
    """The states of the layers with this ratio, a row for each page of the window."""
    states = []
    for pool in pools:
        if pool is not None and pool.ratio == ratio:
            scores = pool.kv_score_buffer.kv_score
            usable = scores.shape[0] // pool.ring_size * pool.ring_size
            states.append(scores[:usable].view(usable // pool.ring_size, -1))
    return states


class MambaStack(Stack):
    """Layers with attention and layers with a recurrent state."""

    components = (ComponentType.FULL, ComponentType.MAMBA)
    checkpoints = (3, PAGES)
    restorable = 3
    full_layers: tuple[int, ...] = (1, 3)
    mamba_layers: tuple[int, ...] = (0, 2, 4)

    def _requests(self) -> Any:
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=64,
            n_groups=1,
            num_heads=4,
            head_dim=16,
            state_size=8,
            conv_kernel=4,
        )
        return HybridReqToTokenPool(
            size=4,
            mamba_size=STATES,
            mamba_spec_state_size=0,
            max_context_len=self.size,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(
                shape=shape,
                layers=list(self.mamba_layers),
                dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
            ),
            mamba_layer_ids=list(self.mamba_layers),
            enable_mamba_extra_buffer=True,
        )

    def _allocator(self) -> Any:
        self.pool = HybridLinearKVPool(
            size=self.size,
            dtype=DTYPE,
            page_size=self.page,
            head_num=HEADS,
            head_dim=WIDTH,
            full_attention_layer_ids=list(self.full_layers),
            device="cpu",
            mamba_pool=self.requests.mamba_pool,
        )
        return self._paged(self.pool)

    def _states(self) -> list[torch.Tensor]:
        states = self.requests.mamba_pool.mamba_cache
        return [layer for state in (states.temporal, *states.conv) for layer in state]

    def buffers(self) -> Buffers:
        return {"kv": _kv(self.pool.full_kv_pool), "mamba": self._states()}

    def allocate_state(self) -> torch.Tensor | None:
        return self.requests.mamba_allocator.alloc(1)

    def clear(self) -> None:
        super().clear()
        self.requests.mamba_allocator.clear()

    def places(self, pool: str, rows: Any, state: Any) -> torch.Tensor:
        if pool != "mamba":
            return super().places(pool, rows, state)
        slot: torch.Tensor = state
        return slot

    def needed(self, pool: str, pages: int) -> tuple[int, int]:
        return (0, 1) if pool == "mamba" else super().needed(pool, pages)


class MambaSwaStack(MambaStack, SwaStack):
    """Full attention, a window and a recurrent state in one model."""

    components = (ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA)
    full_layers: tuple[int, ...] = (1,)
    swa_layers: tuple[int, ...] = (3,)

    def _allocator(self) -> Any:
        return SwaStack._allocator(self)

    def buffers(self) -> Buffers:
        return SwaStack.buffers(self) | {"mamba": self._states()}

    def leave_window(self, rows: torch.Tensor, parameters: InsertParams) -> None:
        """The window of the first checkpoint begins with the prompt."""


STACKS: dict[str, type[Stack]] = {
    "draft": DraftStack,
    "dsa": DsaStack,
    "swa": SwaStack,
    "swa_draft": SwaDraftStack,
    "compressed": CompressedStack,
    "mamba": MambaStack,
    "mamba_swa": MambaSwaStack,
}
