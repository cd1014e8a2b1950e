"""The S3 server's image behaves as a real S3 server does where tests of failures rely on it."""

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from .harness import ObjectStoreContainer
from .runs import Run

pytestmark = pytest.mark.docker

START_TIMEOUT = 120.0


@pytest.fixture
def server(run: Run, objectstore_image: str) -> Iterator[ObjectStoreContainer]:
    """A server of this test's own with the buckets one and two."""
    with ObjectStoreContainer(run, objectstore_image, ["one", "two"]) as container:
        yield container.wait_healthy(START_TIMEOUT)


def client(server: ObjectStoreContainer, access_key: str, secret_key: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(retries={"total_max_attempts": 1}),
    )


def test_who_may_do_what(server: ObjectStoreContainer) -> None:
    """The owner writes, the reader only reads, a wrong key and a missing bucket are refused."""
    owner = client(server, *server.OWNER)
    reader = client(server, *server.READER)
    assert [bucket["Name"] for bucket in owner.list_buckets()["Buckets"]] == ["one", "two"]
    owner.put_object(Bucket="one", Key="a/b", Body=b"page")
    assert reader.get_object(Bucket="one", Key="a/b")["Body"].read() == b"page"

    def refusal(of: Any, **to: Any) -> str:
        with pytest.raises(ClientError) as caught:
            of.put_object(**to, Body=b"")
        return str(caught.value.response["Error"]["Code"])

    assert refusal(reader, Bucket="one", Key="c") == "AccessDenied"
    assert refusal(owner, Bucket="three", Key="c") == "NoSuchBucket"
    wrong = client(server, server.OWNER[0], "wrong")
    assert refusal(wrong, Bucket="one", Key="c") == "SignatureDoesNotMatch"


def test_killed_server_comes_back_with_its_objects(server: ObjectStoreContainer) -> None:
    """After SIGKILL and a start the server serves what it had acknowledged."""
    body = bytes(range(256)) * 4096
    client(server, *server.OWNER).put_object(Bucket="one", Key="page", Body=body)
    server.kill()
    server.get_wrapped_container().start()
    server.wait_healthy(START_TIMEOUT)
    found = client(server, *server.OWNER).get_object(Bucket="one", Key="page")
    assert found["Body"].read() == body


def test_no_secret_in_the_log(server: ObjectStoreContainer) -> None:
    """The server's log names nobody's secret."""
    assert not any(secret in server.log() for _, secret in (server.OWNER, server.READER))
