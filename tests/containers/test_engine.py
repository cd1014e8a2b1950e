"""SGLang in a container keeps its KV cache through `docker kill`, and shares it with another."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from engine_cpu.verdict import Verdict

from .conftest import StartEngine
from .engines import EngineContainer
from .harness import STORE
from .runs import Run
from .s3_servers import S3Place, store_url

pytestmark = pytest.mark.docker

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
PAGE = 16


@pytest.fixture
def slab_engine(start_engine: StartEngine, volume: str) -> Callable[[], EngineContainer]:
    """Start engines on one slab store in a volume."""
    return lambda: start_engine(f"slab://{STORE}", volume=volume)


@pytest.fixture
def s3_engine(
    start_engine: StartEngine, s3: S3Place, bucket: str, request: pytest.FixtureRequest
) -> Callable[[], EngineContainer]:
    """Start engines on one prefix of a bucket."""
    store = store_url(bucket, request.node.name.partition("[")[0])
    return lambda: start_engine(store, network=s3.network)


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


def test_two_engines_share_a_bucket(s3_engine: Callable[[], EngineContainer]) -> None:
    """What one engine stored in a bucket, another container's engine answers from."""
    first, second = s3_engine(), s3_engine()
    client = first.client()
    before = client.generate(PROMPT)
    client.wait_stored(before.prompt_tokens // PAGE * PAGE)
    verdict = Verdict(before, second.client().generate(PROMPT))
    assert verdict.passed, verdict.sentence("another engine's prompt")


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"MODEL": "nope"}, "/opt/models/nope — set it to mha, mla"),
        ({"HICACHE_NIXL_CAPACITY": "lots"}, "HICACHE_NIXL_CAPACITY: 'lots'"),
        ({}, "user 10001 cannot write /var/lib/hicache"),
    ],
    ids=["model", "settings", "owner"],
)
def test_what_cannot_start_ends_with_a_line(
    run: Run, engine_image: str, held: ExitStack, environment: dict[str, str], word: str
) -> None:
    """An engine that nothing can become of ends with status 2 and one line that says why."""
    engine = EngineContainer(run, engine_image, f"slab://{STORE}").with_envs(**environment)
    if not environment:
        engine.with_tmpfs_mount("/var/lib/hicache", "mode=755")
    assert held.enter_context(engine).wait_end(60.0) == 2
    (line,) = engine.lines()
    assert word in line
