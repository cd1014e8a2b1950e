"""The script of helm test, against a server that behaves as SGLang does, or does not."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from .charts import CHART, environment, notes, render

SCRIPT = CHART / "files" / "prompt-twice.py"
TOKENS = 100
PAGE = 16
KEY = "an-api-key"


class Fake(ThreadingHTTPServer):
    """What a server keeps: prompts in memory and in storage, and what it was asked."""

    daemon_threads = True

    def __init__(self, *, stores: bool = True, reads: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.stores, self.reads = stores, reads
        self.memory: set[str] = set()
        self.storage: set[str] = set()
        self.asked: list[str] = []
        self.clients: set[tuple[str, int]] = set()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Fake

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def reply(self, text: str, status: int = 200) -> None:
        """Send it."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        """The health and the metrics."""
        self.note()
        stored = len(self.server.storage) * TOKENS // PAGE * PAGE
        metric = f'sglang:backuped_tokens_total{{tp_rank="0"}} {stored}.0\n'
        self.reply(metric if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        """A prompt, or the flush."""
        self.note()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            self.reply("no key", 401)
        elif self.path.startswith("/flush_cache"):
            self.server.memory.clear()
            self.reply("Cache flushed.")
        else:
            self.reply(json.dumps({"meta_info": self.answer(json.loads(content)["text"])}))

    def answer(self, prompt: str) -> dict[str, object]:
        """What SGLang says of a prompt."""
        server = self.server
        device = TOKENS if prompt in server.memory else 0
        storage = 96 if not device and server.reads and prompt in server.storage else 0
        server.memory.add(prompt)
        if server.stores:
            server.storage.add(prompt)
        details = {"device": device, "host": 0, "storage": storage}
        return {"prompt_tokens": TOKENS, "cached_tokens_details": details}

    def note(self) -> None:
        """Who asked for what."""
        self.server.asked.append(self.path)
        self.server.clients.add(self.client_address)


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Fake]:
    """A server that behaves as the parameter says."""
    with Fake(**getattr(request, "param", {})) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(port: int, **variables: str) -> tuple[int, str]:
    """Status and output of the script."""
    environ = {**os.environ, "TIMEOUT": "2", "PAGE_SIZE": str(PAGE), "KEY": KEY, **variables}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "127.0.0.1", str(port)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_passes(serve: Fake) -> None:
    """Both prompts and the flush take one connection, and the second comes from storage."""
    status, output = run(serve.server_port)
    assert (status, output.splitlines()[-1]) == (0, "PASS: 96 tokens came from storage")
    posts = [path for path in serve.asked if path not in ("/health", "/metrics")]
    assert posts == ["/generate", "/flush_cache?timeout=30", "/generate"]
    assert len(serve.clients) == 1


@pytest.mark.parametrize(
    ("serve", "variables", "line"),
    [
        ({"reads": False}, {}, "FAIL: nothing came from storage"),
        ({"stores": False}, {}, "FAIL: 0 tokens are stored after 2 s"),
        ({}, {"KEY": ""}, "FAIL: POST /generate: 401 no key"),
    ],
    indirect=["serve"],
)
def test_fails(serve: Fake, variables: dict[str, str], line: str) -> None:
    """A server that does not store, does not read or refuses fails the test with one line."""
    status, output = run(serve.server_port, **variables)
    assert status == 1
    assert output.splitlines()[-1] == line


def test_nobody_answers() -> None:
    """A server that is not there is a failure after the time that it has."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        status, output = run(held.getsockname()[1], TIMEOUT="0.1")
    assert status == 1
    assert output.startswith("FAIL: no answer within 0 s")


@pytest.mark.helm
def test_the_pod_runs_it() -> None:
    """The pod of helm test gets the script, the Service and what to wait for."""
    manifests = render("cpu")
    pod = manifests.one("Pod", "-test")
    (container,) = pod["spec"]["containers"]
    # Helm 3 reads the log of a pod after it has deleted one that succeeded.
    assert pod["metadata"]["annotations"] == {
        "helm.sh/hook": "test",
        "helm.sh/hook-delete-policy": "before-hook-creation",
    }
    assert "annotations" not in manifests.one("ConfigMap", "-test")["metadata"]
    assert manifests.one("ConfigMap", "-test")["data"] == {SCRIPT.name: SCRIPT.read_text()}
    assert container["command"] == ["python3", f"/scripts/{SCRIPT.name}"]
    service = manifests.one("Service")
    assert container["args"] == [
        service["metadata"]["name"],
        str(service["spec"]["ports"][0]["port"]),
    ]
    assert environment(container) == {
        "TIMEOUT": "300",
        "REPEAT": "12",
        "PAGE_SIZE": "16",
        "KEY": {"secretKeyRef": {"name": "administrator", "key": "key"}},
    }


@pytest.mark.helm
def test_helm_waits_as_long_as_the_pod() -> None:
    """The command in the notes lets the test wait twice, for the server and for pages."""
    (seconds,) = re.findall(r"helm test .* --timeout (\d+)s", notes("cpu"))
    environ = environment(render("cpu").one("Pod", "-test")["spec"]["containers"][0])
    assert int(seconds) > 2 * int(environ["TIMEOUT"])


@pytest.mark.helm
def test_no_test_without_a_server() -> None:
    """A release for the nodes alone has no test."""
    assert not render("slab-ephemeral", {"server.replicas": 0}).of("Pod")
    assert render("everything", {"server.replicas": 0}).of("Pod")


@pytest.mark.helm
@pytest.mark.parametrize(
    "values", [{"hicache.writePolicy": "write_back"}, {"metrics.enabled": False}], ids=str
)
def test_no_test_where_it_could_not_pass(values: dict[str, object]) -> None:
    """Where pages are not stored at once, or nobody says so, there is no test, and the notes say
    why."""
    assert not render(None, values).of("Pod")
    assert "There is no test" in notes(None, values)


def test_the_script_needs_the_standard_library_alone() -> None:
    """It runs without the packages of this project."""
    ran = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), "127.0.0.1", "1"],
        env={"TIMEOUT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(SCRIPT.anchor),
    )
    assert (ran.returncode, ran.stderr) == (1, "")
