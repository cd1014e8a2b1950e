"""S3 servers and buckets for tests; a plug-in of pytest."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from s3_server import S3Address, S3Server, own_server, shared_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> S3Address:
    """The S3 server that all workers of this run share; it is not to be stopped or filled."""
    base, run_pid = tmp_path_factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base, run_pid = base.parent, os.getppid()
    with FileLock(base / "s3-server.lock"):
        return shared_server(base, run_pid)


@pytest.fixture
def make_bucket(s3: S3Address) -> Iterator[Callable[[], str]]:
    """Empty buckets on the shared server, removed after the test."""
    names: list[str] = []

    def make() -> str:
        names.append(s3.make_bucket())
        return names[-1]

    yield make
    for name in names:
        s3.remove_bucket(name)


@pytest.fixture(scope="module")
def module_bucket(s3: S3Address) -> Iterator[str]:
    """One bucket for the tests of a module; each takes a prefix of its own in it."""
    name = s3.make_bucket()
    yield name
    s3.remove_bucket(name)


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[S3Server]:
    """An S3 server that is this test's alone: to kill, restart and fill."""
    with own_server(tmp_path / "s3") as server:
        yield server
