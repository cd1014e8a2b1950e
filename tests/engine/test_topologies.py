"""Several ranks of the real SGLang server on one store: what they share and what they do not."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_cpu.models import Kind
from engine_cpu.server import EngineConfig, connector_storage

from .conftest import StartServer
from .stored import becomes, stored

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
PAGE = 16
GENERATED = 12

GetModel = Callable[..., Path]


@dataclass(frozen=True)
class Topology:
    """How two ranks serve a model, and the namespaces that makes.

    `ranks` holds the labels that tell the ranks apart in SGLang's metrics, `namespaces` the
    `StoredNamespace.part` of each.
    """

    kind: Kind
    flags: tuple[str, ...]
    ranks: tuple[dict[str, str], ...]
    namespaces: set[tuple[int | None, int, int, int]]


BOTH_TP_RANKS = ({"tp_rank": "0"}, {"tp_rank": "1"})
BOTH_STAGES = ({"pp_rank": "0"}, {"pp_rank": "1"})

SPLIT = {
    "mha-tp2": Topology("mha", ("--tp-size", "2"), BOTH_TP_RANKS, {(0, 0, 0, 2), (1, 0, 0, 2)}),
    "mla-tp2": Topology("mla", ("--tp-size", "2"), BOTH_TP_RANKS, {(None, 0, 0, 2)}),
    "mha-pp2": Topology("mha", ("--pp-size", "2"), BOTH_STAGES, {(0, 0, 0, 1), (0, 1, 1, 2)}),
}

REPLICATED = {
    "mha-dp2": ("mha", ("--dp-size", "2")),
    "mla-dp2-attention": ("mla", ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")),
}


def configuration(model: Path, store: Path, flags: tuple[str, ...]) -> EngineConfig:
    store.mkdir()
    cpus = sorted(os.sched_getaffinity(0))
    return EngineConfig(
        model,
        connector_storage(f"slab://{store}", capacity="256MiB", staging="64MiB"),
        page_size=PAGE,
        flags=flags,
        # SGLang wants to know where each rank runs if there are more ranks than NUMA nodes.
        environment={"SGLANG_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}"},
    )


def whole_pages(tokens: int) -> int:
    return tokens // PAGE * PAGE


@pytest.mark.parametrize("name", SPLIT)
def test_every_rank_reads_back_its_part_after_a_kill(
    name: str, model: GetModel, start_server: StartServer, tmp_path: Path
) -> None:
    """Each kind of page bytes is stored once, and after a SIGKILL every rank reads its own."""
    topology = SPLIT[name]
    store = tmp_path / "store"
    config = configuration(model(topology.kind), store, topology.flags)
    with start_server(config) as server:
        assert len(server.schedulers()) == 2
        first = server.generate(PROMPT, tokens=GENERATED)
        # The last token's KV is never computed.
        kept = whole_pages(first.prompt_tokens + GENERATED - 1)
        server.wait_stored(kept * len(topology.namespaces))

    found = stored(store)
    assert {space.part for space in found} == topology.namespaces
    assert len(found) == len(topology.namespaces)
    assert {space.pages for space in found} == {kept // PAGE}

    with start_server(config) as server:
        second = server.generate(PROMPT, tokens=GENERATED)
        becomes(
            lambda: [server.metric("prefetched_tokens_total", **rank) for rank in topology.ranks],
            [second.from_storage] * 2,
        )

    assert first.cached_tokens == 0
    assert second.from_storage == whole_pages(first.prompt_tokens - 1)
    assert (second.from_device, second.from_host) == (0, 0)
    assert second.token_ids == first.token_ids
    assert second.deviation(first) == 0.0
    assert len(set(first.token_ids)) > 4


@pytest.mark.parametrize("name", REPLICATED)
def test_a_replica_reads_what_another_stored(
    name: str, model: GetModel, start_server: StartServer, tmp_path: Path
) -> None:
    """Data-parallel replicas share one namespace: the second answers from what the first stored."""
    kind, flags = REPLICATED[name]
    store = tmp_path / "store"
    with start_server(configuration(model(kind), store, flags)) as server:
        first = server.generate(PROMPT, tokens=GENERATED, replica=0)
        kept = whole_pages(first.prompt_tokens + GENERATED - 1)
        server.wait_stored(kept)
        second = server.generate(PROMPT, tokens=GENERATED, replica=1)

    assert first.cached_tokens == 0
    assert second.from_storage == whole_pages(first.prompt_tokens - 1)
    assert (second.from_device, second.from_host) == (0, 0)
    assert second.token_ids == first.token_ids
    assert second.deviation(first) == 0.0
    # The second replica stores nothing that is there.
    assert [space.pages for space in stored(store)] == [kept // PAGE]
