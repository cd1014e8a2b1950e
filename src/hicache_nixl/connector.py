"""The face toward SGLang: `HiCacheNixlConnector`, loaded as its `dynamic` storage backend.

Calls come in with keys and host indices and go out as a boolean per page. Trouble with storage is a
miss here, never an exception; wrong use (a pool that is not registered, lengths that do not fit) is
an error, raised before anything is touched. With `connector_plugin` and `connector_versions`, this
is the only module that imports sglang.

The v1 calls move pages of the anchor pool, the v2 calls those of any pool by its name. SGLang sets
from its backup thread, the pools beside the anchor first, and asks and gets from its prefetch
threads, at the same time. It keeps the leading run of True and drops the rest.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from hicache_nixl import connector_versions
from hicache_nixl.errors import RegistrationError
from hicache_nixl.geometry import PoolGeometry
from hicache_nixl.hybrid import HitPolicy, Need, Verdict, restorable_prefixes
from hicache_nixl.identity import Namespace, identify, key_bytes
from hicache_nixl.page_moves import PageMoves, PoolPages
from hicache_nixl.probe import describe_tier
from hicache_nixl.registered_pools import PoolTable, RegisteredPool, StoredKeys
from hicache_nixl.settings import load_settings
from hicache_nixl.startup import Tier, assemble

logger = logging.getLogger(__name__)

_ANCHOR = "kv"
_STORED_ON_EVERY_RANK = "mamba"
"""The one pool that SGLang stores on TP ranks that do not store KV."""
_ONE_TENSOR = (
    "the calls that move one tensor at a time are not served; set "
    '"interface_v1": 1 in --hicache-storage-backend-extra-config'
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
        self._config = connector_versions.complete(storage_config)
        self._settings = load_settings(storage_config.extra_config)
        self._tier: Tier = assemble(self._settings)
        self._pools = PoolTable(self._tier, self._namespace)
        self._anchor: RegisteredPool | None = None
        # A version that does not say when its first pools are complete gets a line for each.
        self._announced = not hasattr(HiCacheStorage, "on_host_pools_registered")
        self._meter = self._tier.guard.meter
        self._moves = PageMoves(self._tier, self._meter, self._settings.deadline)
        self._warned_prefix = False
        self._close_lock = threading.Lock()
        self._closed = False
        for note in self._settings.notes:
            logger.info("%s", note)
        logger.info("%s", describe_tier(self._tier))

    # -- pools --------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the anchor: the pool whose pages the v1 calls move."""
        self._anchor = self._register(mem_pool_host, _ANCHOR)
        super().register_mem_pool_host(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool under its name, also the anchor once more. The same pool under the same name
        changes nothing; another one is a RegistrationError."""
        name = _text(host_pool_name)
        if name != _ANCHOR:
            connector_versions.refuse_beside_kv(name)
        self._register(host_pool, name)

    def on_host_pools_registered(self) -> None:
        """Say what was registered. RegistrationError if there are no bytes to store."""
        pools = self._pools.all()
        if all(pool.page_bytes is None for pool in pools):
            raise RegistrationError(
                "no host pool with bytes is registered (registered: "
                f"{', '.join(pool.name for pool in pools) or 'none'}); an anchor that only counts "
                "pages needs the pools with the bytes beside it"
            )
        self._announced = True
        logger.info("%s", "\n  ".join(["host pools", *map(str, pools)]))

    def _register(self, host_pool: Any, name: str) -> RegisteredPool:
        if self._closed:
            raise RegistrationError("the connector is closed")
        pool, is_new = self._pools.add(host_pool, name)
        if is_new and self._announced:
            logger.info("host pool %s", pool)
        if is_new and name != _STORED_ON_EVERY_RANK and not self._config.is_storage_writer:
            self._warn_if_never_stored(pool)
        return pool

    def _warn_if_never_stored(self, pool: RegisteredPool) -> None:
        if pool.page_bytes is not None and self._writes(pool):
            logger.warning(
                "host pool %r differs between TP ranks, but on rank %d SGLang stores only %r: no "
                "prefix that needs it will be restored; use --tp-size 1, or a draft model whose KV "
                "is the same on every rank",
                pool.name,
                self._config.tp_rank,
                _STORED_ON_EVERY_RANK,
            )

    def _writes(self, pool: RegisteredPool) -> bool:
        """Whether this rank stores the pool; where ranks hold the same bytes, one does for all."""
        page_bytes = pool.page_bytes
        shared = page_bytes is not None and page_bytes.namespace.is_replicated
        return self._config.is_storage_writer or not shared

    def _namespace(self, host_pool: Any, geometry: PoolGeometry, name: str) -> Namespace:
        return identify(
            pool=host_pool,
            geometry=geometry,
            storage_config=self._config,
            settings=self._settings,
            pool_name=name,
            kv_dtype=connector_versions.kv_dtype(host_pool),
        )

    def _registered(self) -> RegisteredPool:
        """The anchor."""
        if self._closed:
            raise RegistrationError("the connector is closed")
        if self._anchor is None:
            raise RegistrationError("no host pool is registered; call register_mem_pool_host first")
        return self._anchor

    # -- what is stored -----------------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Length of the leading run of `keys` that the anchor has stored.

        0 if the anchor has no bytes: only v2 says which other pools a prefix needs.
        """
        del extra_info
        return self._restorable(self._registered(), keys, []).pages

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> Any:
        """Which prefixes of `keys` can be restored, as SGLang's PoolTransferResult.

        `pool_transfers` name the pools beside the anchor and what a prefix needs of each; of their
        keys only the number counts. `restorable_prefix_pages` is always filled, ascending.
        """
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        del extra_info
        anchor = self._registered()
        verdict = self._restorable(anchor, keys, [self._need(t) for t in pool_transfers or ()])
        result = PoolTransferResult(verdict.pages, verdict.boundaries)
        result.restorable_prefix_pages = verdict.restorable
        return result

    def _restorable(
        self, anchor: RegisteredPool, keys: Sequence[str], needs: Sequence[Need]
    ) -> Verdict:
        deadline = time.monotonic() + self._settings.deadline
        stored = StoredKeys(self._tier.guard, self._pools, keys, deadline=deadline)
        with self._meter.exists(len(keys)) as measured:
            name = None if anchor.page_bytes is None else anchor.name
            verdict = restorable_prefixes(len(keys), name, needs, stored)
            measured.hits = verdict.pages
        return verdict

    def _need(self, transfer: Any) -> Need:
        pool = self._pools[_text(transfer.name)]
        try:
            policy = HitPolicy(_text(transfer.hit_policy))
        except ValueError:
            raise RegistrationError(
                f"host pool {pool.name!r} has the hit policy {_text(transfer.hit_policy)!r}: known "
                f"are {', '.join(HitPolicy)}"
            ) from None
        return Need(
            pool.name,
            policy,
            trailing=max(1, len(transfer.keys or ())),
            block_pages=getattr(transfer, "block_pages", 0),
            group_pages=getattr(transfer, "group_pages", 0),
        )

    # -- pages --------------------------------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the anchor's host pool; True for each that is there, whole and right.

        `host_indices`: token indices, `page_tokens` for each key. Host pages whose result is False
        hold undefined bytes. Blocks for at most the `deadline` of the settings, with one exception:
        see `RecordMover`. An anchor without bytes has nothing to read: True.
        """
        anchor = self._registered()
        batch = anchor.batch(keys, host_indices)
        return self._moves.read([PoolPages(len(keys), batch, self._prefix(extra_info))])[0]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the anchor's host pool; True for each that is stored now.

        Where ranks hold the same bytes (MLA), one of them writes and the others say True at once.
        """
        anchor = self._registered()
        batch = anchor.batch(keys, host_indices)
        batch = batch if self._writes(anchor) else None
        return self._moves.write([PoolPages(len(keys), batch, self._prefix(extra_info))])[0]

    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of several pools; for each, by its name, what `batch_get_v1` says.

        One deadline holds for the whole call.
        """
        self._registered()
        parts = self._parts(transfers, extra_info)
        return dict(zip(parts, self._moves.read(list(parts.values())), strict=True))

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; for each, by its name, what `batch_set_v1` says.

        One deadline holds for the whole call. A prefix is not restored before all its pools are
        stored, so their order does not matter.
        """
        self._registered()
        parts = {
            name: part if self._writes(self._pools[name]) else replace(part, batch=None)
            for name, part in self._parts(transfers, extra_info).items()
        }
        return dict(zip(parts, self._moves.write(list(parts.values())), strict=True))

    def _parts(
        self, transfers: Sequence[Any], extra_info: HiCacheStorageExtraInfo | None
    ) -> dict[str, PoolPages]:
        """What transfers move, by pool. Raises RegistrationError for the first that is wrong."""
        parts: dict[str, PoolPages] = {}
        prefix: Sequence[bytes] | None = None
        for transfer in transfers:
            pool = self._pools[_text(transfer.name)]
            if pool.name in parts:
                raise RegistrationError(
                    f"host pool {pool.name!r} is named twice in one call: name each pool once"
                )
            keys = transfer.keys or []
            empty = not keys and transfer.host_indices is None
            batch = None if empty else pool.batch(keys, transfer.host_indices)
            if _text(transfer.hit_policy) == HitPolicy.TRAILING_PAGES:
                # What lies before the trailing pages is not in use.
                parts[pool.name] = PoolPages(len(keys), batch)
                continue
            prefix = self._prefix(extra_info) if prefix is None else prefix
            parts[pool.name] = PoolPages(len(keys), batch, prefix)
        return parts

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

    # -- administration -----------------------------------------------------------------------

    def clear(self) -> bool:
        """Forget the pages of the registered pools' namespaces; those of others stay.

        False on trouble, and when the `deadline` of the settings was too short for all pages: then
        the next call goes on.
        """
        self._registered()
        pages = 0
        deadline = time.monotonic() + self._settings.deadline
        try:
            for pool in self._pools.all():
                if pool.page_bytes is not None:
                    digest = pool.page_bytes.namespace.digest
                    pages += self._tier.guard.clear(digest, deadline=deadline)
        except OSError as error:  # StoreError is one
            self._meter.trouble("clear", error)
            return False
        logger.info("cleared %d pages of %d host pools", pages, len(self._pools.all()))
        return True

    def get_stats(self) -> Any:
        """Pages and GB/s of each call since the last `get_stats`, as SGLang's StorageMetrics; the
        pools of a v2 call are one sample."""
        gets, sets = self._meter.drain()
        return connector_versions.storage_metrics()(
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

    def _one_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: SGLang then copies every page on the way."""
        raise NotImplementedError(_ONE_TENSOR)

    get = batch_get = set = batch_set = _one_tensor

    def exists(self, key: str) -> bool:
        """Whether one page is stored."""
        return self.batch_exists([key]) == 1


def _text(value: Any) -> str:
    """The text of SGLang's string enumerations, whatever their `str()` says."""
    return str(getattr(value, "value", value))
