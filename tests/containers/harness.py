"""Containers of this project's images: started, asked, killed, and always labelled.

A container that does not become what it should is an error that ends with its log.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from docker.models.containers import Container
from requests.exceptions import ConnectionError, ReadTimeout
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from load_spec import Spec, State
from s3_access import Identity

from .runs import Run

TESTS = Path(__file__).parents[1]
STORE = "/var/lib/hicache/store"
SECRET = "/run/secrets/s3"
LOG_TAIL_LINES = 40
LOAD_START_TIMEOUT = 180.0

# Runs clean up after themselves, and the reaper's image cannot be pulled everywhere.
testcontainers_config.ryuk_disabled = True


class ContainerError(AssertionError):
    """A container did not do what it was started for; the text ends with its log's end."""


@dataclass(frozen=True)
class Finished:
    """A command that ended in a container."""

    status: int
    output: str


class ProjectContainer(DockerContainer):
    """A container of a run. Use it as a context manager, or pair `start` with `stop`."""

    def __init__(self, run: Run, image: str, **options: Any) -> None:
        super().__init__(image, **{"init": True, "labels": run.labels, **options})

    def on(self, network: str, *aliases: str) -> Self:
        """Before its start: the network it is on, and what others there call it."""
        there = Network()
        there.name = network
        return self.with_network(there).with_network_aliases(*aliases)

    def with_secret(self, identity: Identity, path: str = SECRET) -> Self:
        """Before its start: the credentials in a file, which the connector is told of."""
        self.with_copy_into_container(identity.file(), path, 0o644)
        self.with_env("HICACHE_NIXL_CREDENTIALS_FILE", path)
        return self

    def beside(
        self, *, volume: str = "", network: str = "", identity: Identity | None = None
    ) -> Self:
        """Before its start: what a store is reached with, as far as it takes that."""
        if volume:
            self.with_volume_mapping(volume, str(Path(STORE).parent), "rw")
        if network:
            self.on(network)
        if identity is not None:
            self.with_secret(identity)
        return self

    @property
    def container(self) -> Container:
        """The container as the Docker SDK sees it, up to date."""
        container: Container = self.get_wrapped_container()
        container.reload()
        return container

    def log(self) -> str:
        """All that it has printed."""
        return self.get_wrapped_container().logs().decode(errors="replace")

    def lines(self) -> list[str]:
        """What it has printed on standard output, whole lines only."""
        text = self.get_wrapped_container().logs(stderr=False).decode()
        return text[: text.rfind("\n") + 1].splitlines()

    def kill(self) -> None:
        """SIGKILL to every process; blocks until the container has ended."""
        self.get_wrapped_container().kill("KILL")
        self.wait_end(60.0)

    def wait_end(self, timeout: float) -> int:
        """Block until it has ended, however it did; its status."""
        try:
            return int(self.get_wrapped_container().wait(timeout=timeout)["StatusCode"])
        except (ConnectionError, ReadTimeout):
            raise self.failure(f"has not ended in {timeout:.0f} s") from None

    def must_end(self, timeout: float) -> None:
        """Block until it has ended, which must be well."""
        if status := self.wait_end(timeout):
            raise self.failure(f"ended with status {status}")

    def wait_lines(self, count: int, timeout: float) -> list[str]:
        """Block until it has printed `count` lines on standard output."""
        deadline = time.monotonic() + timeout
        while len(found := self.lines()) < count:
            self._must_run(f"printed {len(found)} of {count} lines")
            if time.monotonic() > deadline:
                raise self.failure(f"printed {len(found)} of {count} lines in {timeout:.0f} s")
            time.sleep(0.05)
        return found

    def wait_healthy(self, timeout: float) -> Self:
        """Block until its health check passes."""
        deadline = time.monotonic() + timeout
        while (status := self.container.health) != "healthy":
            self._must_run("was not healthy yet")
            if time.monotonic() > deadline:
                raise self.failure(f"is {status} after {timeout:.0f} s")
            time.sleep(0.25)
        return self

    def call(self, *command: str, environment: Mapping[str, str] | None = None) -> Finished:
        """Run a command in it; blocks until it has ended, however it did."""
        status, output = self.get_wrapped_container().exec_run(
            list(command), environment=dict(environment or {})
        )
        return Finished(status, output.decode(errors="replace"))

    def must_call(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Run a command in it that must end well; returns what it printed. An error has the
        command, and not its environment, which is for secrets."""
        finished = self.call(*command, environment=environment)
        if finished.status != 0:
            raise ContainerError(
                f"{' '.join(command)} in {self._what} ended with status {finished.status}:\n"
                f"{finished.output}"
            )
        return finished.output

    def failure(self, what: str) -> ContainerError:
        """The error of this container, with the end of its log."""
        tail = "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])
        return ContainerError(f"{self._what} {what}; the end of its log:\n{tail}")

    @property
    def _what(self) -> str:
        # An image without a name is one whose name another build has taken meanwhile.
        image = self.get_wrapped_container().image
        return ((image and image.tags) or [self.image])[0]

    def _must_run(self, when: str) -> None:
        state = self.container.attrs["State"]
        if not state["Running"]:
            raise self.failure(f"ended with status {state['ExitCode']} when it {when}")


class ConnectorContainer(ProjectContainer):
    """The connector image on a store, with the helpers of these tests inside at /tests.

    Without a `child` it waits to be asked; with one, that function of `slab_children`, or
    `object_children` where the store is in a bucket, is all it does, and it ends with it.
    """

    def __init__(
        self,
        run: Run,
        image: str,
        child: Sequence[object] | None = None,
        *,
        store: str,
        **options: Any,
    ) -> None:
        self.store = store
        self._children = "object_children" if store.startswith("s3:") else "slab_children"
        command = ["sleep", "infinity"] if child is None else self._child_command(*child)
        super().__init__(run, image, entrypoint=command[0], **options)
        self.with_command(command[1:])
        self.with_envs(PYTHONPATH="/tests", PYTHONUNBUFFERED="1", NIXL_LOG_LEVEL="ERROR")
        self.with_volume_mapping(TESTS, "/tests", "ro")

    def cli(self, command: str, *options: str) -> Any:
        """A command of `hicache-nixl` on the store that must end well; its JSON."""
        return json.loads(
            self.must_call("hicache-nixl", command, "--json", "--store", self.store, *options)
        )

    def child(self, function: str, *arguments: object) -> str:
        """Run a function of the same module in it; returns what it printed."""
        return self.must_call(*self._child_command(function, *arguments))

    def _child_command(self, function: object, *arguments: object) -> list[str]:
        return ["python", "-m", self._children, str(function), json.dumps(arguments)]


class LoadContainer(ProjectContainer):
    """A load (load_child.py) in the image that has SGLang; ask for its store, and for a volume or a
    network with the methods of testcontainers."""

    def __init__(self, run: Run, image: str, spec: Spec, **options: Any) -> None:
        super().__init__(run, image, entrypoint="python", **options)
        self._is_ending = False
        self.with_command(["-m", "load_child", json.dumps(asdict(spec))])
        self.with_envs(PYTHONPATH="/tests", PYTHONUNBUFFERED="1", NIXL_LOG_LEVEL="ERROR")
        self.with_volume_mapping(TESTS, "/tests", "ro")

    def state(self) -> State:
        """How it stands, or stood last."""
        return State(**json.loads(self.lines()[-1]))

    def wait(self, ready: Callable[[State], bool], timeout: float = 60.0) -> State:
        """Block until a state is `ready`, and before that until it has started; the load fails the
        test as soon as it has failed."""
        self.wait_lines(1, LOAD_START_TIMEOUT)
        deadline = time.monotonic() + timeout
        state = None
        while time.monotonic() < deadline:
            self._must_run(f"was at {state}")
            if ready(state := self.state()):
                return state
            time.sleep(0.2)
        raise self.failure(f"was at {state} after {timeout:.0f} s")

    def wait_moves(self, timeout: float = 60.0) -> State:
        """Block until pages are stored and read that were not before this call."""
        before = self.wait(lambda _: True, timeout)
        return self.wait(lambda now: now.stored > before.stored and now.read > before.read, timeout)

    def ask_to_end(self) -> None:
        """Tell the load to end, which takes seconds; does not block."""
        if not self._is_ending:
            self._must_run("was told to end")
            self.get_wrapped_container().kill("TERM")
            self._is_ending = True

    def finish(self, timeout: float = 60.0) -> State:
        """End the load, which must have met no error; its last state."""
        self.ask_to_end()
        self.must_end(timeout)
        return self.state()


def image(name: str) -> str:
    """The id of an image of ci/images.sh: of the one with the tag TAG where the environment has
    one, else of one built from the working tree, which blocks for minutes the first time and for
    seconds later. Another checkout may give the name to its own build meanwhile."""
    if tag := os.environ.get("TAG"):
        wanted = f"hicache-nixl/{name}:{tag}"
        found = _run("docker", "image", "inspect", "--format", "{{.Id}}", wanted)
        if found.returncode != 0:
            raise ContainerError(f"no image {wanted}: build it with TAG={tag} ci/images.sh {name}")
        return found.stdout.strip()
    script = str(TESTS.parent / "ci" / "images.sh")
    built = _run(script, name)
    if built.returncode != 0:
        raise ContainerError(f"{script} {name} failed:\n{built.stdout}{built.stderr}")
    return built.stdout.split()[-1]  # what `docker build --quiet` prints


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
