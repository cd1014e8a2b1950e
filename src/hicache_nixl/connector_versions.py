"""What differs between SGLang's versions on the connector's side of it.

Owns: the storage configuration and what else older versions say elsewhere or not at all. Host pools
are read by `host_pools`. Imports sglang.
"""

from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from hicache_nixl.errors import RegistrationError

_AXES = ("pp", "attn_cp", "dcp")

MIRRORS_DEVICE_POOLS = not hasattr(HiCacheStorageConfig, "is_storage_writer")
"""Whether this is SGLang before 0.5.23, whose host pools keep the device pool they mirror."""


def complete(config: Any) -> Any:
    """`config` with the ranks and sizes that a storage configuration of SGLang 0.5.23 has.

    An older one leaves out some kinds of parallelism. Where the engine uses one of them its ranks
    cannot be told apart, which raises a RegistrationError, as does an engine that does not say.
    """
    added: dict[str, Any] = {}
    for axis in _AXES:
        if not hasattr(config, f"{axis}_size"):
            if (size := _engine_size(f"{axis}_size")) != 1:
                raise RegistrationError(
                    f"{axis}_size is {size}, and this version of SGLang does not tell its storage "
                    f"which rank it is: use --{axis.replace('_', '-')}-size 1 or SGLang 0.5.23"
                )
            added |= {f"{axis}_rank": 0, f"{axis}_size": 1}
    if not hasattr(config, "is_storage_writer"):
        added["is_storage_writer"] = not config.is_mla_model or config.tp_rank == 0
    return SimpleNamespace(**vars(config), **added) if added else config


def _engine_size(name: str) -> int:
    """A parallel size of the running engine, 1 in a version that has no such parallelism."""
    from sglang.srt.server_args import get_global_server_args

    try:
        try:
            engine = get_global_server_args()
        except RuntimeError:  # retired in 0.5.20
            from sglang.srt.runtime_context import get_parallel

            engine = get_parallel()
        return int(getattr(engine, name, 1))
    except ValueError as error:
        raise RegistrationError(
            f"{name} is not in the storage configuration, and the engine does not say it: {error}"
        ) from error


def kv_dtype(host_pool: Any) -> str | None:
    """The engine's KV dtype, which names the format of pools of raw bytes; None if not told."""
    if MIRRORS_DEVICE_POOLS:
        device_pool = getattr(host_pool, "device_pool", None)
        return None if device_pool is None else str(device_pool.dtype).removeprefix("torch.")
    from sglang.srt.runtime_context import get_context, get_model

    if not get_context().is_config_namespace_published("model"):
        return None
    value = getattr(get_model(), "kv_cache_dtype", None)
    return None if value is None else str(value)


def refuse_beside_kv(pool_name: str) -> None:
    """RegistrationError for a pool beside the KV pool in versions whose v2 calls are not known."""
    if MIRRORS_DEVICE_POOLS:
        raise RegistrationError(
            f"host pool {pool_name!r}: models with pools beside the KV pool need SGLang 0.5.23"
        )


def storage_metrics() -> Any:
    """SGLang's StorageMetrics class."""
    try:
        from sglang.srt.observability.metrics_collector import StorageMetrics
    except ImportError:  # before 0.5.10
        from sglang.srt.metrics.collector import StorageMetrics
    return StorageMetrics
