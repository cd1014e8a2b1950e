"""Containers of this project's images: started, asked, killed, and always labelled.

A container that does not become what it should is an error that ends with its log.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from docker.models.containers import Container
from engine_cpu.client import EngineClient
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from .runs import Run

TESTS = Path(__file__).parents[1]
STORE = "/var/lib/hicache/store"
SERVER = "objectstore"
"""What containers call the S3 server on their network."""
LOG_TAIL_LINES = 40

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
        self.get_wrapped_container().wait(timeout=60)

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

    def call(self, *command: str) -> Finished:
        """Run a command in it; blocks until it has ended, however it did."""
        status, output = self.get_wrapped_container().exec_run(list(command))
        return Finished(status, output.decode(errors="replace"))

    def must_call(self, *command: str) -> str:
        """Run a command in it that must end well; returns what it printed."""
        finished = self.call(*command)
        if finished.status != 0:
            raise ContainerError(
                f"{' '.join(command)} in {self.image} ended with status {finished.status}:\n"
                f"{finished.output}"
            )
        return finished.output

    def failure(self, what: str) -> ContainerError:
        """The error of this container, with the end of its log."""
        tail = "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])
        return ContainerError(f"{self.image} {what}; the end of its log:\n{tail}")

    def _must_run(self, when: str) -> None:
        state = self.container.attrs["State"]
        if not state["Running"]:
            raise self.failure(f"ended with status {state['ExitCode']} when it {when}")


class ConnectorContainer(ProjectContainer):
    """The connector image on a volume, with the helpers of these tests inside at /tests.

    Without a `child` it waits to be asked; with one, that function of `slab_children` is all it
    does, and it ends with it.
    """

    def __init__(
        self,
        run: Run,
        image: str,
        volume: str,
        child: Sequence[object] | None = None,
        **options: Any,
    ) -> None:
        command = ["sleep", "infinity"] if child is None else _child_command(child)
        super().__init__(run, image, entrypoint=command[0], **options)
        self.with_command(command[1:])
        self.with_envs(PYTHONPATH="/tests", PYTHONUNBUFFERED="1", NIXL_LOG_LEVEL="ERROR")
        self.with_volume_mapping(volume, str(Path(STORE).parent), "rw")
        self.with_volume_mapping(TESTS, "/tests", "ro")

    def cli(self, command: str, *options: str) -> Any:
        """A command of `hicache-nixl` on the store that must end well; its JSON."""
        return json.loads(
            self.must_call(
                "hicache-nixl", command, "--json", "--store", f"slab://{STORE}", *options
            )
        )

    def child(self, function: str, *arguments: object) -> str:
        """Run a function of `slab_children` in it; returns what it printed."""
        return self.must_call(*_child_command([function, *arguments]))


def _child_command(child: Sequence[object]) -> list[str]:
    function, *arguments = child
    return ["python", "-m", "slab_children", str(function), json.dumps(arguments)]


class EngineContainer(ProjectContainer):
    """SGLang on a CPU with the connector on the store that the environment names."""

    PORT = 30000
    START_TIMEOUT = 400.0

    def __init__(self, run: Run, image: str, store: str, **options: Any) -> None:
        super().__init__(run, image, **options)
        self.with_exposed_ports(self.PORT)
        self.with_envs(HICACHE_NIXL_STORE=store, HICACHE_NIXL_STAGING="64MiB")

    def client(self) -> EngineClient:
        """A client of the server, once it is healthy; another one after each start."""
        self.wait_healthy(self.START_TIMEOUT)
        return EngineClient(
            f"http://{self.get_container_host_ip()}:{self.get_exposed_port(self.PORT)}"
        )


class ObjectStoreContainer(ProjectContainer):
    """An S3 server that knows one owner and one reader, and makes no bucket by itself."""

    OWNER = ("test-owner", "secret-of-the-owner")
    READER = ("test-reader", "secret-of-the-reader")
    PORT = 9000

    def __init__(self, run: Run, image: str, buckets: Sequence[str], **options: Any) -> None:
        super().__init__(run, image, **options)
        self.with_exposed_ports(self.PORT)
        self.with_envs(
            S3_BUCKETS=" ".join(buckets),
            S3_CREDENTIALS_FILE="/secrets/owner",
            S3_READER_FILE="/secrets/reader",
        )
        for name, keys in (("owner", self.OWNER), ("reader", self.READER)):
            self.with_copy_into_container(credentials_file(*keys), f"/secrets/{name}", 0o644)

    @property
    def url(self) -> str:
        """Where this machine reaches it; another one after each start."""
        return f"http://{self.get_container_host_ip()}:{self.get_exposed_port(self.PORT)}"


def credentials_file(access_key: str, secret_key: str) -> bytes:
    """Keys as the AWS tools write them."""
    return (
        f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n"
    ).encode()


@contextlib.contextmanager
def labelled_network(run: Run) -> Iterator[Network]:
    """A network of a run, on which containers find each other by their aliases."""
    with Network(docker_network_kw={"labels": run.labels}) as network:
        yield network


def build(image: str) -> str:
    """Build an image of ci/images.sh from the working tree; returns its name. Blocks for minutes
    the first time and for seconds later."""
    script = TESTS.parent / "ci" / "images.sh"
    built = subprocess.run(
        [script, image], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if built.returncode != 0:
        raise ContainerError(f"{script} {image} failed:\n{built.stdout}{built.stderr}")
    return f"hicache-nixl/{image}:local"
