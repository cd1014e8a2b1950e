"""Fixtures of the container suite: a daemon, images and volumes, shared by all workers."""

import subprocess
from collections.abc import Callable, Iterator

import pytest

from . import harness
from .runs import Run


@pytest.fixture(scope="session")
def run() -> Run:
    """This run of the tests, watched over; skips where no Docker daemon answers."""
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker daemon answers — start one, as root: ci/docker.sh")
    current = Run.current()
    current.begin()
    return current


@pytest.fixture(scope="session")
def connector_image(run: Run) -> str:
    """The connector image, built from the working tree once for all workers."""
    image: str = run.once("connector-image", lambda: harness.build("connector"))
    return image


@pytest.fixture(scope="session")
def objectstore_image(run: Run) -> str:
    """The S3 server's image, as `connector_image`."""
    image: str = run.once("objectstore-image", lambda: harness.build("objectstore"))
    return image


@pytest.fixture(scope="session")
def engine_image(run: Run) -> str:
    """The CPU engine's image, as `connector_image`."""
    image: str = run.once("engine-image", lambda: harness.build("sglang-cpu"))
    return image


@pytest.fixture
def volume(run: Run) -> Iterator[str]:
    """A new named volume."""
    labels = [f"--label={name}={value}" for name, value in run.labels.items()]
    made = subprocess.run(
        ["docker", "volume", "create", *labels], capture_output=True, text=True, check=True
    )
    name = made.stdout.strip()
    yield name
    subprocess.run(["docker", "volume", "rm", "--force", name], capture_output=True, check=True)


StartConnector = Callable[..., harness.ConnectorContainer]


@pytest.fixture
def start_connector(run: Run, connector_image: str, volume: str) -> Iterator[StartConnector]:
    """Start connector containers on `volume`; they end with the test."""
    started: list[harness.ConnectorContainer] = []

    def start(*child: object) -> harness.ConnectorContainer:
        container = harness.ConnectorContainer(run, connector_image, volume, child or None)
        started.append(container)
        container.start()
        return container

    yield start
    for container in started:
        container.stop()
