"""compose.yaml in every combination of its profiles and overrides."""

import json
import os
import subprocess
from itertools import product
from typing import Any

import pytest

from .harness import TESTS
from .runs import Run

pytestmark = pytest.mark.docker

PROFILES = ("s3", "slab", "gpu")
SERVERS = ("minio", "seaweedfs")
FILES = (("compose.yaml",), ("compose.yaml", "compose.ports.yaml"))


def configuration(profile: str, server: str, files: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """What Compose makes of it, and what it complains about."""
    options = [option for file in files for option in ("--file", file)]
    ran = subprocess.run(
        ["docker", "compose", *options, "--profile", profile, "config", "--format", "json"],
        cwd=TESTS.parent,
        env=os.environ | {"OBJECT_STORE": server},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout), ran.stderr


@pytest.mark.parametrize(("profile", "server", "files"), list(product(PROFILES, SERVERS, FILES)))
def test_every_combination_is_clean(
    run: Run, profile: str, server: str, files: tuple[str, ...]
) -> None:
    """Compose accepts each combination without a warning; images have a tag that is not latest, and
    those that are built are never looked for in a registry; ports are open on this machine alone,
    and only where they were asked for."""
    found, complaints = configuration(profile, server, files)
    assert complaints == ""
    published = 0
    for name, service in found["services"].items():
        tag = service["image"].rpartition(":")[2]
        assert tag not in ("", "latest"), name
        assert service.get("pull_policy") == ("never" if "build" in service else None), name
        for port in service.get("ports", ()):
            published += 1
            assert port["host_ip"] == "127.0.0.1", name
    assert (published > 0) == (len(files) == 2)


def test_plain_up_is_s3_on_a_cpu(run: Run) -> None:
    """`docker compose up` without a profile is the engine on a CPU, an S3 server and e2e."""
    ran = subprocess.run(
        ["docker", "compose", "config", "--services"],
        cwd=TESTS.parent,
        env={name: value for name, value in os.environ.items() if name != "COMPOSE_PROFILES"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(ran.stdout.split()) == ["bucket", "e2e", "engine", "objectstore"]
