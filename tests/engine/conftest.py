"""Fixtures of the tests that run SGLang itself: tiny models and a bounded number of servers."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_cpu.models import Kind, write_model
from engine_cpu.server import EngineConfig, EngineServer, running
from filelock import FileLock, Timeout

SERVERS = max(1, min(2, os.cpu_count() or 1))
"""Servers that may run at once on this machine, whatever the number of workers."""

StartServer = Callable[[EngineConfig], contextlib.AbstractContextManager[EngineServer]]


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory all workers of this run see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def model(shared_directory: Path) -> Callable[[Kind, int], Path]:
    """A tiny model by kind and seed, written once for all workers."""

    def get(kind: Kind, seed: int = 7) -> Path:
        directory = shared_directory / f"model-{kind}-{seed}"
        with FileLock(f"{directory}.lock"):
            # The weights are written last.
            if not (directory / "model.safetensors").exists():
                write_model(kind, directory, seed=seed)
        return directory

    return get


@contextlib.contextmanager
def _server_place(directory: Path) -> Iterator[None]:
    """Hold one of the `SERVERS` places; blocks until one is free."""
    locks = [FileLock(directory / f"server-{place}.lock") for place in range(SERVERS)]
    while True:
        for lock in locks:
            with contextlib.suppress(Timeout):
                lock.acquire(blocking=False)
                try:
                    yield
                finally:
                    lock.release()
                return
        time.sleep(0.5)


@pytest.fixture
def start_server(shared_directory: Path, tmp_path: Path) -> StartServer:
    """Start a server for the length of a ``with`` block; it ends by SIGKILL."""
    count = iter(range(100))

    @contextlib.contextmanager
    def start(config: EngineConfig) -> Iterator[EngineServer]:
        with (
            _server_place(shared_directory),
            running(config, tmp_path / f"server-{next(count)}.log") as server,
        ):
            yield server

    return start
