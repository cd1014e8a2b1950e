"""SGLang on a GPU in a container: host memory in hugepages, pinned, registered with NIXL."""

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from engine_cpu.verdict import Verdict

import hugepages

from . import harness
from .engines import GPUEngineContainer, no_gpu
from .harness import STORE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 120
PAGE = 64
HUGEPAGES = 2048
"""Of 2 MiB: for the host pool of 1 GB, and as much again for what goes with it."""
TOLERANCE = 0.1
"""On a GPU log probabilities depend on how requests were batched."""


@pytest.fixture
def gpu_engine(request: pytest.FixtureRequest) -> Iterator[GPUEngineContainer]:
    """SGLang with a slab store in a volume, healthy; skips without a GPU."""
    if reason := no_gpu():
        pytest.skip(reason)
    # Only now: without a GPU nothing must be built or started.
    run, volume = (request.getfixturevalue(name) for name in ("run", "volume"))
    image = run.once("gpu-image", lambda: harness.image("sglang-gpu"))
    with ExitStack() as stack:
        stack.enter_context(hugepages.raised(HUGEPAGES))
        engine = GPUEngineContainer(run, image, f"slab://{STORE}")
        engine.with_env("HICACHE_NIXL_CAPACITY", "8GiB")
        engine.with_volume_mapping(volume, "/var/lib/hicache", "rw")
        yield stack.enter_context(engine)


def test_answers_from_storage(gpu_engine: GPUEngineContainer) -> None:
    """A prompt whose pages were dropped from the GPU and from host memory comes from storage."""
    client = gpu_engine.client()
    before = client.generate(PROMPT)
    client.wait_stored(before.prompt_tokens // PAGE * PAGE)
    assert client.flush().ok
    verdict = Verdict(before, client.generate(PROMPT), TOLERANCE)
    assert verdict.passed, verdict.sentence("dropping its device and host cache")


def test_host_memory_is_in_hugepages(gpu_engine: GPUEngineContainer) -> None:
    """The process that serves has at least 1 GB of hugetlb memory."""
    gpu_engine.client()
    smaps = gpu_engine.must_call("sh", "-c", "cat /proc/[0-9]*/smaps_rollup 2>/dev/null; true")
    held = sum(int(kib) for kib in re.findall(r"Private_Hugetlb: +(\d+) kB", smaps))
    assert held >= 1_000_000
