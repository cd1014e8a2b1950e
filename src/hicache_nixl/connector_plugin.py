"""The plug-in that gives SGLang's own host pools this library's memory.

Owns two hooks. SGLang finds `register` by the entry point `sglang.srt.plugins` in each of its
processes. Unless the setting `host_pool_allocator` is on it does nothing.

The function all of SGLang's anonymous host memory comes from: SGLang maps hugepages with
MAP_POPULATE, which does not report a shortage. Under a hugetlb limit that is too small, the first
touch ends the engine with SIGBUS. With the hook it is a warning and ordinary pages, or one error
where `hugepages` is `required`.

The function that says how much host memory there is: SGLang counts ordinary memory alone, and
hugepages are no part of it. Without the hook it refuses a server whose host KV fits into its
hugepages unless as much ordinary memory is free as well.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_nixl.errors import SettingsError
from hicache_nixl.settings import Settings, load_host_pool_settings
from hicache_nixl.units import format_size

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

# Functions, because their modules are small; the modules of the classes that call them would bring
# the model layers into processes that have no use for them.
ALLOCATION = "sglang.srt.mem_cache.storage.mmap.mmap_allocator.alloc_mmap"
AVAILABLE = "sglang.srt.mem_cache.host_memory.available_host_memory_bytes"
_ROOT = Path("/")


def register() -> None:
    """Hook SGLang's functions for host memory if the settings say so.

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

    def available(ordinary: Callable[..., int], **options: bool) -> int:
        # True where a size is checked, and where a unified pool without a size takes all there is.
        fixed = options.get("allow_cgroup_fallback", False)
        return available_bytes(lambda: ordinary(**options), settings, fixed_size=fixed)

    hooks: dict[str, tuple[Callable[..., object], HookType]]
    hooks = {ALLOCATION: (alloc_mmap, HookType.REPLACE)}
    if settings.hugepages != "off":
        hooks[AVAILABLE] = (available, HookType.AROUND)
    for target, (hook, kind) in hooks.items():
        if _is_there(target):
            HookRegistry.register(target, hook, kind)
        else:
            _logger.warning("this version of SGLang has no %s, so that is not hooked", target)


def available_bytes(
    ordinary: Callable[[], int], settings: Settings, *, fixed_size: bool, root: Path = _ROOT
) -> int:
    """The bytes that SGLang's host pools can have, before SGLang takes its reserve off.

    The reserve is for ordinary memory, so it is added to hugepages. A pool of `fixed_size` is
    checked while other ranks may have mapped theirs already, and SGLang divides the answer by the
    ranks of one replica: what all of them may map counts then, and the allocation has the last
    word. Where SGLang chooses the size, no rank of the replica has mapped anything, and what is
    free counts.

    Args:
        ordinary: SGLang's own answer in bytes, of ordinary memory.
        root: the directory that holds `proc` and `sys`.
    """
    from sglang.srt.mem_cache.pool_host import base

    from hicache_nixl import memory

    size = settings.hugepage_size or memory.DEFAULT_HUGEPAGE_SIZE
    report = memory.hugepage_report(root)
    pools = [pool for pool in report.pools if pool.page_size == size and report.populate_write]
    pages = sum(pool.allowed_bytes if fixed_size else pool.free_bytes for pool in pools)
    _logger.log(
        logging.INFO if pages else logging.WARNING,
        "SGLang's host pools may have %s in hugepages of %s, hugepages=%s; the host's "
        "nr_hugepages and the container's limit decide",
        format_size(pages, digits=1),
        format_size(size),
        settings.hugepages,
    )
    answer = int(base.HICACHE_HOST_MEMORY_RESERVE_BYTES) + pages
    # A pool lies in hugepages as a whole or not at all, so the two do not add up.
    return answer if settings.hugepages == "required" else max(answer, ordinary())


def _is_there(target: str) -> bool:
    """Whether this version of SGLang has a hook's target."""
    module, _, name = target.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


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
