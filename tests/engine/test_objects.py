"""The real SGLang server keeps its KV cache in a bucket, whose server may come and go."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_cpu.replies import Completion
from engine_cpu.server import EngineConfig, EngineServer, connector_storage

from s3_access import ADMIN, REGION
from s3_server import S3Address, S3Server

from .conftest import StartServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
PROMPTS = [f"{word} {PROMPT}" for word in ("one", "two", "three", "four")]
PAGE = 16
DEADLINE_S = 2.0
RECOVERY_S = 30.0
ANSWER_S = 60.0
"""Far more than an answer takes here without a cache, and less than a hang."""

GetModel = Callable[..., Path]


def configuration(model: Path, server: S3Address, bucket: str) -> EngineConfig:
    """A server that takes its keys from the environment."""
    url = f"s3://{bucket}/kv?endpoint={server.endpoint}&region={REGION}&addressing=path"
    keys = {"AWS_ACCESS_KEY_ID": ADMIN.access_key, "AWS_SECRET_ACCESS_KEY": ADMIN.secret_key}
    storage = connector_storage(url, staging="64MiB", deadline=DEADLINE_S)
    return EngineConfig(model, storage, page_size=PAGE, environment=keys)


def readable_tokens(answer: Completion) -> int:
    """Tokens of the prompt that a later request can be spared: all but the last, in pages."""
    return (answer.prompt_tokens - 1) // PAGE * PAGE


def log_of(server: EngineServer) -> str:
    return server.log.read_text(encoding="utf-8", errors="replace")


def test_restarted_server_answers_from_the_bucket(
    model: GetModel, start_server: StartServer, s3: S3Address, make_bucket: Callable[[], str]
) -> None:
    """A killed server's successor reads the prompt's whole pages from the bucket, answers alike."""
    bucket = make_bucket()
    config = configuration(model("mha"), s3, bucket)
    with start_server(config) as server:
        first = server.generate(PROMPT)
        server.wait_stored(first.prompt_tokens // PAGE * PAGE)
    with start_server(config) as server:
        second = server.generate(PROMPT)
        log = log_of(server)

    assert first.cached_tokens == 0
    assert second.from_storage == readable_tokens(first)
    assert (second.from_device, second.from_host) == (0, 0)
    assert second.token_ids == first.token_ids
    assert second.deviation(first) == 0.0
    assert len(set(first.token_ids)) > 4
    # One object a page, K and V together.
    assert (
        len([key for key in s3.keys(bucket, "kv/") if "/pages/" in key])
        >= second.from_storage // PAGE
    )
    assert ADMIN.secret_key not in log


def test_the_s3_server_is_killed_under_load(
    model: GetModel, start_server: StartServer, own_s3: S3Server
) -> None:
    """Every answer is the same while the S3 server is killed and away, and then there are hits."""
    bucket = own_s3.make_bucket()
    with start_server(configuration(model("mha"), own_s3, bucket)) as server:
        references = [server.generate(prompt) for prompt in PROMPTS]
        server.wait_stored(sum(answer.prompt_tokens // PAGE * PAGE for answer in references))
        answers: list[list[Completion]] = []

        def ask_all() -> list[Completion]:
            assert server.flush().ok
            with ThreadPoolExecutor(len(PROMPTS)) as clients:
                answers.append(
                    list(clients.map(lambda text: server.generate(text, timeout=ANSWER_S), PROMPTS))
                )
            return answers[-1]

        readable = [readable_tokens(answer) for answer in references]
        assert [answer.from_storage for answer in ask_all()] == readable

        killer = threading.Timer(0.3, own_s3.kill)
        killer.start()
        end = time.monotonic() + 8
        while time.monotonic() < end:
            ask_all()
        killer.join()
        last = ask_all()
        assert [answer.from_storage for answer in last] == [0] * len(PROMPTS)

        own_s3.restart()
        end = time.monotonic() + RECOVERY_S
        while [answer.from_storage for answer in ask_all()] != readable:
            assert time.monotonic() < end, "no hits within 30 s of the S3 server's return"
        stored = server.stored_tokens()
        while server.stored_tokens() == stored:  # writing may come back after reading
            assert time.monotonic() < end, "nothing is stored within 30 s of the S3 server's return"
            server.generate(f"later {time.monotonic()} {PROMPT}")
            time.sleep(0.5)

    for round_ in answers:
        for answer, reference in zip(round_, references, strict=True):
            assert answer.token_ids == reference.token_ids
