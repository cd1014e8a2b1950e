"""A SGLang server on this machine's CPU: start, ask, administer, stop.

Owns the launch flags, the child processes and their log. Needs neither SGLang nor torch in the
calling process. Must not know what the storage configuration it passes on means.

A server occupies about 1.5 GiB of memory and takes 25 to 75 seconds to start on two cores.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine_cpu import PLATFORM
from engine_cpu.client import ADMIN_KEY, EngineClient, EngineError
from engine_cpu.replies import Reply

Layout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
IoBackend = Literal["kernel", "direct"]

START_TIMEOUT = 240.0
STOP_TIMEOUT = 60.0
LOG_TAIL_LINES = 25


@dataclass(frozen=True)
class EngineConfig:
    """What a server runs with.

    `storage` is the extra configuration of HiCache's dynamic storage back-end, as SGLang takes it,
    or None for a server that starts without one; `EngineServer.attach` adds it later. `page_size`
    is in tokens. `flags` are appended to SGLang's command line, and `environment` to the process
    environment.
    """

    model: Path
    storage: Mapping[str, object] | None
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
            "max-mamba-cache-size": 64,
            "context-length": 1024,
            "page-size": self.page_size,
            "random-seed": 1,
            "hicache-ratio": 2,
            "hicache-mem-layout": self.layout,
            "hicache-io-backend": self.io_backend,
            "hicache-write-policy": "write_through",
            "hicache-storage-prefetch-policy": "wait_complete",
            # SGLang attaches and detaches storage only for somebody who has this key.
            "admin-api-key": ADMIN_KEY,
        }
        if self.storage is not None:
            options["hicache-storage-backend"] = "dynamic"
            options["hicache-storage-backend-extra-config"] = self.extra_config(self.storage)
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

    def process_environment(self) -> dict[str, str]:
        """This process's environment with what a server needs, then `environment`."""
        return {
            **os.environ,
            "SGLANG_PLATFORM": PLATFORM,
            # torch's spinning worker threads would starve the storage threads of two cores.
            "OMP_NUM_THREADS": "1",
            # The kernels of Mamba layers; see `engine_cpu.interpreter`.
            "TRITON_INTERPRET": "1",
            "SGLANG_MAMBA_CONV_DTYPE": "float16",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }

    def extra_config(self, storage: Mapping[str, object]) -> str:
        """`storage` as SGLang takes it, with prefetching from one page on."""
        return json.dumps({"prefetch_threshold": self.page_size, **storage})


def connector_storage(store: str | None = None, **settings: object) -> dict[str, object]:
    """The extra configuration that makes SGLang load this project's connector on `store`.

    Without one the connector takes it from its other sources, the environment or a file.
    """
    return {
        "backend_name": "hicache_nixl",
        "module_path": "hicache_nixl",
        "class_name": "HiCacheNixlConnector",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        **({} if store is None else {"store": store}),
        **settings,
    }


def free_port() -> int:
    """A TCP port nobody listens on at the moment of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class EngineServer(EngineClient):
    """One server process, and a client of it. Use `running`, or pair `start` with `kill`."""

    def __init__(self, config: EngineConfig, log: Path) -> None:
        """`log` receives everything the server prints; it is overwritten by `start`."""
        super().__init__(url="")
        self.config = config
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

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
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                # Whoever started it may be killed, and then nobody would end it.
                ["setpriv", "--pdeathsig", "KILL", *self.config.command(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.config.process_environment(),
                # A group of its own, so that kill reaches the scheduler and detokenizer too.
                start_new_session=True,
            )
        try:
            while not self.healthy():
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

    def terminate(self, timeout: float = STOP_TIMEOUT) -> None:
        """SIGTERM, upon which SGLang ends its requests and its processes; blocks until it has.

        Raises EngineError when that takes longer than `timeout` seconds; they are killed then.
        """
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout)
            _wait_for_group(process.pid)
        except subprocess.TimeoutExpired:
            raise self._failure(f"SGLang did not end within {timeout:.0f} s of SIGTERM") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def attach(self, storage: Mapping[str, object]) -> Reply:
        """Attach a dynamic storage back-end with this extra configuration, once SGLang is idle."""
        body = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": self.config.extra_config(storage),
        }
        return self.when_idle("PUT", "/hicache/storage-backend", body)

    def schedulers(self) -> list[int]:
        """The process ids of the schedulers, one a rank; those are what loads the connector."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                title = (entry / "cmdline").read_bytes()
                if title.startswith(b"sglang::scheduler") and self._is_mine(int(entry.name)):
                    found.append(int(entry.name))
        return sorted(found)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the log."""
        if not self.log.exists():
            return ""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _is_mine(self, pid: int) -> bool:
        return self._process is not None and os.getpgid(pid) == self._process.pid

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
