"""SGLang's cache controller with its own threads: L1 -> L2 -> L3 and back."""

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

from versions import engine, pages
from versions.engine import IS_CURRENT, PAGE, Shape

_PATIENCE_S = 60.0


class Controller:
    """A controller over a device pool and a host pool of its own. Within `engine.configured`.

    Every method blocks until SGLang's threads are done and raises AssertionError if they don't do
    all of it.
    """

    def __init__(self, store: Path, shape: Shape, layout: str, tokens: int) -> None:
        self._shape = shape
        self.device = engine.device_pool(shape, 4 * tokens)
        self._allocator = PagedTokenToKVPoolAllocator(
            4 * tokens, PAGE, shape.dtype, "cpu", self.device, need_sort=False
        )
        self.host = engine.host_pool(self.device, shape, layout)
        self._controller = HiCacheController(
            self._allocator,
            self.host,
            page_size=PAGE,
            tp_group=torch.distributed.group.WORLD,
            load_cache_event=threading.Event(),
            write_policy="write_through",
            io_backend=engine.io_backend(layout),
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="org/controller",
            storage_backend_extra_config=engine.backend_settings(store),
        )

    def store(self, tokens: list[int], content: pages.Pages) -> None:
        """Put the KV of a prompt into L1 and write it through to L3."""
        device = self._allocator.alloc(len(tokens))
        pages.set_device_rows(self.device, self._shape, device, content)
        host = self._controller.write(device, node_id=1)
        self._controller.ack_write_queue.pop(0).finish_event.synchronize()
        self._controller.write_storage(host, tokens, hash_value=engine.page_keys(tokens))
        done = self._controller.ack_backup_queue.get(timeout=_PATIENCE_S)
        if done.completed_tokens != len(tokens):
            raise AssertionError(f"{done.completed_tokens} of {len(tokens)} tokens stored")

    def load(self, tokens: list[int]) -> pages.Pages | None:
        """Bring a prompt from L3 to L1; its bytes there, None if SGLang does not find it."""
        pages.unwrite(self.host, self._shape)
        prefetch = self._prefetch if IS_CURRENT else self._prefetch_into
        host = prefetch(tokens)
        if host is None:
            return None
        device = self._controller.load(host, node_id=2)
        self._controller.start_loading()
        self._controller.ack_load_queue.pop(0).finish_event.synchronize()
        return pages.device_rows(self.device, self._shape, device)

    def _prefetch_into(self, tokens: list[int]) -> torch.Tensor | None:
        """As older versions do: to host pages that the caller allots."""
        host = self.host.alloc(len(tokens))
        operation = self._controller.prefetch("request", host, tokens)
        deadline = time.monotonic() + _PATIENCE_S
        while operation.completed_tokens < len(tokens):
            if not self._controller.prefetch_revoke_queue.empty():
                return None
            if time.monotonic() > deadline or operation.is_terminated():
                raise AssertionError(f"{operation.completed_tokens} of {len(tokens)} tokens read")
            time.sleep(0.005)
        return host

    def _prefetch(self, tokens: list[int]) -> torch.Tensor | None:
        """As the current version does: host pages are allotted to what was found."""
        # The last tokens fill no page, as in a real prompt.
        self._controller.prefetch("request", [*tokens, 1, 2, 3])
        operation = self._controller.prefetch_hit_queue.get(timeout=_PATIENCE_S)
        if operation.storage_hit_count == 0:
            return None
        operation.host_indices = self._controller.mem_pool_host.alloc(len(tokens))
        self._controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            done = self._controller.ack_prefetch_queue.get(timeout=_PATIENCE_S)
            completed = done.completed_tokens if done.completed_tokens is not None else completed
            if done.completed_req:
                break
        if completed != len(tokens):
            raise AssertionError(f"{completed} of {len(tokens)} tokens read")
        return operation.host_indices

    def close(self) -> None:
        """Detach the storage; where a version cannot, close the connector."""
        backend: Any = self._controller.storage_backend
        if hasattr(self._controller, "detach_storage_backend"):
            self._controller.detach_storage_backend()
        else:
            self._controller.stop_event.set()
            backend.close()
