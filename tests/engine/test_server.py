"""The real SGLang server keeps its KV cache in the connector's store through a SIGKILL."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_cpu.models import Kind
from engine_cpu.server import EngineConfig, IoBackend, Layout, connector_storage

from .conftest import StartServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
PAGE = 16

GetModel = Callable[..., Path]


def configuration(
    model: Path, store: Path, layout: Layout = "page_first", io_backend: IoBackend = "kernel"
) -> EngineConfig:
    store.mkdir(exist_ok=True)
    storage = connector_storage(f"slab://{store}", capacity="256MiB")
    return EngineConfig(model, storage, layout=layout, io_backend=io_backend, page_size=PAGE)


@pytest.mark.parametrize(
    ("kind", "layout", "io_backend"),
    [
        pytest.param("mha", "page_first", "kernel", id="mha-page_first"),
        pytest.param("mha", "page_first_direct", "direct", id="mha-page_first_direct"),
        pytest.param("mha", "layer_first", "kernel", id="mha-layer_first"),
        pytest.param("mla", "page_first", "kernel", id="mla-page_first"),
    ],
)
def test_restarted_server_answers_from_storage(
    kind: Kind,
    layout: Layout,
    io_backend: IoBackend,
    model: GetModel,
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    """A killed server's successor reads the prompt's whole pages from storage and answers alike."""
    config = configuration(model(kind), tmp_path / "store", layout, io_backend)
    with start_server(config) as server:
        first = server.generate(PROMPT)
        # What was generated is cached, too, but only the prompt is asked for again.
        server.wait_stored(first.prompt_tokens // PAGE * PAGE)
    with start_server(config) as server:
        second = server.generate(PROMPT)

    assert first.cached_tokens == 0
    # SGLang computes at least the last token of a prompt.
    assert second.from_storage == (first.prompt_tokens - 1) // PAGE * PAGE
    assert (second.from_device, second.from_host) == (0, 0)
    assert second.token_ids == first.token_ids
    assert second.deviation(first) == 0.0
    # Weights that ignore the cache would pass everything above.
    assert len(set(first.token_ids)) > 4


def test_other_weights_are_another_cache(
    model: GetModel, start_server: StartServer, tmp_path: Path
) -> None:
    """A model under another name finds none of the pages an equally shaped model left."""
    store = tmp_path / "store"
    with start_server(configuration(model("mha", 7), store)) as server:
        first = server.generate(PROMPT)
        server.wait_stored(first.prompt_tokens // PAGE * PAGE)
    with start_server(configuration(model("mha", 8), store)) as server:
        other = server.generate(PROMPT)

    assert other.cached_tokens == 0
    assert other.token_ids != first.token_ids
