"""compose.yaml with everything running, as somebody types it who tries it for the first time."""

import json
import os
import re
import secrets
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from . import harness
from .harness import TESTS
from .runs import REMOVAL, Run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

# The prompt begins with random letters, which are more or fewer tokens.
VERDICT = re.compile(
    r"PASS: after SIGKILL and restart 112 of \d+ prompt tokens came from storage, the same tokens"
)


class Stack:
    """A project of Compose on this project's file. What it starts belongs to the run."""

    def __init__(self, run: Run, directory: Path, profile: str, **variables: str) -> None:
        """`directory` takes a file; `variables` are those of compose.yaml."""
        self.name = f"hicache-nixl-{secrets.token_hex(6)}"
        self._environment = os.environ | {"OBJECT_STORE": "seaweedfs", **variables}
        self._options = ["--project-name", self.name, "--file", "compose.yaml"]
        self._options += ["--profile", profile]
        self._services: list[str] = []
        given = json.loads(self.output("config", "--format", "json"))
        labels = directory / "labels.json"
        labels.write_text(
            json.dumps(
                {
                    kind: {name: {"labels": run.labels} for name in given.get(kind, ())}
                    for kind in ("services", "networks", "volumes")
                }
            )
        )
        self._options += ["--file", str(labels)]
        self._services = list(given["services"])

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`docker compose` with these arguments; blocks until it has ended, however it did."""
        return subprocess.run(
            ["docker", "compose", *self._options, *arguments],
            cwd=TESTS.parent,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def output(self, *arguments: str) -> str:
        """What `docker compose` with these arguments prints; it must end well."""
        ended = self.call(*arguments)
        assert ended.returncode == 0, f"{ended.args}\n{ended.stdout}{ended.stderr}{self.logs()}"
        return ended.stdout

    def logs(self) -> str:
        """The end of every service's log."""
        # Unless named, those that `up` does not show are left out.
        return self.call("logs", "--no-color", "--tail", "40", *self._services).stdout

    def statuses(self) -> dict[str, int]:
        """The exit status of each service that has ended."""
        lines = self.output("ps", "--all", "--format", "json").splitlines()
        services = [json.loads(line) for line in lines]
        return {one["Service"]: one["ExitCode"] for one in services if one["State"] == "exited"}

    def left(self) -> list[str]:
        """What on the daemon still belongs to the project."""
        label = f"label=com.docker.compose.project={self.name}"
        found = []
        for kind in REMOVAL:
            every: Sequence[str] = ["--all"] if kind == "container" else []
            command = ["docker", kind, "ls", *every, "--quiet", "--filter", label]
            listed = subprocess.run(command, capture_output=True, text=True, check=True)
            found += [f"{kind} {name}" for name in listed.stdout.split()]
        return found


MakeStack = Callable[..., Stack]


@pytest.fixture(scope="session")
def s3_images(run: Run, connector_image: str, engine_image: str) -> None:
    """What the profile s3 runs, built from the working tree."""
    run.once("objectstore-image", lambda: harness.image("objectstore"))


@pytest.fixture
def make_stack(run: Run, tmp_path: Path, held: ExitStack) -> MakeStack:
    """Make projects that are taken down with the test."""

    def make(profile: str, **variables: str) -> Stack:
        stack = Stack(run, tmp_path, profile, **variables)
        held.callback(stack.call, "down", "--volumes")
        return stack

    return make


@pytest.mark.usefixtures("s3_images")
def test_up_tells_the_story_on_s3(make_stack: MakeStack) -> None:
    """`docker compose up` makes a bucket, serves, survives the engine's kill, ends with the verdict
    while the servers go on, and `down -v` leaves nothing."""
    stack = make_stack("s3")
    assert VERDICT.search(stack.output("up", "--no-color"))
    assert stack.statuses() == {"bucket": 0, "e2e": 0}
    assert stack.left()
    stack.output("down", "--volumes")
    assert stack.left() == []


@pytest.mark.usefixtures("engine_image")
def test_run_ends_with_the_verdict_on_a_slab(make_stack: MakeStack) -> None:
    """`docker compose run --rm e2e-slab` starts what it needs, prints the story alone, and ends
    with its status; `down -v` leaves nothing."""
    stack = make_stack("slab")
    story = stack.output("run", "--rm", "e2e-slab")
    assert story.startswith("1. A prompt is computed by http://engine-slab:30000")
    assert VERDICT.match(story.splitlines()[-1])
    stack.output("down", "--volumes")
    assert stack.left() == []


@pytest.mark.usefixtures("s3_images")
def test_unreadable_credentials_end_the_command(make_stack: MakeStack, tmp_path: Path) -> None:
    """Credentials that the containers' user may not read end `docker compose run` with an error,
    and the server's log names them."""
    credentials = tmp_path / "credentials"
    credentials.write_bytes((TESTS.parent / "docker/compose/demo-credentials").read_bytes())
    credentials.chmod(0)
    stack = make_stack("s3", S3_CREDENTIALS=str(credentials))
    ended = stack.call("run", "--rm", "e2e")
    assert ended.returncode != 0
    assert "cannot read the credentials in /run/secrets/s3" in stack.logs()
