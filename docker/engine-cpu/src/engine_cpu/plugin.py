"""The SGLang plug-in of this package: what SGLang misses where there is no GPU.

Owns the hooks; runs early in each engine process through the entry point ``sglang.srt.plugins``.
SGLang skips it unless this package's platform is selected or no platform is.
"""

import importlib
from typing import Any

import torch

from engine_cpu import interpreter, kvcopy, ranks

HOST_POOL_MODULES = (
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
    "sglang.srt.mem_cache.pool_host.mamba",
    "sglang.srt.mem_cache.pool_host.dsa",
    "sglang.srt.mem_cache.memory_pool_host",
)
"""Modules that bind the copy kernels at import, and only on a GPU."""

PINNING_POOLS = (
    "sglang.srt.mem_cache.pool_host.base.HostKVCache",
    "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost",
    "sglang.srt.mem_cache.pool_host.dsa.DSAIndexerPoolHost",
    "sglang.srt.mem_cache.memory_pool_host.DeepSeekV4PagedHostPool",
    "sglang.srt.mem_cache.memory_pool_host.DeepSeekV4StateHostPool",
)
"""Classes whose constructors pin by default; those after the first do not call its."""

ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def _without_pinning(
    *args: object, **kwargs: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    # Pinning is cudaHostRegister; SGLang asks for it whatever the platform says.
    return args, {**kwargs, "pin_memory": False}


def _reading_window_rows(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> tuple[tuple[object, ...], dict[str, object]]:
    # SGLang's torch attention writes a sliding layer's rows to the window's own pool and then reads
    # them at the rows of the full pool. Every other back-end translates both.
    if backend.use_sliding_window_kv_pool and kwargs.get("sliding_window_size") is not None:
        rows = backend.token_to_kv_pool.translate_loc_from_full_to_swa(rows)
    return (backend, query, output, keys, values, rows, *args), kwargs


def _provide_copies() -> None:
    for name in HOST_POOL_MODULES:
        module = importlib.import_module(name)
        for operation, function in kvcopy.OPERATIONS.items():
            if not hasattr(module, operation):
                setattr(module, operation, function)


def _provide_stream_synchronize() -> None:
    # SGLang synchronizes the stream when a copy failed. Without the method the AttributeError
    # would replace the error that matters.
    stream: Any = torch.cpu.Stream
    if not hasattr(stream, "synchronize"):
        stream.synchronize = lambda _stream: None


def _provide_pinned_copies() -> None:
    # SGLang pins the small tensors it sends to the device; without an accelerator torch refuses.
    tensor: Any = torch.Tensor
    if not torch.accelerator.is_available():
        tensor.pin_memory = lambda self, *_args, **_kwargs: self


def register() -> None:
    """Bind the copies and register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _provide_copies()
    ranks.provide()
    interpreter.provide()
    _provide_stream_synchronize()
    _provide_pinned_copies()
    for pool in PINNING_POOLS:
        HookRegistry.register(f"{pool}.__init__", _without_pinning, HookType.BEFORE)
    for step in ("extend", "decode"):
        HookRegistry.register(
            f"{ATTENTION}._run_sdpa_forward_{step}", _reading_window_rows, HookType.BEFORE
        )
