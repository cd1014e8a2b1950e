"""The S3 server's image behaves as a real S3 server does where tests of failures rely on it."""

from contextlib import ExitStack
from typing import Any

import pytest
from botocore.exceptions import ClientError

from s3_access import ADMIN, READER, Identity

from .runs import Run
from .s3_servers import S3Container, S3Place, SeaweedFS

pytestmark = pytest.mark.docker


def test_who_may_do_what(s3: S3Place, bucket: str) -> None:
    """The owner writes, the reader only reads, a wrong key and a missing bucket are refused."""
    owner, reader = s3.client(), s3.client(READER)
    assert bucket in [found["Name"] for found in owner.list_buckets()["Buckets"]]
    owner.put_object(Bucket=bucket, Key="a/b", Body=b"page")
    assert reader.get_object(Bucket=bucket, Key="a/b")["Body"].read() == b"page"

    def refusal(of: Any, **to: Any) -> str:
        with pytest.raises(ClientError) as caught:
            of.put_object(**to, Body=b"")
        return str(caught.value.response["Error"]["Code"])

    assert refusal(reader, Bucket=bucket, Key="c") == "AccessDenied"
    assert refusal(owner, Bucket="three", Key="c") == "NoSuchBucket"
    wrong = s3.client(Identity(ADMIN.access_key, "wrong"))
    assert refusal(wrong, Bucket=bucket, Key="c") == "SignatureDoesNotMatch"


def test_buckets_that_are_asked_for(
    run: Run, objectstore_image: str, network: str, held: ExitStack
) -> None:
    """The image makes the buckets in S3_BUCKETS, and no other."""
    server = held.enter_context(SeaweedFS(run, objectstore_image, ["one", "two"]).on(network))
    found = server.serve().place().client().list_buckets()["Buckets"]
    assert [bucket["Name"] for bucket in found] == ["one", "two"]


def test_killed_server_comes_back_with_its_objects(own_s3: S3Container) -> None:
    """After SIGKILL and a start the server serves what it had acknowledged."""
    body = bytes(range(256)) * 4096
    place = own_s3.place()
    bucket = place.make_bucket()
    place.client().put_object(Bucket=bucket, Key="page", Body=body)
    own_s3.kill()
    own_s3.get_wrapped_container().start()
    found = own_s3.serve().place().client().get_object(Bucket=bucket, Key="page")
    assert found["Body"].read() == body


def test_no_secret_in_the_log(own_s3: S3Container) -> None:
    """The server's log names nobody's secret."""
    own_s3.place().make_bucket()
    assert not any(who.secret_key in own_s3.log() for who in (ADMIN, READER))
