"""An S3 server that stops, hangs, dies or is cut off, while a load in another container goes on.

The load itself compares every byte, watches host pages after their calls and times each call; it
ends with an error for the first that is wrong.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pytest

from load_spec import Margin, Spec, State
from s3_access import ADMIN

from .conftest import StartConnector, StartLoad
from .harness import LoadContainer, ProjectContainer
from .runs import Run
from .s3_servers import ALIAS, S3Container, store_url

pytestmark = [pytest.mark.docker, pytest.mark.stress]

DEADLINE_S = 2.0
RECOVERY_S = 30.0
MARGIN = Margin(files=4, connections=40, threads=8, resident_bytes=64 << 20)
"""Beyond what the load held before the fault."""


@pytest.fixture(scope="module")
def server(run: Run, make_s3: Callable[[], S3Container]) -> Iterator[S3Container]:
    """A server on a network of its own, for the faults of this module; each leaves it well."""
    with run.made("network") as network, make_s3().on(network, ALIAS) as server:
        yield server.serve()


@dataclass(frozen=True)
class Scene:
    """Who takes part in a fault."""

    server: S3Container
    load: LoadContainer
    start_other: Callable[[], ProjectContainer]
    """Start a container on the server's network that serves nothing."""


class Fault(ABC):
    """A fault, for the length of a block; after that the server serves."""

    lasts_s = 2.0
    """Seconds from when both circuits have opened."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.server: Any = scene.server.get_wrapped_container()
        networks = scene.server.get_docker_client().client.networks
        self.network = networks.get(scene.server.place().network)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @abstractmethod
    def begin(self) -> None:
        """Block until it is there."""

    @abstractmethod
    def end(self) -> None:
        """Block until it is over."""


class Stopped(Fault):
    """`docker stop`, and `docker start`."""

    def begin(self) -> None:
        self.server.stop()

    def end(self) -> None:
        self.server.start()
        self.scene.server.serve()


class Killed(Stopped):
    """SIGKILL, and `docker start`."""

    lasts_s = 15.0  # with its start the server is away for 20 s

    def begin(self) -> None:
        self.scene.server.kill()


class Paused(Fault):
    """`docker pause`, in the middle of answers: connections stay, and nothing comes."""

    lasts_s = 8.0  # beyond the time after which the client gives up a stalled answer

    def begin(self) -> None:
        self.server.pause()

    def end(self) -> None:
        self.server.unpause()


class ServerCutOff(Fault):
    """`docker network disconnect` of the server, which comes back at another address."""

    def begin(self) -> None:
        self.address = _address(self.scene.server)
        self.network.disconnect(self.server)
        self.scene.start_other()  # takes the address

    def end(self) -> None:
        self.network.connect(self.server, aliases=[ALIAS])
        assert _address(self.scene.server) != self.address


class LoadCutOff(Fault):
    """`docker network disconnect` of the load, which then can reach nobody."""

    def begin(self) -> None:
        self.network.disconnect(self.scene.load.get_wrapped_container())

    def end(self) -> None:
        self.network.connect(self.scene.load.get_wrapped_container())


def _address(container: ProjectContainer) -> str:
    (network,) = container.container.attrs["NetworkSettings"]["Networks"].values()
    return str(network["IPAddress"])


def all_closed(state: State) -> bool:
    return set(state.circuits.values()) == {"closed"}


def all_open(state: State) -> bool:
    return "closed" not in state.circuits.values()


def is_back(before: State, now: State) -> bool:
    """Whether the load holds about what it held, and uses storage."""
    return all_closed(now) and not now.held_more(before, MARGIN)


@pytest.mark.parametrize("kind", [Stopped, Killed, Paused, ServerCutOff, LoadCutOff])
def test_faults_under_load(
    server: S3Container,
    kind: type[Fault],
    start_load: StartLoad,
    start_connector_on: StartConnector,
) -> None:
    """Whatever happens to the server: right pages or misses, in time, at once when the circuits are
    open, and hits again within 30 s of its return."""
    place = server.place()
    bucket = place.make_bucket()
    url = store_url(bucket)
    load = start_load(Spec(url, deadline_s=DEADLINE_S), network=place.network, identity=ADMIN)
    before = load.wait(lambda now: now.stored >= 40 and now.read >= 80 and all_closed(now))
    scene = Scene(server, load, lambda: start_connector_on(url, network=place.network))
    with kind(scene) as fault:
        load.wait(all_open)
        time.sleep(DEADLINE_S)  # calls that began before are over
        opened = load.state()
        # As many calls, each until its deadline, would take minutes.
        missed = load.wait(lambda now: now.gets > opened.gets + 100 and now.sets > opened.sets + 50)
        assert (missed.read, missed.stored) == (opened.read, opened.stored)
        time.sleep(fault.lasts_s)
    load.wait_moves(RECOVERY_S)
    load.wait(lambda now: is_back(before, now))
    load.finish()
    connector = start_connector_on(url, network=place.network, identity=ADMIN)
    assert [counts["damaged"] for counts in connector.cli("verify").values()] == [0]
