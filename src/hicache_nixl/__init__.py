"""HiCache NIXL: the storage tier of SGLang's hierarchical KV cache, on NVIDIA NIXL.

`HiCacheNixlConnector` is what SGLang loads; it needs sglang and is imported when it is first asked
for, so that everything else works without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hicache_nixl.errors import (
    DeadlineExceededError,
    HiCacheNixlError,
    HostMemoryError,
    RegistrationError,
    SettingsError,
    StagingShortageError,
    StoreError,
    StoreFormatError,
    TransferError,
)

if TYPE_CHECKING:
    from hicache_nixl.connector import HiCacheNixlConnector

__version__ = "0.1.0"

__all__ = [
    "DeadlineExceededError",
    "HiCacheNixlConnector",
    "HiCacheNixlError",
    "HostMemoryError",
    "RegistrationError",
    "SettingsError",
    "StagingShortageError",
    "StoreError",
    "StoreFormatError",
    "TransferError",
]


def __getattr__(name: str) -> Any:
    if name == "HiCacheNixlConnector":
        return import_module("hicache_nixl.connector").HiCacheNixlConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
