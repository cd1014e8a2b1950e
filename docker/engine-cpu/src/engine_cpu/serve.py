"""Serves SGLang on all interfaces of a container, with the connector configured by environment.

Command: ``python -m engine_cpu.serve [SGLANG FLAGS]``. Port 30000.

``MODEL`` is a directory, or the kind of a model in ``/opt/models``; mha unless set.
``RESTART=1`` starts SGLang again whenever it ends after it once answered, as the process manager
of a host would; what cannot start ends. SIGTERM ends both, within `STOP_TIMEOUT`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from engine_cpu.client import EngineClient
from engine_cpu.server import EngineConfig, connector_storage

PORT = 30000
MODELS = Path("/opt/models")
PAUSE_BEFORE_RESTART = 1.0
HEALTH_PERIOD = 2.0
STOP_TIMEOUT = 5
"""Seconds for a clean end; Docker kills after ten."""


def configuration(flags: list[str]) -> EngineConfig:
    """The server of this container; the connector reads ``HICACHE_NIXL_…`` by itself."""
    model = os.environ.get("MODEL", "mha")
    return EngineConfig(
        model=Path(model) if "/" in model else MODELS / model,
        storage=connector_storage(),
        flags=["--host", "0.0.0.0", *flags],
    )


def say(text: str) -> None:
    """A line in the container's log."""
    sys.stdout.write(f"serve: {text}\n")
    sys.stdout.flush()


def watch(server: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Block until the server ends; returns its status and whether it ever answered."""
    client, answered = EngineClient(f"http://127.0.0.1:{PORT}"), False
    while True:
        try:
            return server.wait(HEALTH_PERIOD), answered
        except subprocess.TimeoutExpired:
            answered = answered or client.healthy()


def serve(config: EngineConfig, *, restart: bool) -> int:
    """Run the server until it ends, or until a signal if `restart`; returns its status."""
    running: list[subprocess.Popen[bytes]] = []
    ending = False

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        ending = True
        signal.alarm(STOP_TIMEOUT)
        for server in running:
            server.send_signal(number)

    def kill(_number: int, _frame: FrameType | None) -> None:
        for server in running:
            server.kill()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGALRM, kill)
    while True:
        server = subprocess.Popen(config.command(PORT), env=config.process_environment())
        running[:] = [server]
        status, answered = watch(server)
        if ending or not restart:
            return status
        if not answered:
            say(f"SGLang ended with status {status} before it answered")
            return status
        say(f"SGLang ended with status {status}, starting it again")
        time.sleep(PAUSE_BEFORE_RESTART)


if __name__ == "__main__":
    sys.exit(serve(configuration(sys.argv[1:]), restart=os.environ.get("RESTART") == "1"))
