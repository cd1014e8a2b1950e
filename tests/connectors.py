"""How SGLang configures and calls the connector, for tests that build one on its own host pools."""

from pathlib import Path
from typing import Any

from pools import HiCacheStorageConfig

# isort: split
from sglang.srt.mem_cache.hicache_storage import (  # noqa: F401 - for whoever imports this
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # noqa: F401


def config(directory: Path, **changes: Any) -> HiCacheStorageConfig:
    """What SGLang passes, with the store in `directory`; keys of settings may be changed too."""
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "org/model",
    }
    extra = {
        "backend_name": "hicache_nixl",
        "module_path": "hicache_nixl",
        "class_name": "HiCacheNixlConnector",
        "interface_v1": 1,
        "store": f"slab://{directory}",
        "capacity": "64MiB",
        "staging": "4MiB",
    }
    for key, value in changes.items():
        (fields if key in fields else extra)[key] = value
    return HiCacheStorageConfig(**fields, extra_config=extra)


def keys(count: int, name: str = "a") -> list[str]:
    """Names of pages, as SGLang makes them: 64 hexadecimal digits."""
    return [f"{ord(name):02x}{i:062x}" for i in range(count)]


def corrupt(directory: Path, needle: bytes) -> None:
    """Flip one bit of the first occurrence of `needle` in the segment files."""
    for path in directory.glob("*.slab"):
        content = path.read_bytes()
        if (at := content.find(needle)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([needle[0] ^ 1]))
            return
    raise AssertionError("the page is not in the store")
