"""The face toward SGLang: `HiCacheNixlConnector`, loaded as its `dynamic` storage backend.

Calls come in with keys and host indices and go out as a boolean per page. Trouble with storage is a
miss here, never an exception; wrong use (no pool registered, lengths that do not fit) is an error.
With `connector_plugin`, this is the only module that imports sglang.

SGLang calls `batch_set_v1` from its backup thread and `batch_exists` and `batch_get_v1` from its
prefetch threads, at the same time. It keeps the leading run of True and drops the rest.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from hicache_nixl.batch import Batch
from hicache_nixl.errors import RegistrationError, StoreError
from hicache_nixl.geometry import PoolGeometry, describe_pool
from hicache_nixl.identity import Namespace, identify, key_bytes
from hicache_nixl.metrics import Meter
from hicache_nixl.probe import describe_tier
from hicache_nixl.settings import load_settings
from hicache_nixl.startup import Tier, assemble
from hicache_nixl.stores.base import Flags

logger = logging.getLogger(__name__)

_KV_POOL = "kv"
_ONE_TENSOR = (
    'moves one tensor at a time and is not served; set "interface_v1": 1 in '
    "--hicache-storage-backend-extra-config"
)
_HYBRID = (
    "hybrid models (pools beside the KV pool) are not served by this version; start SGLang without "
    "--hicache-storage-backend for them"
)


class HiCacheNixlConnector(HiCacheStorage):  # type: ignore[misc]
    """SGLang's L3 storage on NIXL.

    Args:
        storage_config: SGLang's; its `extra_config` holds the settings (`hicache_nixl.settings`).
        kwargs: what SGLang passes to dynamic backends; unused.

    Raises SettingsError, StoreError, TransferError or HostMemoryError when it cannot start.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None
    ) -> None:
        del kwargs
        self._config = storage_config
        self._settings = load_settings(storage_config.extra_config)
        self._tier: Tier = assemble(self._settings)
        self._pool: tuple[Any, PoolGeometry, Namespace] | None = None
        self._meter = Meter()
        self._warned_prefix = False
        self._close_lock = threading.Lock()
        self._closed = False
        for note in self._settings.notes:
            logger.info("%s", note)
        logger.info("%s", describe_tier(self._tier))

    # -- pools --------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool whose pages the v1 calls move. Once."""
        if self._pool is not None:
            raise RegistrationError(
                f"a host pool is registered already ({self._pool[2]}); one connector serves one"
            )
        geometry = describe_pool(mem_pool_host)
        namespace = identify(
            pool=mem_pool_host,
            geometry=geometry,
            storage_config=self._config,
            settings=self._settings,
            pool_name=_KV_POOL,
            kv_dtype=_engine_kv_dtype(),
        )
        needed = self._tier.mover.placement(geometry).staging_bytes
        if needed > self._tier.staging.nbytes:
            raise RegistrationError(
                f"a page of {namespace} needs {needed} bytes of staging, there are "
                f"{self._tier.staging.nbytes}; raise staging"
            )
        self._tier.store.open_namespace(namespace)
        self._tier.register_pool(geometry)
        self._pool = (mem_pool_host, geometry, namespace)
        super().register_mem_pool_host(mem_pool_host)
        logger.info(
            "pool %s: %s, %d pages of %d tokens, %d bytes in %d segments, %s",
            namespace,
            geometry.layout,
            geometry.pages,
            geometry.page_tokens,
            geometry.payload_bytes,
            len(geometry.lengths),
            "in place" if self._tier.mover.placement(geometry).in_place else "through staging",
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """The KV pool is known already; pools of hybrid models are refused."""
        if self._pool is not None and host_pool is self._pool[0]:
            return
        raise RegistrationError(f"host pool {str(host_pool_name)!r}: {_HYBRID}")

    # -- pages --------------------------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Length of the leading run of `keys` that is stored."""
        del extra_info
        _, _, namespace = self._registered()
        names = [key_bytes(key) for key in keys]
        with self._meter.exists(len(keys)) as measured:
            try:
                measured.hits = self._tier.store.exists(namespace.digest, names)
            except StoreError as error:
                self._meter.trouble("exists", error)
        return measured.hits

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the host pool; True for each that is there, whole and right.

        `host_indices`: token indices, `page_tokens` for each key. Host pages whose result is False
        hold undefined bytes. Blocks for at most the `deadline` of the settings, with one exception:
        see `RecordMover`.
        """
        return self._move("get", self._tier.store.get, keys, host_indices, extra_info)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the host pool; True for each that is stored now.

        Where ranks hold the same bytes (MLA), one of them writes and the others say True at once.
        """
        if not self._config.is_storage_writer:
            self._registered()[1].page_numbers(host_indices, len(keys))
            return [True] * len(keys)
        return self._move("set", self._tier.store.put, keys, host_indices, extra_info)

    def _move(
        self,
        name: str,
        operation: Callable[..., Flags],
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        _, geometry, namespace = self._registered()
        numbers = geometry.page_numbers(host_indices, len(keys))
        if not keys:
            return []
        batch = Batch(geometry, numbers, [key_bytes(key) for key in keys], namespace.digest)
        deadline = time.monotonic() + self._settings.deadline
        with self._meter.moving(name, len(keys), geometry.payload_bytes) as measured:
            try:
                flags = operation(
                    self._tier.mover, batch, self._prefix(extra_info), deadline=deadline
                )
            except StoreError as error:
                self._meter.trouble(name, error)
                return [False] * len(keys)
            results: list[bool] = flags.tolist()
            measured.hits = sum(results)
        return results

    def _prefix(self, extra_info: HiCacheStorageExtraInfo | None) -> Sequence[bytes]:
        keys = None if extra_info is None else extra_info.prefix_keys
        if keys is None:
            if not self._warned_prefix:
                self._warned_prefix = True
                logger.warning(
                    "SGLang passes no prefix keys, so eviction may take the front of a prefix "
                    'before its end; set "hicache_storage_pass_prefix_keys": true in '
                    "--hicache-storage-backend-extra-config"
                )
            return ()
        return [key_bytes(key) for key in keys]

    def _registered(self) -> tuple[Any, PoolGeometry, Namespace]:
        if self._closed:
            raise RegistrationError("the connector is closed")
        if self._pool is None:
            raise RegistrationError("no host pool is registered; call register_mem_pool_host first")
        return self._pool

    # -- administration -----------------------------------------------------------------------

    def clear(self) -> bool:
        """Forget the pages of this pool's namespace; those of others stay. False on trouble."""
        _, _, namespace = self._registered()
        try:
            pages = self._tier.store.clear(namespace.digest)
        except (StoreError, OSError) as error:
            self._meter.trouble("clear", error)
            return False
        logger.info("cleared %d pages of %s", pages, namespace)
        return True

    def get_stats(self) -> Any:
        """Pages and GB/s of each call since the last `get_stats`, as SGLang's StorageMetrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        gets, sets = self._meter.drain()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in gets],
            backup_pgs=[pages for pages, _ in sets],
            prefetch_bandwidth=[rate for _, rate in gets],
            backup_bandwidth=[rate for _, rate in sets],
        )

    def close(self) -> None:
        """Release files, memory and registrations; waits up to 10 s for late transfers."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._tier.close()

    # -- interfaces that are not served -------------------------------------------------------

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, see `_ONE_TENSOR`."""
        raise NotImplementedError(f"get {_ONE_TENSOR}")

    def batch_get(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, see `_ONE_TENSOR`."""
        raise NotImplementedError(f"batch_get {_ONE_TENSOR}")

    def set(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, see `_ONE_TENSOR`."""
        raise NotImplementedError(f"set {_ONE_TENSOR}")

    def batch_set(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, see `_ONE_TENSOR`."""
        raise NotImplementedError(f"batch_set {_ONE_TENSOR}")

    def exists(self, key: str) -> bool:
        """Whether one page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists_v2(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: hybrid pools."""
        raise NotImplementedError(f"batch_exists_v2: {_HYBRID}")

    def batch_get_v2(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: hybrid pools."""
        raise NotImplementedError(f"batch_get_v2: {_HYBRID}")

    def batch_set_v2(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: hybrid pools."""
        raise NotImplementedError(f"batch_set_v2: {_HYBRID}")


def _engine_kv_dtype() -> str | None:
    """The server's --kv-cache-dtype, which names the format of pools of raw bytes; None outside a
    server or where this SGLang version does not tell."""
    try:
        from sglang.srt.runtime_context import get_context, get_model
    except ImportError:
        return None
    if not get_context().is_config_namespace_published("model"):
        return None
    value = getattr(get_model(), "kv_cache_dtype", None)
    return None if value is None else str(value)
