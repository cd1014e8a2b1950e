"""Facts that host pools of SGLang before 0.5.23 leave to the device pool they mirror.

Such a host pool keeps its `device_pool`, and what it does not say of its own rows is read there. A
device pool whose class is not known may keep other bytes in them and is refused.
"""

from collections.abc import Callable, Iterable
from typing import Any

from hicache_nixl.errors import RegistrationError

_CLASSES = ("MHATokenToKVPool", "MLATokenToKVPool")

# By the host pool's attribute. A default stands for versions that know of one way only.
_READERS: dict[str, Callable[[Any], Any]] = {
    "v_head_dim": lambda device: getattr(device, "v_head_dim", device.head_dim),
    "kv_cache_dim": lambda device: device.kv_cache_dim,
    "target_layer_num": lambda device: device.layer_num,
    "dsa_kv_cache_store_fp8": lambda device: (
        getattr(device, "dsa_kv_cache_store_fp8", False)
        or getattr(device, "nsa_kv_cache_store_fp8", False)
    ),
    "_layer_shard_enabled": lambda device: getattr(device, "layer_shard_enabled", False),
}


def fact(pool: Any, name: str) -> Any:
    """What `pool.name` would be in SGLang 0.5.23.

    Raises AttributeError where the pool mirrors no device pool or the name is none of its facts,
    `RegistrationError` for a device pool that is not understood.
    """
    if name not in _READERS:
        raise AttributeError(name)
    return _READERS[name](_known(pool.device_pool))


def row_layouts(devices: Iterable[Any]) -> set[str]:
    """Axis orders of a token row in device pools; `RegistrationError` for one of unknown class.

    Versions that do not name the order have one.
    """
    return {str(getattr(_known(device), "kv_cache_layout", "nhd")) for device in devices}


def _known(device: Any) -> Any:
    names = [base.__name__ for base in type(device).__mro__]
    if names[0] not in _CLASSES or names.count(names[0]) > 1:
        raise RegistrationError(
            f"host pool over the device pool class {names[0]}: with SGLang before 0.5.23 "
            f"supported are {', '.join(_CLASSES)}"
        )
    return device
