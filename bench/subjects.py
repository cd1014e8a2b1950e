"""Who is measured: this connector and SGLang's own, behind the same few calls.

Owns how each is configured and what it needs around it; knows nothing of rounds or clocks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.plan import BenchError
from bench.pools import HostPages

_KEY_LENGTH = 64


class Subject(Protocol):
    """One way to store pages. `set` and `get` move the host pool's pages, all of them, in order."""

    name: str
    has_index: bool

    def setup(self, host: HostPages, directory: Path, capacity: int) -> None:
        """Open a store of `capacity` bytes in `directory` and register the pool."""

    def set(self, keys: Sequence[str]) -> list[bool]:
        """Store one page per key; True where it is stored."""

    def get(self, keys: Sequence[str]) -> list[bool]:
        """Load one page per key; True where it is loaded."""

    def exists(self, keys: Sequence[str]) -> int:
        """How many of `keys`, from the first on, are stored."""

    def forget(self, keys: Sequence[str]) -> None:
        """Give the keys' space back where the subject has no budget of its own."""

    def close(self) -> None:
        """Let go of files and registrations; the directory stays."""


@dataclass(frozen=True)
class Mode:
    """How a connector reaches the disk."""

    direct: bool = True
    queue: str = "auto"

    @property
    def label(self) -> str:
        """`"O_DIRECT, io_uring"`."""
        queue = {"uring": "io_uring", "aio": "AIO"}.get(self.queue, self.queue)
        return f"{'O_DIRECT' if self.direct else 'buffered'}, {queue}"


def preload() -> None:
    """Import SGLang's part, which takes seconds, before any clock runs."""
    try:
        import sglang.srt.mem_cache.storage.nixl.hicache_nixl  # noqa: F401
    except ImportError as error:
        raise BenchError(
            f"SGLang's NIXL connector cannot be imported ({error}): "
            "pip install 'hicache-nixl[engine]'"
        ) from error


def storage_config(host: HostPages, extra: dict[str, object]) -> Any:
    """What SGLang hands a connector: one rank, and the extra configuration."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=host.layout != "layer_first",
        model_name="bench/model",
        extra_config=extra,
    )


def _no_prefix() -> Any:
    """What SGLang passes beside the keys of a prompt's first batch."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=[])


class ConnectorSubject:
    """The calls both connectors share."""

    name = ""
    has_index = True

    def __init__(self, mode: Mode | None = None) -> None:
        self._mode = mode or Mode()
        self._connector: Any = None

    def set(self, keys: Sequence[str]) -> list[bool]:
        return list(self._connector.batch_set_v1(list(keys), self._host.indices, self._extra))

    def get(self, keys: Sequence[str]) -> list[bool]:
        return list(self._connector.batch_get_v1(list(keys), self._host.indices, self._extra))

    def exists(self, keys: Sequence[str]) -> int:
        return int(self._connector.batch_exists(list(keys), self._extra))

    def forget(self, keys: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()
            self._connector = None

    def _adopt(self, connector: Any, host: HostPages) -> None:
        self._connector, self._host, self._extra = connector, host, _no_prefix()
        connector.register_mem_pool_host(host.pool)


class InTree(ConnectorSubject):
    """SGLang's NIXL connector: one or two files per page, no budget."""

    name = "in-tree"

    def setup(self, host: HostPages, directory: Path, capacity: int) -> None:  # noqa: ARG002
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

        posix: dict[str, object] = {"active": True}
        if self._mode.queue == "uring":
            posix["use_uring"] = "true"
        extra: dict[str, object] = {
            "plugin": {"posix": posix},
            "use_direct_io": self._mode.direct,
            "l3_cleaner_enabled": False,
        }
        self._directory = directory
        try:
            connector = HiCacheNixl(storage_config(host, extra), file_path=str(directory))
        except RuntimeError as error:
            raise BenchError(f"in-tree ({self._mode.label}): {error}") from error
        self._adopt(connector, host)

    def forget(self, keys: Sequence[str]) -> None:
        gone = set(keys)
        for parent, _, names in os.walk(self._directory):
            for name in names:
                if name[:_KEY_LENGTH] in gone:
                    Path(parent, name).unlink()


class Ours(ConnectorSubject):
    """This project's connector on a slab store, payload checksums verified."""

    name = "ours"
    scheme = "slab"

    def setup(self, host: HostPages, directory: Path, capacity: int) -> None:
        try:
            from hicache_nixl import HiCacheNixlConnector, HiCacheNixlError
        except ImportError as error:
            raise BenchError(
                f"hicache_nixl cannot be imported ({error}): pip install -e ."
            ) from error
        extra: dict[str, object] = {
            "backend_name": "hicache_nixl",
            "module_path": "hicache_nixl",
            "class_name": "HiCacheNixlConnector",
            "interface_v1": 1,
            "verify": "full",
            **self.store_settings(directory, capacity),
        }
        try:
            connector = HiCacheNixlConnector(storage_config(host, extra), {})
            self._adopt(connector, host)
        except HiCacheNixlError as error:
            raise BenchError(f"{self.name} ({self._mode.label}): {error}") from error

    def store_settings(self, directory: Path, capacity: int) -> dict[str, object]:
        """Where the store is and how it is reached."""
        directory.mkdir(parents=True, exist_ok=True)
        return {
            "store": f"{self.scheme}://{directory.resolve()}",
            "capacity": capacity,
            "use_direct_io": self._mode.direct,
            "queue": self._mode.queue,
        }

    @staticmethod
    def drop_index(directory: Path) -> int:
        """Delete the index of a closed store, as a lost one would be; returns the files deleted."""
        files = [file for file in directory.rglob("index*") if file.is_file()]
        for file in files:
            file.unlink()
        return len(files)


class OursOnFiles(Ours):
    """This project's connector on a files store: one file a page, as in-tree, with a budget."""

    name = "files"
    scheme = "files"


class OursByPool(Ours):
    """This project's connector through the calls of hybrid models: an anchor without bytes, and
    the pages in a pool beside it."""

    name = "v2"

    def set(self, keys: Sequence[str]) -> list[bool]:
        results = self._connector.batch_set_v2(self._transfers(keys), extra_info=self._extra)
        return list(results[self._pool_name])

    def get(self, keys: Sequence[str]) -> list[bool]:
        results = self._connector.batch_get_v2(self._transfers(keys), extra_info=self._extra)
        return list(results[self._pool_name])

    def exists(self, keys: Sequence[str]) -> int:
        found = self._connector.batch_exists_v2(list(keys), self._transfers(keys), self._extra)
        return int(found.kv_hit_pages)

    def _transfers(self, keys: Sequence[str]) -> list[Any]:
        from sglang.srt.mem_cache.hicache_storage import PoolTransfer

        return [PoolTransfer(self._pool_name, host_indices=self._host.indices, keys=list(keys))]

    def _adopt(self, connector: Any, host: HostPages) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

        self._connector, self._host, self._extra = connector, host, _no_prefix()
        self._pool_name = PoolName.DEEPSEEK_V4_C4
        anchor = LogicalHostPool(host.pool.size, host.pool.page_size, layout=host.layout)
        connector.register_mem_pool_host(anchor)
        connector.register_mem_host_pool_v2(anchor, PoolName.KV)
        connector.register_mem_host_pool_v2(host.pool, self._pool_name)
        connector.on_host_pools_registered()
