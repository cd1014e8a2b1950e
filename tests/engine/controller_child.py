"""One of SGLang's cache controllers with its own threads over the connector, in one process.

The process group, the platform and SGLang's configuration are global, so each combination of
controller, model and layout gets a process of its own:

    python controller_child.py STORE hicache|hybrid mha|mla LAYOUT kernel|direct

"Device" memory is L1, the host pool L2, the connector's store L3. Every comparison is of L1 bytes
before and after the trip, with other rows of L1 and zeroed rows of L2 in between, so that bytes
which never travelled cannot look right. Exit status 0 means all were equal.
"""

import argparse
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from engine_cpu.server import connector_storage
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (  # noqa: E402
    HybridCacheController,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (  # noqa: E402
    build_kv_host_pool,
    build_pool_entry,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import HostPoolGroup  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

PAGE = 16
LAYERS = 3
PAGES = 6
PROMPTS = 3
DEVICE_TOKENS = PAGE * PAGES * (2 * PROMPTS + 2)
PATIENCE = 60.0


@dataclass
class Prompt:
    """Tokens whose KV lies in L1 at `device` and in L2 at `host`."""

    tokens: list[int]
    device: torch.Tensor
    host: torch.Tensor
    before: list[torch.Tensor]


class Rig:
    """A controller over one device pool, one host pool and one store."""

    def __init__(self, store: Path, controller: str, kind: str, layout: str, io: str) -> None:
        self.store = store
        self.hybrid = controller == "hybrid"
        self.device_pool = _device_pool(kind)
        self.layers = _layers(self.device_pool, kind)
        generator = torch.Generator().manual_seed(11)
        for layer in self.layers:
            layer.copy_(torch.randn(layer.shape, generator=generator))
        self.allocator = PagedTokenToKVPoolAllocator(
            DEVICE_TOKENS, PAGE, torch.bfloat16, "cpu", self.device_pool, need_sort=False
        )
        self.host_pool = build_kv_host_pool(kv_pool=self.device_pool, page_size=PAGE)
        if self.host_pool.layout != layout:
            raise AssertionError(f"SGLang built {self.host_pool.layout}, asked for {layout}")
        self.controller = self._controller(io)

    def _controller(self, io: str) -> Any:
        common: dict[str, Any] = {
            "page_size": PAGE,
            "tp_group": torch.distributed.group.WORLD,
            "load_cache_event": threading.Event(),
            "write_policy": "write_through",
            "io_backend": io,
            **self._storage(),
        }
        if not self.hybrid:
            return HiCacheController(self.allocator, self.host_pool, **common)
        entry = build_pool_entry(
            name=PoolName.KV,
            host_pool=self.host_pool,
            device_pool=self.device_pool,
            layer_mapping={layer: layer for layer in range(LAYERS)},
            transfer_layer_id_max=LAYERS,
            is_anchor=True,
        )
        return HybridCacheController(
            self.allocator, HostPoolGroup([entry]), transfer_layer_id_max=LAYERS, **common
        )

    def _storage(self) -> dict[str, Any]:
        return {
            "storage_backend": "dynamic",
            "prefetch_threshold": PAGE,
            "model_name": "tiny",
            "storage_backend_extra_config": connector_storage(
                f"slab://{self.store}", capacity="256MiB"
            ),
        }

    def reattach(self) -> None:
        """Detach the storage and attach it again, as the server does at run time."""
        self.controller.detach_storage_backend()
        alive = [
            thread.name
            for thread in threading.enumerate()
            if "prefetch" in thread.name or "backup" in thread.name
        ]
        if alive:
            raise AssertionError(f"threads outlive the detached storage: {alive}")
        pools = {"host_pools": self.controller.mem_pool_host.entries} if self.hybrid else {}
        self.controller.attach_storage_backend(**self._storage(), **pools)

    def read_device(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [layer[rows].clone() for layer in self.layers]

    def to_host(self, number: int) -> Prompt:
        """L1 -> L2 of a new prompt of `PAGES` pages."""
        tokens = [number * 10_000 + position for position in range(PAGES * PAGE)]
        device = self.allocator.alloc(len(tokens))
        host = self.controller.write(device, node_id=number)
        if device is None or host is None:
            raise AssertionError("the pools of this test are too small")
        acknowledged = self.controller.ack_write_queue.pop(0)
        acknowledged.finish_event.synchronize()
        return Prompt(tokens, device, host, self.read_device(device))

    def check_host_bytes(self, prompt: Prompt, kind: str) -> None:
        """L2 holds a page as SGLang's own accessor of the layout defines it."""
        for start in range(0, PAGES * PAGE, PAGE):
            rows = prompt.device[start : start + PAGE]
            page = self.host_pool.get_data_page(prompt.host[start], flat=False)
            expected = _expected_page(self.layers, rows, kind, self.host_pool.layout)
            if not torch.equal(page.reshape(-1), expected.reshape(-1)):
                raise AssertionError(f"L2 page at token {start} is not in {self.host_pool.layout}")

    def queue_backup(self, prompt: Prompt) -> None:
        hashes = get_storage_hash_str(prompt.tokens, None, page_size=PAGE)
        self.controller.write_storage(prompt.host, prompt.tokens, hash_value=hashes)

    def await_backups(self, count: int) -> None:
        for _ in range(count):
            operation = self.controller.ack_backup_queue.get(timeout=PATIENCE)
            if operation.completed_tokens != PAGES * PAGE:
                raise AssertionError(f"{operation.completed_tokens} tokens stored")

    def clear_host(self, prompts: Sequence[Prompt]) -> None:
        """Zero L2 and give the pages of `prompts` back."""
        self.host_pool.kv_buffer.zero_()
        for prompt in prompts:
            self.controller.mem_pool_host.free(prompt.host)

    def queue_prefetch(self, prompt: Prompt, number: int) -> None:
        name = f"request-{number}"
        request = CacheRequestHandle(rid=name, attempt_id=0) if self.hybrid else name
        # The last tokens fill no page, as in a real prompt.
        self.controller.prefetch(request, [*prompt.tokens, 1, 2, 3])

    def await_hits(self, count: int) -> list[torch.Tensor]:
        """Take `count` answered queries and queue the transfers to fresh L2 pages."""
        targets = []
        for _ in range(count):
            operation = self.controller.prefetch_hit_queue.get(timeout=PATIENCE)
            if operation.storage_hit_count != PAGES * PAGE:
                raise AssertionError(f"{operation.storage_hit_count} tokens hit")
            operation.host_indices = self.controller.mem_pool_host.alloc(PAGES * PAGE)
            self.controller.prefetch_buffer.put(operation)
            targets.append(operation.host_indices)
        return targets

    def await_prefetches(self, count: int) -> None:
        completed: dict[Any, int] = {}
        finished = 0
        while finished < count:
            acknowledged = self.controller.ack_prefetch_queue.get(timeout=PATIENCE)
            if acknowledged.completed_tokens is not None:
                completed[acknowledged.rid] = acknowledged.completed_tokens
            finished += bool(acknowledged.completed_req)
        if set(completed.values()) != {PAGES * PAGE} or len(completed) != count:
            raise AssertionError(f"tokens read: {completed}")

    def check_on_device(self, prompt: Prompt, host: torch.Tensor, number: int) -> None:
        """L2 -> L1 into other rows, and compare with the bytes that left L1."""
        device = self.controller.load(host, node_id=1000 + number)
        if device is None or set(device.tolist()) & set(prompt.device.tolist()):
            raise AssertionError("the pages must come back to other rows of L1")
        for layer in self.layers:
            layer[device] = 0
        self.controller.start_loading()
        self.controller.ack_load_queue.pop(0).finish_event.synchronize()
        for layer, (before, after) in enumerate(
            zip(prompt.before, self.read_device(device), strict=True)
        ):
            if not torch.equal(before, after):
                raise AssertionError(f"buffer {layer} of prompt {number} came back changed")
        self.allocator.free(device)
        self.allocator.free(prompt.device)
        self.controller.mem_pool_host.free(host)


def _device_pool(kind: str) -> Any:
    shape = (DEVICE_TOKENS, PAGE, torch.bfloat16)
    if kind == "mha":
        return MHATokenToKVPool(*shape, 4, 32, LAYERS, "cpu", False)
    return MLATokenToKVPool(*shape, 64, 16, LAYERS, "cpu", False)


def _layers(pool: Any, kind: str) -> list[torch.Tensor]:
    """Every device buffer: K of each layer, then V of each; the latent KV for MLA."""
    return [*pool.k_buffer, *pool.v_buffer] if kind == "mha" else list(pool.kv_buffer)


def _expected_page(
    layers: list[torch.Tensor], rows: torch.Tensor, kind: str, layout: str
) -> torch.Tensor:
    sides = 2 if kind == "mha" else 1
    # [side, layer, token, head, width]
    page = torch.stack([layer[rows] for layer in layers])
    page = page.reshape(sides, LAYERS, PAGE, -1, page.shape[-1])
    if layout == "page_first":
        return page.transpose(1, 2)
    if layout == "page_head":
        return page.permute(0, 3, 2, 1, 4)
    return page


def bring_back(rig: Rig, prompts: Sequence[Prompt], *, storing: Sequence[Prompt] = ()) -> None:
    """L3 -> L2 -> L1 of `prompts`, whose L2 pages are cleared, while `storing` goes to L3."""
    for number, prompt in enumerate(prompts):
        rig.queue_prefetch(prompt, number)
        if number < len(storing):
            rig.queue_backup(storing[number])
    hosts = rig.await_hits(len(prompts))
    rig.await_prefetches(len(prompts))
    rig.await_backups(len(storing))
    for number, (prompt, host) in enumerate(zip(prompts, hosts, strict=True)):
        rig.check_on_device(prompt, host, number)


def round_trip(rig: Rig, kind: str) -> None:
    """One prompt goes through every tier and back."""
    prompt = rig.to_host(1)
    rig.check_host_bytes(prompt, kind)
    rig.queue_backup(prompt)
    rig.await_backups(1)
    rig.clear_host([prompt])
    bring_back(rig, [prompt])


def concurrent(rig: Rig) -> None:
    """Some prompts are stored while others are queried and read; then those, too, are read."""
    stored = [rig.to_host(10 + number) for number in range(PROMPTS)]
    for prompt in stored:
        rig.queue_backup(prompt)
    rig.await_backups(PROMPTS)
    rig.clear_host(stored)
    fresh = [rig.to_host(20 + number) for number in range(PROMPTS)]
    bring_back(rig, stored, storing=fresh)
    rig.clear_host(fresh)
    bring_back(rig, fresh)


def reattach(rig: Rig) -> None:
    """What was stored before a detach is read after the attach, and new pages are stored."""
    kept = rig.to_host(30)
    rig.queue_backup(kept)
    rig.await_backups(1)
    rig.reattach()
    rig.clear_host([kept])
    added = rig.to_host(31)
    bring_back(rig, [kept], storing=[added])
    rig.clear_host([added])
    bring_back(rig, [added])
    rig.controller.detach_storage_backend()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("controller", choices=("hicache", "hybrid"))
    parser.add_argument("kind", choices=("mha", "mla"))
    parser.add_argument("layout")
    parser.add_argument("io", choices=("kernel", "direct"))
    options = parser.parse_args()

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{options.store}.group", rank=0, world_size=1
    )
    get_parallel().override_permanently(
        tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_dp_rank=0, attn_dcp_rank=0
    )
    configuration = get_context().override_server_args(
        page_size=PAGE,
        hicache_mem_layout=options.layout,
        hicache_io_backend=options.io,
        hicache_ratio=1.0,
        hicache_storage_backend="dynamic",
    )
    with configuration:
        rig = Rig(options.store, options.controller, options.kind, options.layout, options.io)
        round_trip(rig, options.kind)
        concurrent(rig)
        reattach(rig)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
