"""How SGLang configures the connector, for tests that build one on SGLang's own host pools."""

from pathlib import Path
from typing import Any

from pools import HiCacheStorageConfig


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
