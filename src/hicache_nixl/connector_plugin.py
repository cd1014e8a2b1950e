"""The plug-in that gives SGLang's own host pools this library's memory.

Owns one hook, on the function all of SGLang's anonymous host memory comes from. SGLang finds
`register` by the entry point `sglang.srt.plugins` in each of its processes. Unless the setting
`host_pool_allocator` is on it does nothing.

SGLang maps hugepages with MAP_POPULATE, which does not report a shortage: under a hugetlb limit
that is too small, the first touch ends the engine with SIGBUS. With the hook it is a warning and
ordinary pages, or one error where `hugepages` is `required`.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from hicache_nixl.errors import SettingsError
from hicache_nixl.settings import Settings, load_host_pool_settings

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

# The function and not the allocator class that calls it: its module is small, while that of the
# class would bring the model layers into processes that have no use for them.
TARGET = "sglang.srt.mem_cache.storage.mmap.mmap_allocator.alloc_mmap"


def register() -> None:
    """Hook SGLang's allocation function if the settings say so.

    Wrong settings are logged in one line and leave SGLang as it is; the connector raises them.
    """
    try:
        settings = load_host_pool_settings()
    except SettingsError as error:
        _logger.error("SGLang's host pools keep SGLang's own memory: %s", error)
        return
    if settings is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def alloc_mmap(dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return allocate_tensor(dims, dtype, settings)

    HookRegistry.register(TARGET, alloc_mmap, HookType.REPLACE)


def allocate_tensor(dims: tuple[int, ...], dtype: torch.dtype, settings: Settings) -> torch.Tensor:
    """A zeroed CPU tensor that owns its mapping. Blocks while pages are zeroed.

    Its pages are populated and shared with forked children, as `cudaHostRegister` needs them. The
    mapping goes with the last view of the tensor.

    Raises:
        HostMemoryError: the memory is not to be had.
    """
    import torch

    from hicache_nixl.memory import allocate

    count = math.prod(dims)
    buffer = allocate(
        count * dtype.itemsize,
        hugepages=settings.hugepages,
        hugepage_size=settings.hugepage_size,
    )
    return torch.frombuffer(buffer.view(), dtype=dtype, count=count).reshape(dims)
