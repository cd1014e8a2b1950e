"""S3 servers in containers: MinIO, or SeaweedFS where MinIO's image is not here and cannot be
pulled. Tests see one interface.
"""

import os
import re
import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import yaml

from s3_access import ADMIN, READER, Identity, S3Access

from .harness import TESTS, ProjectContainer
from .runs import Run

ALIAS = "objectstore"
"""What containers call the S3 server on their network."""
PORT = 9000
START_TIMEOUT = 120.0
PULL_TIMEOUT = 300.0
COMPOSE = TESTS.parent / "docker" / "compose"


@dataclass(frozen=True)
class S3Place(S3Access):
    """Where a running server is reached."""

    kind: str
    """MinIO or SeaweedFS."""
    url: str
    """From this machine."""
    network: str
    """The name of the network on which containers reach it as ALIAS."""

    @property
    def endpoint(self) -> str:
        return self.url


def store_url(bucket: str, prefix: str = "pages", **parameters: str) -> str:
    """A store in a bucket, as containers on the server's network write it."""
    given = {"endpoint": f"http://{ALIAS}:{PORT}", "addressing": "path", **parameters}
    query = "&".join(f"{name}={value}" for name, value in given.items())
    return f"s3://{bucket}/{prefix}?{query}"


class S3Container(ProjectContainer):
    """A server that knows ADMIN and READER, and makes no bucket by itself."""

    kind: str

    def __init__(self, run: Run, image: str, **options: Any) -> None:
        super().__init__(run, image, **options)
        self.with_exposed_ports(PORT)

    @property
    def url(self) -> str:
        """Where this machine reaches it; another one after each start."""
        return f"http://{self.get_container_host_ip()}:{self.get_exposed_port(PORT)}"

    def place(self) -> S3Place:
        """How clients reach it until its next start."""
        networks = self.container.attrs["NetworkSettings"]["Networks"]
        return S3Place(self.kind, self.url, next(iter(networks)))

    def serve(self) -> Self:
        """Block until it serves its clients."""
        self.wait_healthy(START_TIMEOUT)
        self.add_reader()
        return self

    @abstractmethod
    def add_reader(self) -> None:
        """Make READER known, if it is not yet."""


class SeaweedFS(S3Container):
    """The project's own image."""

    kind = "SeaweedFS"

    def __init__(self, run: Run, image: str, buckets: Sequence[str] = (), **options: Any) -> None:
        super().__init__(run, image, **options)
        self.with_envs(
            S3_BUCKETS=" ".join(buckets),
            S3_CREDENTIALS_FILE="/secrets/owner",
            S3_READER_FILE="/secrets/reader",
        )
        for name, identity in (("owner", ADMIN), ("reader", READER)):
            self.with_copy_into_container(identity.file(), f"/secrets/{name}", 0o644)

    def add_reader(self) -> None:
        """It has READER from its start."""


class MinIO(S3Container):
    """The image and the start script of compose.yaml."""

    kind = "MinIO"

    def __init__(self, run: Run, image: str, **options: Any) -> None:
        service = _minio_service()
        # The health check is a command: its times are Compose's.
        command = " ".join(service["healthcheck"]["test"][1:])
        super().__init__(
            run,
            image,
            entrypoint=service["entrypoint"],
            healthcheck={"test": ["CMD-SHELL", command], "interval": 1_000_000_000, "retries": 60},
            **options,
        )
        self.with_copy_into_container(COMPOSE / "minio.sh", "/minio.sh", 0o755)
        self.with_copy_into_container(ADMIN.file(), "/run/secrets/s3", 0o644)

    def add_reader(self) -> None:
        self._must_call_with(ADMIN, f'mc alias set local http://127.0.0.1:{PORT} "$KEY" "$SECRET"')
        self._must_call_with(READER, 'mc admin user add local "$KEY" "$SECRET"')
        # Repeated after a restart, where it says that nothing changed.
        self.call(
            "mc", "admin", "policy", "attach", "local", "readonly", "--user", READER.access_key
        )

    def _must_call_with(self, identity: Identity, script: str) -> None:
        keys = {"KEY": identity.access_key, "SECRET": identity.secret_key}
        self.must_call("sh", "-c", script, environment=keys)


KINDS = {"minio": MinIO.kind, "seaweedfs": SeaweedFS.kind}
"""By what OBJECT_STORE says."""


def _minio_service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "minio.yaml").read_text())
    service: dict[str, Any] = found["services"]["objectstore"]
    return service


def minio_image() -> str:
    """The image that compose.yaml takes."""
    return os.environ.get("MINIO_IMAGE") or re.sub(
        r"\$\{\w+:-([^}]*)\}", r"\1", str(_minio_service()["image"])
    )


def choose(wanted: str) -> tuple[str, str]:
    """A kind of server, and why. `wanted` is `minio`, `seaweedfs`, or empty for what can be had:
    then MinIO's image is pulled if it can be. Blocks for minutes at most."""
    if wanted:
        if (kind := KINDS.get(wanted)) is None:
            raise ValueError(f"OBJECT_STORE is {wanted!r}: say {' or '.join(KINDS)}")
        return kind, "asked for by OBJECT_STORE"
    image = minio_image()
    if _docker("image", "inspect", image).returncode == 0:
        return MinIO.kind, f"{image} is here"
    try:
        pulled = _docker("pull", "--quiet", image, timeout=PULL_TIMEOUT)
    except subprocess.TimeoutExpired:
        return SeaweedFS.kind, f"{image} could not be pulled in {PULL_TIMEOUT:.0f} s"
    if pulled.returncode == 0:
        return MinIO.kind, f"{image} was pulled"
    said = ["docker pull said nothing", *pulled.stderr.strip().splitlines()][-1]
    return SeaweedFS.kind, f"{image} cannot be pulled: {said}"


def _docker(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, check=False, timeout=timeout
    )
