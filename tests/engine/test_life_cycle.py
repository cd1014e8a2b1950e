"""Storage that comes, goes, is cleared and fails while the real SGLang server serves."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_cpu.replies import Completion
from engine_cpu.server import EngineConfig, EngineServer, connector_storage

from .conftest import StartServer
from .stored import Resources, becomes, damaged_pages, stored

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
PAGE = 16
GENERATED = 12
STAGING = 64 << 20

GetModel = Callable[..., Path]


def storage(store: Path, /, **settings: object) -> dict[str, object]:
    defaults = {"capacity": "256MiB", "staging": STAGING}
    return connector_storage(f"slab://{store}") | defaults | settings


def kept_tokens(answer: Completion) -> int:
    """Tokens of prompt and answer that make whole pages; the last token's KV is never computed."""
    return (answer.prompt_tokens + len(answer.token_ids) - 1) // PAGE * PAGE


def readable_tokens(answer: Completion) -> int:
    """Tokens of the prompt that a later request can be spared: all but the last, in pages."""
    return (answer.prompt_tokens - 1) // PAGE * PAGE


def ask_anew(server: EngineServer, prompt: str = PROMPT) -> Completion:
    """The answer when nothing is cached on the device or in host memory."""
    assert server.flush().ok
    answer = server.generate(prompt, tokens=GENERATED)
    assert (answer.from_device, answer.from_host) == (0, 0)
    return answer


def same(answer: Completion, reference: Completion) -> bool:
    return answer.token_ids == reference.token_ids and answer.deviation(reference) == 0.0


def held(server: EngineServer) -> Resources:
    (scheduler,) = server.schedulers()
    return Resources.of(scheduler)


def kinds_and_threads(server: EngineServer) -> tuple[tuple[str, ...], int]:
    """Of what the scheduler holds; requests that have just ended may hold more for a moment."""
    now = held(server)
    return now.kinds(), now.threads


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"use_urnig": "true"}, "use_uring"),
    "no such directory": ({"store": "slab:///nowhere/at/all/store"}, "/nowhere/at/all"),
    "plug-in that does not load": ({"plugin": "gds"}, "plugin=auto"),
    "no such memory": ({"hugepages": "required", "staging": "1TiB"}, "hugepages"),
    "staging without room": ({"staging": "8KiB"}, "minimum of 1MiB"),
}


def test_storage_is_attached_and_detached_at_run_time(
    model: GetModel, start_server: StartServer, tmp_path: Path
) -> None:
    """Attaching brings hits, detaching releases all, and what is refused changes nothing."""
    store = tmp_path / "store"
    with start_server(EngineConfig(model("mha"), None, page_size=PAGE)) as server:
        reference = server.generate(PROMPT, tokens=GENERATED)
        before = held(server)
        expected = before.kinds(), before.threads

        for name, (settings, hint) in REFUSED.items():
            reply = server.attach(storage(store, **settings))
            assert not reply.ok, name
            assert hint in reply.text, name
            assert same(server.generate(PROMPT, tokens=GENERATED), reference), name
        becomes(lambda: kinds_and_threads(server), expected)
        refused = held(server)
        assert refused.resident_bytes - before.resident_bytes < STAGING

        assert server.attach(storage(store)).ok
        computed = ask_anew(server)
        assert computed.from_storage == 0
        server.wait_stored(kept_tokens(computed))
        attached = held(server)
        assert attached.under(store)

        # SGLang takes this for a change of policies and asks no back-end for anything.
        again = server.attach(storage(store, capacity="128MiB"))
        assert again.ok
        assert "already enabled" in again.text
        becomes(lambda: held(server).kinds(), attached.kinds())

        read = ask_anew(server)
        assert read.from_storage == readable_tokens(reference)
        assert same(read, reference)

        assert server.detach().ok
        assert held(server).under(store) == []
        becomes(lambda: kinds_and_threads(server), expected)
        detached = held(server)
        assert not any((store / "writers").iterdir())
        without = ask_anew(server)
        assert without.from_storage == 0
        assert same(without, reference)

        for _ in range(2):
            assert server.attach(storage(store)).ok
            read = ask_anew(server)
            assert read.from_storage == readable_tokens(reference)
            assert same(read, reference)
            assert server.detach().ok
        becomes(lambda: kinds_and_threads(server), expected)
        last = held(server)
        assert last.resident_bytes - detached.resident_bytes < STAGING


def test_storage_outlives_a_flush_and_is_cleared_for_one_model_only(
    model: GetModel, start_server: StartServer, tmp_path: Path
) -> None:
    """flush_cache leaves storage alone; clearing it takes one model's pages and no other's."""
    store = tmp_path / "store"
    first, second = storage(store, model_revision="1"), storage(store, model_revision="2")
    with start_server(EngineConfig(model("mha"), first, page_size=PAGE)) as server:
        reference = server.generate(PROMPT, tokens=GENERATED)
        pages = kept_tokens(reference) // PAGE
        server.wait_stored(pages * PAGE)
        check_metrics(server, "backup", "backuped_tokens_total", pages)
        read = ask_anew(server)
        assert read.from_storage == readable_tokens(reference)
        assert same(read, reference)
        check_metrics(server, "prefetch", "prefetched_tokens_total", read.from_storage // PAGE)

        # The same server with another revision of the model is another model to the store.
        assert server.detach().ok
        stored_before = server.stored_tokens()
        assert server.attach(second).ok
        assert ask_anew(server).from_storage == 0
        server.wait_stored(stored_before + pages * PAGE)
        assert pages_by_revision(store) == {"1": pages, "2": pages}

        assert server.clear_storage().ok
        assert pages_by_revision(store) == {"1": pages, "2": 0}
        assert ask_anew(server).from_storage == 0
        assert server.detach().ok
        assert server.attach(first).ok
        assert ask_anew(server).from_storage == readable_tokens(reference)

        server.terminate()

    assert not any((store / "writers").iterdir())
    assert [path.name for path in store.iterdir() if path.name.startswith(".")] == []
    assert damaged_pages(store) == 0
    with start_server(EngineConfig(model("mha"), first, page_size=PAGE)) as server:
        read = server.generate(PROMPT, tokens=GENERATED)
        log = server.log.read_text(encoding="utf-8", errors="replace")
    assert read.from_storage == readable_tokens(reference)
    assert same(read, reference)
    assert "left behind" not in log


def pages_by_revision(store: Path) -> dict[str, int]:
    return {space.manifest["model_revision"]: space.pages for space in stored(store)}


def check_metrics(server: EngineServer, direction: str, tokens_metric: str, pages: int) -> None:
    """SGLang's own storage metrics count these pages, at a rate that a disk can have."""
    becomes(lambda: server.metric(f"{direction}_pgs_sum"), pages, 60)
    becomes(lambda: server.metric(tokens_metric), pages * PAGE)
    counts = f"{direction}_pgs_count", f"{direction}_bandwidth_count"
    becomes(lambda: len({server.metric(name) for name in counts}), 1)
    calls = server.metric(counts[0])
    assert 1 <= calls <= pages
    assert 0 < server.metric(f"{direction}_bandwidth_sum") / calls < 100  # GB/s


ROUNDS = 4
PROMPTS = [f"{word} {PROMPT}" for word in ("one", "two", "three", "four", "five", "six")]
FAULTS = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.2",
}


def test_faults_of_storage_change_no_answer(
    model: GetModel, start_server: StartServer, tmp_path: Path
) -> None:
    """With SGLang's random storage failures and delays, concurrent requests end, all the same."""
    config = EngineConfig(model("mha"), None, page_size=PAGE, environment=FAULTS)
    with start_server(config) as server:
        references = [server.generate(prompt, tokens=GENERATED) for prompt in PROMPTS]
        assert server.attach(storage(tmp_path / "store")).ok
        # The first round finds nothing; in the others some reads fail and some do not.
        readable = sum(readable_tokens(reference) for reference in references)
        answers: list[Completion] = []
        rounds = from_storage = 0
        while rounds < ROUNDS or not 0 < from_storage < readable * (rounds - 1):
            assert rounds < 5 * ROUNDS, f"{from_storage} of {readable * (rounds - 1)} were read"
            assert server.flush().ok
            with ThreadPoolExecutor(len(PROMPTS)) as clients:
                answers += clients.map(server.generate, PROMPTS)
            from_storage = sum(answer.from_storage for answer in answers)
            rounds += 1
        log = server.log.read_text(encoding="utf-8", errors="replace")

    assert "test injector enabled" in log
    for answer, reference in zip(answers, references * rounds, strict=True):
        assert answer.token_ids == reference.token_ids
