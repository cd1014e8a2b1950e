"""Fixtures of the container suite: a daemon, images and volumes, shared by all workers."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from load_spec import Spec
from s3_access import ADMIN, Identity

from . import harness, s3_servers
from .engines import EngineContainer
from .runs import Run
from .s3_servers import MinIO, S3Container, S3Place, SeaweedFS

BUILDING = harness.TESTS.parent / "reports" / "images.lock"
"""Held by ci/run.sh while it starts the daemon and builds images, beside the first tests."""

TIMEOUT = 1200
"""Seconds for a test and its fixtures: the first one waits for images."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session")
def run() -> Run:
    """This run of the tests, watched over; skips where no Docker daemon answers."""
    if BUILDING.exists():
        with FileLock(BUILDING):
            pass
    asked = shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True)
    if not asked or asked.returncode != 0:
        pytest.skip("no Docker daemon answers — start one, as root: ci/docker.sh")
    current = Run.current()
    current.begin()
    return current


@pytest.fixture(scope="session")
def connector_image(run: Run) -> str:
    """The connector image, built from the working tree once for all workers."""
    image: str = run.once("connector-image", lambda: harness.image("connector"))
    return image


@pytest.fixture(scope="session")
def engine_image(run: Run) -> str:
    """The CPU engine's image, as `connector_image`."""
    image: str = run.once("engine-image", lambda: harness.image("sglang-cpu"))
    return image


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """What ends with the test, the latest first: containers before the volume that they use."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def make_s3(run: Run) -> Callable[[], S3Container]:
    """Make S3 servers, of one kind in all workers, that are not started yet."""
    kind, _ = run.once("s3-server", lambda: s3_servers.choose(os.environ.get("OBJECT_STORE", "")))
    if kind == MinIO.kind:
        return lambda: MinIO(run, s3_servers.minio_image())
    image = run.once("objectstore-image", lambda: harness.image("objectstore"))
    return lambda: SeaweedFS(run, image)


@pytest.fixture
def network(run: Run, held: ExitStack) -> str:
    """A new network, on which containers find each other by their aliases."""
    return held.enter_context(run.made("network"))


@pytest.fixture
def own_s3(make_s3: Callable[[], S3Container], network: str, held: ExitStack) -> S3Container:
    """An S3 server on `network` that is this test's alone: to kill, cut off and fill."""
    return held.enter_context(make_s3().on(network, s3_servers.ALIAS)).serve()


@pytest.fixture(scope="session")
def s3(run: Run, make_s3: Callable[[], S3Container]) -> S3Place:
    """The S3 server that all workers share, on a network of its own; it ends with the run."""

    def start() -> dict[str, str]:
        server = make_s3().on(run.make("network"), s3_servers.ALIAS)
        server.start()
        return asdict(server.serve().place())

    return S3Place(**run.once("s3", start))


@pytest.fixture(scope="module")
def bucket(s3: S3Place) -> Iterator[str]:
    """A bucket of this module and worker on the shared server; tests take a prefix each."""
    name = s3.make_bucket()
    yield name
    s3.remove_bucket(name)


@pytest.fixture
def volume(run: Run, held: ExitStack) -> str:
    """A new named volume."""
    return held.enter_context(run.made("volume"))


StartConnector = Callable[..., harness.ConnectorContainer]


@pytest.fixture
def start_connector_on(run: Run, connector_image: str, held: ExitStack) -> StartConnector:
    """Start connector containers: `start_connector_on(store, *child, volume=…, network=…,
    identity=…)`; they end with the test."""

    def start(store: str, *child: object, **place: Any) -> harness.ConnectorContainer:
        connector = harness.ConnectorContainer(run, connector_image, child or None, store=store)
        return held.enter_context(connector.beside(**place))

    return start


@pytest.fixture
def start_connector(start_connector_on: StartConnector, volume: str) -> StartConnector:
    """Start connector containers on a slab store in `volume`; they end with the test."""
    return partial(start_connector_on, f"slab://{harness.STORE}", volume=volume)


StartLoad = Callable[..., harness.LoadContainer]


@pytest.fixture
def start_load(run: Run, engine_image: str, held: ExitStack) -> StartLoad:
    """Start loads: `start_load(Spec(…), volume=…, network=…, identity=…, **options of docker run)`;
    they end with the test."""

    def start(
        spec: Spec,
        *,
        volume: str = "",
        network: str = "",
        identity: Identity | None = None,
        **options: object,
    ) -> harness.LoadContainer:
        load = harness.LoadContainer(run, engine_image, spec, **options)
        load.beside(volume=volume, network=network, identity=identity)
        return held.enter_context(load)

    return start


StartEngine = Callable[..., EngineContainer]


@pytest.fixture
def start_engine(run: Run, engine_image: str, held: ExitStack) -> StartEngine:
    """Start SGLang on a store: `start_engine(store)`, with a `volume`, or the `network` of an S3
    server whose owner it is; they end with the test."""

    def start(store: str, *, volume: str = "", network: str = "") -> EngineContainer:
        engine = EngineContainer(run, engine_image, store)
        if volume:
            engine.with_volume_mapping(volume, "/var/lib/hicache", "rw")
        if network:
            engine.on(network).with_secret(ADMIN)
        return held.enter_context(engine)

    return start
