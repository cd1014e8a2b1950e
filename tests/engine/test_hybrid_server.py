"""The real SGLang server keeps the pools of a hybrid model in the connector's store."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_cpu.models import Kind
from engine_cpu.server import EngineConfig, IoBackend, Layout, connector_storage

from .conftest import StartServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
PAGE = 16


@pytest.mark.parametrize(
    ("kind", "layout", "io_backend", "pools"),
    [
        pytest.param("swa", "layer_first", "kernel", ("kv", "swa"), id="swa-layer_first"),
        pytest.param("mamba", "page_first_direct", "direct", ("kv", "mamba"), id="mamba"),
    ],
)
def test_restarted_hybrid_server_answers_from_storage(
    kind: Kind,
    layout: Layout,
    io_backend: IoBackend,
    pools: tuple[str, ...],
    model: Callable[..., Path],
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    """A killed server's successor reads the prompt's pages and its window or state from storage,
    and answers alike."""
    store = tmp_path / "store"
    store.mkdir()
    storage = connector_storage(f"slab://{store}", capacity="256MiB")
    config = EngineConfig(
        model(kind), storage, layout=layout, io_backend=io_backend, page_size=PAGE
    )
    with start_server(config) as server:
        first = server.generate(PROMPT)
        pages = (first.prompt_tokens - 1) // PAGE * PAGE
        server.wait_stored(pages)
        registered = server.log.read_text(encoding="utf-8")
    with start_server(config) as server:
        second = server.generate(PROMPT)

    for pool in pools:
        assert f"\n  {pool}: {layout}, " in registered
    assert first.cached_tokens == 0
    # Without its window or state, no page of a prompt is taken.
    assert second.from_storage == pages
    assert (second.from_device, second.from_host) == (0, 0)
    assert second.token_ids == first.token_ids
    assert second.deviation(first) == 0.0
    # Weights that ignore the cache would pass everything above.
    assert len(set(first.token_ids)) > 4
