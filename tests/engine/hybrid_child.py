"""SGLang's radix cache of hybrid models, with its own threads, over the connector, in one process.

The process group, the platform and SGLang's configuration are global, so this is a process of its
own; what is asked for runs one after the other:

    python hybrid_child.py STORE KIND:LAYOUT...

"Device" memory is L1, the host pools L2, the connector's store L3. A prompt is inserted into the
real `UnifiedRadixCache`, which writes it through to L3. Then L1 and L2 are dropped and zeroed, the
prompt is prefetched and loaded back, and the bytes of every pool and every layer are compared with
those that left. Exit status 0 means all were equal.
"""

import argparse
import json
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from engine_cpu.models import write_model
from engine_cpu.server import connector_storage
from sglang.srt.plugins import load_plugins

load_plugins()

from hybrid_stacks import PAGES, STACKS, Buffers, Stack  # noqa: E402
from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (  # noqa: E402
    build_hicache_draft_sidecars,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

PATIENCE = 60.0

Checkpoints = dict[int, Buffers]
"""By the pages of a prefix, the bytes that it needs in every pool and layer."""


class Rig:
    """A radix cache over the pools of one kind."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.generator = torch.Generator().manual_seed(11)
        self.cache = UnifiedRadixCache(stack.parameters)
        self.cache.init_hicache(SimpleNamespace(file_storage_path=None), stack.parameters)
        if stack.draft is not None:
            specs, entries = build_hicache_draft_sidecars(
                draft_device_pools=(stack.draft,), tree_cache=self.cache
            )
            for spec, entry in zip(specs, entries, strict=True):
                self.cache.register_sidecar_pool(spec, entry)
        names = {entry.name.value for entry in self.cache.host_pool_group.entries}
        if names != set(stack.buffers()) | stack.without_bytes:
            raise AssertionError(f"SGLang built the host pools {sorted(names)}")

    def run_until(self, done: Callable[[], bool], what: str) -> None:
        """Take the scheduler's turns until `done`."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} took more than {PATIENCE:.0f} s")
            self.cache.check_hicache_events()
            time.sleep(0.005)

    def insert(self, tokens: list[int]) -> Checkpoints:
        """Put a prompt with random bytes into L1 and the tree, which starts its way to L3."""
        stack = self.stack
        rows = stack.allocate(len(tokens))
        stack.fill(rows, None, self.generator)
        checkpoints: Checkpoints = {}
        inserted = 0
        for pages in stack.checkpoints:
            state = stack.allocate_state()
            if state is not None:
                stack.fill(None, state, self.generator)
            length = pages * stack.page
            checkpoints[pages] = stack.read(rows[:length], state)
            parameters = InsertParams(
                key=_key(tokens[:length]),
                value=rows[:length],
                mamba_value=state,
                prev_prefix_len=inserted,
            )
            stack.leave_window(rows, parameters)
            self.cache.insert(parameters)
            inserted = length
        return checkpoints

    def settle(self) -> None:
        """Wait until all that was inserted is in L3."""
        cache = self.cache
        self.run_until(
            lambda: not (cache.ongoing_write_through or cache.ongoing_backup), "the backup"
        )

    def drop(self) -> None:
        """Forget and zero L1 and L2."""
        self.cache.reset()
        self.stack.clear()
        buffers = [buffer for pool in self.stack.buffers().values() for buffer in pool]
        for entry in self.cache.host_pool_group.entries:
            buffers += _host_buffers(entry.host_pool)
        for buffer in buffers:
            buffer.zero_()

    def prefetch(self, tokens: list[int], name: str) -> CacheRequestHandle:
        """Ask for a prompt in L3. The last tokens fill no page, as in a real prompt."""
        handle = CacheRequestHandle(rid=name, attempt_id=0)
        self.cache.prefetch_from_storage(
            handle,
            self.cache.root_node_handle(),
            array("q", [*tokens, 1, 2, 3]),
            None,
            [],
            matched_prefix_tokens=array("q"),
        )
        return handle

    def arrive(self, handle: CacheRequestHandle, tokens: list[int]) -> tuple[int, Buffers]:
        """Wait for L3 -> L2, load L2 -> L1; the pages that came and their bytes."""
        self.run_until(lambda: self.cache.check_prefetch_progress(handle), "the prefetch")
        length = self.cache.pop_prefetch_loaded_tokens(handle)
        if not length:
            return 0, {}
        # Other rows than before, so that what never travelled cannot look right.
        self.stack.allocate(self.stack.page)
        self.stack.allocate_state()
        return length // self.stack.page, self._load(tokens[:length])

    def _load(self, tokens: list[int]) -> Buffers:
        match = self.cache.match_prefix(MatchPrefixParams(key=_key(tokens)))
        request = SimpleNamespace(
            rid="load",
            kv=ReqKvInfo(),
            last_node=match.last_device_node,
            swa_host_hit_length=match.swa_host_hit_length,
            mamba_host_hit_length=match.mamba_host_hit_length,
        )
        length, node = self.cache.init_load_back(
            InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
        )
        if length != len(tokens):
            raise AssertionError(f"{length} of {len(tokens)} tokens loaded")
        self.cache.ready_to_load_host_cache()
        self.run_until(lambda: not self.cache.ongoing_load_back, "the load")
        rows = self.cache.path_device_indices(node)
        if not self.cache.supports_mamba():
            return self.stack.read(rows, None)
        # The state comes to the request, and to the tree for those that follow.
        loaded = self.stack.read(rows, request.kv.mamba_pool_idx.reshape(1))
        kept = self.stack.read(rows, self._kept_state(node))
        for mine, shared in zip(loaded["mamba"], kept["mamba"], strict=True):
            if not torch.equal(_raw(mine), _raw(shared)):
                raise AssertionError("the request and the tree have different states")
        return loaded

    def _kept_state(self, node: int) -> torch.Tensor:
        slot: torch.Tensor = self.cache.tree_core.get_component_device_value(
            node, ComponentType.MAMBA
        )
        return slot

    def close(self) -> None:
        """Stop the storage threads and close the store."""
        done, message = self.cache.detach_storage_backend()
        if not done:
            raise AssertionError(message)


def _key(tokens: list[int]) -> RadixKey:
    return RadixKey(array("q", tokens))


def _host_buffers(pool: Any) -> list[torch.Tensor]:
    """What a host pool keeps its bytes in."""
    names = ("kv_buffer", "index_k_with_scale_buffer", "temporal_buffer", "conv_buffer")
    found: list[Any] = [getattr(pool, name, None) for name in names]
    flat = [item for one in found for item in (one if isinstance(one, list | tuple) else [one])]
    return [item for item in flat if isinstance(item, torch.Tensor)]


def compare(stack: Stack, before: Checkpoints, pages: int, after: Buffers) -> None:
    """Every pool and layer that a prefix of `pages` needs came back as it left."""
    expected = before[min(length for length in before if length >= pages)]
    if expected.keys() != after.keys():
        raise AssertionError(f"pools {sorted(expected)} left and {sorted(after)} came back")
    for pool, layers in expected.items():
        first, last = stack.needed(pool, pages)
        for layer, (old, new) in enumerate(zip(layers, after[pool], strict=True)):
            left, came = _raw(old[first:last]), _raw(new[first:last])
            if not left.numel() or not torch.equal(left, came):
                raise AssertionError(f"buffer {layer} of pool {pool} came back changed")


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def whole_prompt(rig: Rig, tokens: list[int]) -> Checkpoints:
    """A prompt goes through every tier and comes back."""
    before = rig.insert(tokens)
    rig.settle()
    rig.drop()
    pages, after = rig.arrive(rig.prefetch(tokens, "whole"), tokens)
    if pages != PAGES:
        raise AssertionError(f"{pages} of {PAGES} pages came back")
    compare(rig.stack, before, pages, after)
    return before


def shared_prefix(rig: Rig, tokens: list[int], before: Checkpoints) -> None:
    """Of a prompt that shares all but the last page, what every pool has comes back."""
    rig.drop()
    other = [*tokens[: -rig.stack.page], *range(rig.stack.page)]
    pages, after = rig.arrive(rig.prefetch(other, "shared"), other)
    if pages != rig.stack.restorable:
        raise AssertionError(f"{pages} pages came back, {rig.stack.restorable} are complete")
    if pages:
        compare(rig.stack, before, pages, after)


def at_once(rig: Rig, tokens: list[int], before: Checkpoints) -> None:
    """A prompt is read while another one is stored; then that one, too, is read."""
    rig.drop()
    other = [token + 10_000 for token in tokens]
    handle = rig.prefetch(tokens, "read")
    stored = rig.insert(other)
    pages, after = rig.arrive(handle, tokens)
    compare(rig.stack, before, pages, after)
    rig.settle()
    rig.drop()
    pages, after = rig.arrive(rig.prefetch(other, "stored"), other)
    if pages != PAGES:
        raise AssertionError(f"{pages} of {PAGES} pages came back")
    compare(rig.stack, stored, pages, after)


def run(kind: str, layout: str, store: Path) -> None:
    """One kind in one layout; raises where bytes differ."""
    build = STACKS[kind]
    storage = connector_storage(f"slab://{store}", capacity="256MiB")
    configuration = get_context().override_server_args(
        served_model_name="tiny",
        # SGLang asks the model's configuration for the length of a Mamba chunk.
        model_path=str(write_model("mamba", store.with_suffix(".model"))),
        page_size=build.page,
        hicache_mem_layout=layout,
        hicache_io_backend="direct" if layout == "page_first_direct" else "kernel",
        hicache_ratio=1.0,
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps(
            {"prefetch_threshold": build.page, **storage}
        ),
    )
    with configuration:
        rig = Rig(build(torch.distributed.group.WORLD))
        tokens = list(range(1000, 1000 + PAGES * build.page))
        before = whole_prompt(rig, tokens)
        shared_prefix(rig, tokens, before)
        at_once(rig, tokens, before)
        rig.close()


def main() -> int:
    """Run each kind and layout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("runs", nargs="+", metavar="KIND:LAYOUT")
    options = parser.parse_args()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{options.store}.group", rank=0, world_size=1
    )
    get_parallel().override_permanently(
        tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_dp_rank=0, attn_dcp_rank=0
    )
    for name in options.runs:
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        kind, layout = name.split(":")
        store = options.store / kind / layout
        store.mkdir(parents=True)
        run(kind, layout, store)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
