"""A SGLang server on this machine's CPU: start, ask, kill.

Owns the launch flags, the child process and its log. Needs neither SGLang nor torch in the calling
process. Must not know what the storage configuration it passes on means.

A server occupies about 1.5 GiB of memory and takes 25 to 75 seconds to start on two cores.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine_cpu import PLATFORM

Layout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
IoBackend = Literal["kernel", "direct"]

START_TIMEOUT = 240.0
LOG_TAIL_LINES = 25
_STORED = re.compile(r"^sglang:backuped_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)


class EngineError(RuntimeError):
    """The server died, was too slow or refused a request; the text ends with its log's end."""


@dataclass(frozen=True)
class EngineConfig:
    """What a server runs with.

    `storage` is the extra configuration of HiCache's dynamic storage back-end, as SGLang takes it.
    `page_size` is in tokens. `flags` are appended to SGLang's command line, and `environment` to
    the process environment.
    """

    model: Path
    storage: Mapping[str, object]
    layout: Layout = "page_first"
    io_backend: IoBackend = "kernel"
    page_size: int = 16
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """The command line of a server that listens on 127.0.0.1:`port`."""
        options: dict[str, object] = {
            "model-path": self.model,
            "host": "127.0.0.1",
            "port": port,
            "device": "cpu",
            "attention-backend": "torch_native",
            "mem-fraction-static": 0.1,
            "max-total-tokens": 2048,
            "max-running-requests": 8,
            "context-length": 1024,
            "page-size": self.page_size,
            "random-seed": 1,
            "hicache-ratio": 2,
            "hicache-mem-layout": self.layout,
            "hicache-io-backend": self.io_backend,
            "hicache-write-policy": "write_through",
            "hicache-storage-backend": "dynamic",
            "hicache-storage-prefetch-policy": "wait_complete",
            "hicache-storage-backend-extra-config": json.dumps(
                {"prefetch_threshold": self.page_size, **self.storage}
            ),
        }
        command = [sys.executable, "-m", "sglang.launch_server"]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        switches = (
            "--enable-hierarchical-cache",
            "--enable-cache-report",
            "--enable-metrics",
            "--skip-server-warmup",
        )
        return [*command, *switches, *self.flags]


@dataclass(frozen=True)
class Completion:
    """One answer: the generated token ids with their log probabilities, and the tokens of the
    prompt that came out of each tier instead of being computed."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    from_device: int
    from_host: int
    from_storage: int
    seconds: float

    def deviation(self, other: "Completion") -> float:
        """The largest difference of two log probabilities at the same place."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(mine - theirs) for mine, theirs in pairs)


def connector_storage(store: str, **settings: object) -> dict[str, object]:
    """The extra configuration that makes SGLang load this project's connector on `store`."""
    return {
        "backend_name": "hicache_nixl",
        "module_path": "hicache_nixl",
        "class_name": "HiCacheNixlConnector",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "store": store,
        **settings,
    }


def free_port() -> int:
    """A TCP port nobody listens on at the moment of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class EngineServer:
    """One server process. Use `running`, or pair `start` with `kill`."""

    def __init__(self, config: EngineConfig, log: Path) -> None:
        """`log` receives everything the server prints; it is overwritten by `start`."""
        self.config = config
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def start(
        self,
        timeout: float = START_TIMEOUT,
        on_wait: Callable[[float], None] = lambda _seconds: None,
    ) -> float:
        """Start the server and block until it answers; returns the seconds that took.

        `on_wait` is called about twice a second with the seconds waited so far. Raises EngineError
        when the process ends or `timeout` seconds pass; no process is left then.
        """
        if self._process is not None:
            raise EngineError(f"the server of {self.config.model} is already started")
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self.config.command(port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                # A group of its own, so that kill reaches the scheduler and detokenizer too.
                start_new_session=True,
            )
        try:
            while not self._healthy():
                elapsed = time.monotonic() - begin
                status = self._process.poll()
                if status is not None:
                    raise self._failure(f"SGLang ended with status {status} while starting")
                if elapsed > timeout:
                    raise self._failure(f"SGLang did not answer within {timeout:.0f} s")
                on_wait(elapsed)
                time.sleep(0.5)
        except BaseException:
            self.kill()
            raise
        return time.monotonic() - begin

    def kill(self) -> None:
        """SIGKILL every process of the server and wait for them; harmless when none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _wait_for_group(process.pid)

    def generate(self, prompt: str, tokens: int = 12, timeout: float = 120.0) -> Completion:
        """Ask for `tokens` greedy tokens after `prompt`; blocks until they are there."""
        begin = time.monotonic()
        body = {
            "text": prompt,
            "return_logprob": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        meta: dict[str, Any] = json.loads(self._request("/generate", body, timeout))["meta_info"]
        tiers: dict[str, Any] = meta.get("cached_tokens_details") or {}
        generated = meta["output_token_logprobs"]
        return Completion(
            token_ids=tuple(int(entry[1]) for entry in generated),
            logprobs=tuple(float(entry[0]) for entry in generated),
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta["cached_tokens"]),
            from_device=int(tiers.get("device", 0)),
            from_host=int(tiers.get("host", 0)),
            from_storage=int(tiers.get("storage", 0)),
            seconds=time.monotonic() - begin,
        )

    def stored_tokens(self) -> int:
        """Tokens this server has written to storage since it started, by SGLang's own count."""
        values = _STORED.findall(self._request("/metrics", None, 30.0))
        return int(sum(float(value) for value in values))

    def wait_stored(self, tokens: int, timeout: float = 60.0) -> int:
        """Block until `stored_tokens` reaches `tokens`; returns the count."""
        deadline = time.monotonic() + timeout
        while (stored := self.stored_tokens()) < tokens:
            if time.monotonic() > deadline:
                raise self._failure(f"{stored} of {tokens} tokens stored after {timeout:.0f} s")
            time.sleep(0.2)
        return stored

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the log."""
        if not self.log.exists():
            return ""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SGLANG_PLATFORM": PLATFORM,
            # torch's spinning worker threads would starve the storage threads of two cores.
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **self.config.environment,
        }

    def _healthy(self) -> bool:
        try:
            self._get("/health", None, 5.0)
        except OSError:
            return False
        return True

    def _get(self, path: str, body: object | None, timeout: float) -> str:
        request = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text: str = response.read().decode()
        return text

    def _request(self, path: str, body: object | None, timeout: float) -> str:
        try:
            return self._get(path, body, timeout)
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.read().decode(errors='replace')[:300]}"
        except OSError as error:
            reason = str(error)
        raise self._failure(f"SGLang did not serve {path}: {reason}")

    def _failure(self, what: str) -> EngineError:
        return EngineError(f"{what}; the end of {self.log}:\n{self.log_tail()}")


def _wait_for_group(group: int, timeout: float = 30.0) -> None:
    """Block until no process of a killed group is left, so that its files are closed."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)


@contextlib.contextmanager
def running(
    config: EngineConfig,
    log: Path,
    on_wait: Callable[[float], None] = lambda _seconds: None,
) -> Iterator[EngineServer]:
    """A started server that is killed with SIGKILL at the end of the block."""
    server = EngineServer(config, log)
    server.start(on_wait=on_wait)
    try:
        yield server
    finally:
        server.kill()
