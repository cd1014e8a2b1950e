"""A run of the tests leaves nothing on the daemon, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .runs import Run

pytestmark = pytest.mark.docker

CHILD = """
import subprocess, sys, time
from containers.runs import Run
run = Run.current()
run.begin()
labels = [f"--label={name}={value}" for name, value in run.labels.items()]
for command in (
    ["volume", "create", *labels, run.name],
    ["network", "create", *labels, run.name],
    ["run", "--detach", *labels, "--network", run.name, "--volume", f"{run.name}:/data",
     "--entrypoint", "sleep", sys.argv[1], "infinity"],
):
    subprocess.run(["docker", *command], check=True, capture_output=True)
print(run.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def child_run(connector_image: str) -> Iterator[tuple[subprocess.Popen[str], Run]]:
    """A process that is a run of its own, with a container, a network and a volume."""
    environment = dict(os.environ)
    environment.pop("PYTEST_XDIST_WORKER", None)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, connector_image],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=environment,
    ) as child:
        assert child.stdout is not None
        run = Run(child.stdout.readline().strip())
        yield child, run
        child.kill()
        run.remove()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_nothing_is_left_by_a_run_that_was_ended(
    child_run: tuple[subprocess.Popen[str], Run], number: signal.Signals
) -> None:
    """What a killed run started is removed by its watcher: containers, networks, volumes."""
    child, run = child_run
    assert sorted(name.split()[0] for name in run.left()) == ["container", "network", "volume"]
    child.send_signal(number)
    child.wait()
    deadline = time.monotonic() + 60
    while run.left() or run.directory.exists():
        assert time.monotonic() < deadline, f"left after a minute: {run.left()}"
        time.sleep(0.2)


def test_begin_removes_what_dead_runs_left(
    child_run: tuple[subprocess.Popen[str], Run], run: Run
) -> None:
    """A run that begins removes what a dead run left, and nothing of a live one."""
    child, other = child_run
    Run(f"{run.name}-first").begin()
    assert len(other.left()) == 3
    os.kill(int((other.directory / "watcher").read_text()), signal.SIGKILL)
    child.kill()
    child.wait()
    Run(f"{run.name}-second").begin()
    assert other.left() == []
