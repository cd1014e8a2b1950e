"""SGLang in a container keeps its KV cache through `docker kill`, and shares it with another."""

from collections.abc import Callable, Iterator

import pytest
from engine_cpu.verdict import Verdict

from .harness import (
    SERVER,
    STORE,
    EngineContainer,
    ObjectStoreContainer,
    credentials_file,
    labelled_network,
)
from .runs import Run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
PAGE = 16
BUCKET = "engines"
CREDENTIALS = "/secrets/s3"

StartEngine = Callable[[], EngineContainer]


@pytest.fixture
def slab_engine(run: Run, engine_image: str, volume: str) -> Iterator[StartEngine]:
    """Start engines on one slab store in a volume; they end with the test."""
    started: list[EngineContainer] = []

    def start() -> EngineContainer:
        engine = EngineContainer(run, engine_image, f"slab://{STORE}")
        engine.with_volume_mapping(volume, "/var/lib/hicache", "rw")
        started.append(engine)
        engine.start()
        return engine

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture
def s3_engine(run: Run, engine_image: str, objectstore_image: str) -> Iterator[StartEngine]:
    """Start engines on one bucket of an S3 server of their own; all of them end with the test."""
    started: list[EngineContainer] = []
    with labelled_network(run) as network:
        server = ObjectStoreContainer(run, objectstore_image, [BUCKET])
        server.with_network(network).with_network_aliases(SERVER)

        def start() -> EngineContainer:
            url = f"s3://{BUCKET}/pages?endpoint=http://{SERVER}:{server.PORT}"
            engine = EngineContainer(run, engine_image, url).with_network(network)
            engine.with_env("HICACHE_NIXL_CREDENTIALS_FILE", CREDENTIALS)
            engine.with_copy_into_container(credentials_file(*server.OWNER), CREDENTIALS)
            started.append(engine)
            engine.start()
            return engine

        with server:
            server.wait_healthy(120.0)
            yield start
            for engine in started:
                engine.stop()


@pytest.mark.parametrize("store", ["slab", "s3"])
def test_killed_container_answers_from_storage(store: str, request: pytest.FixtureRequest) -> None:
    """After `docker kill` and `docker start` the same prompt comes from storage, with the same
    tokens and log probabilities."""
    engine: EngineContainer = request.getfixturevalue(f"{store}_engine")()
    client = engine.client()
    before = client.generate(PROMPT)
    client.wait_stored(before.prompt_tokens // PAGE * PAGE)
    engine.kill()
    engine.get_wrapped_container().start()
    verdict = Verdict(before, engine.client().generate(PROMPT))
    assert verdict.passed, verdict.sentence("docker kill")
    assert verdict.after.from_storage == (before.prompt_tokens - 1) // PAGE * PAGE


def test_two_engines_share_a_bucket(s3_engine: StartEngine) -> None:
    """What one engine stored in a bucket, another container's engine answers from."""
    first, second = s3_engine(), s3_engine()
    client = first.client()
    before = client.generate(PROMPT)
    client.wait_stored(before.prompt_tokens // PAGE * PAGE)
    verdict = Verdict(before, second.client().generate(PROMPT))
    assert verdict.passed, verdict.sentence("another engine's prompt")
