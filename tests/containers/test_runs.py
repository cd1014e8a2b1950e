"""A run of the tests leaves nothing on the daemon, however it ends."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from .runs import Run

pytestmark = pytest.mark.docker

CHILD = """
import signal, subprocess, sys, time
from containers.runs import Run
# Who started the tests may have it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
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

WORKER = """
import time
from containers.runs import Run
run = Run.current()
run.begin()
print("joined", flush=True)
time.sleep(6)
run.make("volume")
"""
"""Goes on for longer than a watcher looks at a daemon on which nothing happens."""

FIRST = """
import os, subprocess, sys, time
from containers.runs import Run
print(Run.current().name, flush=True)
environment = os.environ | {"PYTEST_XDIST_WORKER": "gw0"}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
time.sleep(600)
"""


@contextmanager
def first_process(script: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Run]]:
    """A process that is a run of its own, whose name it prints; both end with the block."""
    environment = dict(os.environ)
    environment.pop("PYTEST_XDIST_WORKER", None)
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=environment,
    ) as child:
        assert child.stdout is not None
        with ExitStack() as ends:
            ends.callback(child.kill)
            run = Run(child.stdout.readline().strip())
            ends.callback(run.remove)
            ends.callback(child.kill)
            yield child, run


@pytest.fixture
def child_run(connector_image: str) -> Iterator[tuple[subprocess.Popen[str], Run]]:
    """A run with a container, a network and a volume."""
    with first_process(CHILD, connector_image) as started:
        yield started


def wait_until_nothing_is_left(run: Run) -> None:
    deadline = time.monotonic() + 60
    while run.left() or run.directory.exists():
        assert time.monotonic() < deadline, f"left after a minute: {run.left()}"
        time.sleep(0.2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_nothing_is_left_by_a_run_that_was_ended(
    child_run: tuple[subprocess.Popen[str], Run], number: signal.Signals
) -> None:
    """What a killed run started is removed by its watcher: containers, networks, volumes."""
    child, run = child_run
    assert sorted(name.split()[0] for name in run.left()) == ["container", "network", "volume"]
    child.send_signal(number)
    child.wait(60)
    wait_until_nothing_is_left(run)


@pytest.mark.usefixtures("run")
def test_nothing_is_left_by_workers_that_live_on() -> None:
    """What a worker makes seconds after its run was killed is removed by the watcher, too."""
    with first_process(FIRST, WORKER) as (child, run):
        assert child.stdout is not None
        assert child.stdout.readline() == "joined\n"
        child.kill()
        child.stdout.read()  # until the worker has ended
        assert [name.split()[0] for name in run.left()] == ["volume"]
        wait_until_nothing_is_left(run)


def test_a_killed_run_takes_no_more_processes(run: Run) -> None:
    """A worker that comes to a run whose first process has ended is refused."""
    with subprocess.Popen(["true"]) as ended:
        pass
    boot, namespace, _, start, *_ = run.name.split("-")
    late = Run(f"{boot}-{namespace}-{ended.pid}-{start}")
    with pytest.raises(RuntimeError, match="was killed"):
        late.begin()
    late.remove()


def test_begin_removes_what_dead_runs_left(
    child_run: tuple[subprocess.Popen[str], Run], run: Run
) -> None:
    """A run that begins removes what a dead run left, and nothing of a live one."""
    child, other = child_run
    Run(f"{run.name}-first").begin()
    assert len(other.left()) == 3
    os.kill(int((other.directory / "watcher").read_text()), signal.SIGKILL)
    child.kill()
    child.wait(60)
    Run(f"{run.name}-second").begin()
    assert other.left() == []


def other(run: Run, position: int) -> Run:
    """A run whose name differs from `run`'s in one part."""
    parts = run.name.split("-")
    parts[position] = secrets.token_hex(4)
    return Run("-".join(parts))


def test_runs_that_cannot_be_judged_are_alive(run: Run) -> None:
    """A run of another process namespace is alive, and one of another boot unless it began here."""
    other_namespace, other_boot = other(run, 1), other(run, 0)
    assert other_namespace.is_alive()
    assert other_boot.is_alive()
    other_boot.directory.mkdir()
    assert not other_boot.is_alive()
    other_boot.remove()


@pytest.mark.parametrize("name", ["", ".", "1-2", "../0123abcd-0123abcd-1-2"])
def test_names_of_no_run_are_refused(name: str) -> None:
    """A name that could stand for all runs, or for another directory, is refused."""
    with pytest.raises(ValueError, match="is no name of a run"):
        Run(name)
