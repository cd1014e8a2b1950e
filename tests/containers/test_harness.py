"""The harness says what was wrong, in a line that names the fix and no secret."""

import subprocess
from typing import Any

import pytest

from . import harness, s3_servers
from .conftest import StartConnector
from .harness import STORE, ContainerError

pytestmark = pytest.mark.docker


@pytest.mark.usefixtures("run")
def test_missing_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that TAG asks for and that is not here is an error, and is not pulled."""
    monkeypatch.setenv("TAG", "no-such-tag")
    with pytest.raises(ContainerError) as caught:
        harness.image("connector")
    assert str(caught.value) == (
        "no image hicache-nixl/connector:no-such-tag: "
        "build it with TAG=no-such-tag ci/images.sh connector"
    )


def test_command_that_fails(start_connector: StartConnector) -> None:
    """The error of a command has the command and what it printed, and not its environment."""
    with pytest.raises(ContainerError, match="ended with status 3") as caught:
        start_connector().must_call(
            "sh", "-c", "echo said; exit ${#SECRET}", environment={"SECRET": "xyz"}
        )
    assert "said" in str(caught.value)
    assert "xyz" not in str(caught.value)


def test_container_that_does_not_end(start_connector: StartConnector) -> None:
    """Who waits too long for a container's end gets its log."""
    writer = start_connector("put_for_ever", STORE, 1, 64 << 20, {})
    (line,) = writer.wait_lines(1, timeout=60)[:1]
    with pytest.raises(ContainerError, match="has not ended in 1 s; the end of its log") as caught:
        writer.wait_end(1.0)
    assert line[:1] in str(caught.value)


def test_container_that_ends_badly(start_connector: StartConnector) -> None:
    """A container that must end well, and does not, is an error with its log."""
    with pytest.raises(ContainerError, match="KeyError: 'no_such_function'"):
        start_connector("no_such_function").must_end(timeout=60)


@pytest.mark.parametrize(
    ("pulled", "kind", "why"),
    [
        ((0, ""), "MinIO", "image was pulled"),
        ((1, ""), "SeaweedFS", "image cannot be pulled: docker pull said nothing"),
        ((1, "first\nlast\n"), "SeaweedFS", "image cannot be pulled: last"),
    ],
)
def test_choice_of_the_s3_server(
    monkeypatch: pytest.MonkeyPatch, pulled: tuple[int, str], kind: str, why: str
) -> None:
    """Unless one is asked for, it is MinIO where its image can be pulled, with the reason."""

    def docker(command: str, *_: str, **__: Any) -> subprocess.CompletedProcess[str]:
        status, said = pulled if command == "pull" else (1, "")
        return subprocess.CompletedProcess([], status, stdout="", stderr=said)

    monkeypatch.setenv("MINIO_IMAGE", "image")
    monkeypatch.setattr(s3_servers, "_docker", docker)
    assert s3_servers.choose("") == (kind, why)


def test_s3_server_that_is_asked_for() -> None:
    """OBJECT_STORE is one of two words."""
    assert s3_servers.choose("minio") == ("MinIO", "asked for by OBJECT_STORE")
    with pytest.raises(ValueError, match=r"^OBJECT_STORE is 'ceph': say minio or seaweedfs$"):
        s3_servers.choose("ceph")
