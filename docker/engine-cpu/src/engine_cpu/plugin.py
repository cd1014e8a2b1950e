"""The SGLang plug-in of this package: what the host pools miss where there is no GPU.

Owns the hooks; runs early in each engine process through the entry point ``sglang.srt.plugins``.
SGLang skips it unless this package's platform is selected or no platform is.
"""

import importlib
from typing import Any

import torch

from engine_cpu import kvcopy

HOST_POOL_MODULES = (
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
)
"""Modules that bind the copy kernels at import, and only on a GPU."""


def _without_pinning(
    *args: object, **kwargs: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    # Pinning is cudaHostRegister; SGLang asks for it whatever the platform says.
    return args, {**kwargs, "pin_memory": False}


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


def register() -> None:
    """Bind the copies and register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _provide_copies()
    _provide_stream_synchronize()
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__",
        _without_pinning,
        HookType.BEFORE,
    )
