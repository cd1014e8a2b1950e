"""SGLang in a container keeps its KV cache through `docker kill`."""

from collections.abc import Callable, Iterator

import pytest
from engine_cpu.verdict import Verdict

from .harness import STORE, EngineContainer
from .runs import Run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
PAGE = 16

StartEngine = Callable[[str], EngineContainer]


@pytest.fixture
def start_engine(run: Run, engine_image: str, volume: str) -> Iterator[StartEngine]:
    """Start an engine on a store; `volume` is where a slab store lies. They end with the test."""
    started: list[EngineContainer] = []

    def start(store: str) -> EngineContainer:
        container = EngineContainer(run, engine_image, store)
        container.with_volume_mapping(volume, "/var/lib/hicache", "rw")
        started.append(container)
        container.start()
        return container

    yield start
    for container in started:
        container.stop()


def test_killed_container_answers_from_its_volume(start_engine: StartEngine) -> None:
    """After `docker kill` and `docker start` the same prompt comes from the slab store, with the
    same tokens and log probabilities."""
    engine = start_engine(f"slab://{STORE}")
    client = engine.client()
    before = client.generate(PROMPT)
    client.wait_stored(before.prompt_tokens // PAGE * PAGE)
    engine.kill()
    engine.get_wrapped_container().start()
    verdict = Verdict(before, engine.client().generate(PROMPT))
    assert verdict.passed, verdict.sentence("docker kill")
    assert verdict.after.from_storage == (before.prompt_tokens - 1) // PAGE * PAGE
