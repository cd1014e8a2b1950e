"""Fixtures of the chart's tests."""

import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from containers import harness
from containers.conftest import run as run
from containers.podman import Podman
from containers.runs import Run

from .charts import PROJECT


@pytest.fixture(autouse=True)
def _has_tools(request: pytest.FixtureRequest, tools_missing: str) -> None:
    if tools_missing and request.node.get_closest_marker("helm"):
        pytest.skip(tools_missing)


@pytest.fixture(scope="session")
def tools_missing() -> str:
    """What is missing of helm and kubectl, or ""."""
    ran = subprocess.run(
        [str(PROJECT / "ci" / "helm-tools.sh"), "check"], capture_output=True, text=True
    )
    return ran.stderr.strip() if ran.returncode else ""


@pytest.fixture(scope="session")
def podman(run: Run) -> Podman:
    """Podman for this run, with the pods' images to be loaded; skips where it cannot run pods."""
    if os.geteuid() != 0:
        pytest.skip("running pods as a node does takes root")
    ran = subprocess.run(
        [str(PROJECT / "ci" / "podman.sh"), "check"], capture_output=True, text=True
    )
    if ran.returncode != 0:
        pytest.skip(ran.stderr.strip())
    run.once("podman", run.podman.begin)
    return run.podman


@pytest.fixture
def podman_network(podman: Podman) -> Iterator[str]:
    """A new network; pods on it must have ended."""
    with podman.network() as name:
        yield name


@pytest.fixture(scope="session")
def have(run: Run, podman: Podman) -> Callable[[str], str]:
    """Have an image of ci/images.sh in podman; its name there."""

    def share(name: str) -> str:
        # Named as in the suite of containers, which builds the same ones.
        built = "engine-image" if name == "sglang-cpu" else f"{name}-image"
        image = run.once(built, partial(harness.image, name))
        make = partial(podman.share, image, f"hicache-nixl/{name}:tested")
        shared: str = run.once(f"podman-{name}", make)
        return shared

    return share
