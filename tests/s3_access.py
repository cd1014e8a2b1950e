"""Who uses S3 servers in tests, and how a test itself looks into one."""

import contextlib
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

REGION = "us-east-1"


@dataclass(frozen=True)
class Identity:
    """What a client signs with."""

    access_key: str
    secret_key: str

    def file(self) -> bytes:
        """As the AWS tools write it."""
        return (
            f"[default]\naws_access_key_id = {self.access_key}\n"
            f"aws_secret_access_key = {self.secret_key}\n"
        ).encode()


ADMIN = Identity("test-admin", "7Xq1/admin+of/these=tests/aBcDeFgHiJ")
READER = Identity("test-reader", "9Kd4/reader+of/these=tests/kLmNoPqR")
"""May read and list, not write."""
STRANGER = Identity("test-stranger", "2Vn8/stranger+to/these=tests/sTuVw")
"""Unknown to the server."""


def store_url(endpoint: str, bucket: str, prefix: str, **parameters: str) -> str:
    """A store as in the settings."""
    given = {"endpoint": endpoint, "region": REGION, "addressing": "path", **parameters}
    query = "&".join(f"{name}={value}" for name, value in given.items())
    return f"s3://{bucket}/{prefix}?{query}"


class S3Access(ABC):
    """A running server, as tests see it."""

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Its URL."""

    @property
    def verify(self) -> str | None:
        """The file of the CA that signed its certificate; None for the system's."""
        return None

    def client(
        self, identity: Identity = ADMIN, *, endpoint: str | None = None, timeout_s: float = 20.0
    ) -> Any:
        """A boto3 client that tries once."""
        return boto3.client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            aws_access_key_id=identity.access_key,
            aws_secret_access_key=identity.secret_key,
            region_name=REGION,
            verify=self.verify,
            config=Config(
                retries={"total_max_attempts": 1},
                connect_timeout=min(2.0, timeout_s),
                read_timeout=timeout_s,
                s3={"addressing_style": "path"},
            ),
        )

    def make_bucket(self, hint: str = "test") -> str:
        """Create an empty bucket with a name of its own."""
        name = f"{hint}-{secrets.token_hex(6)}"
        self.client().create_bucket(Bucket=name)
        return name

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket and what is in it; harmless when it is gone."""
        client = self.client()
        with contextlib.suppress(ClientError):
            try:
                client.delete_bucket(Bucket=name)
            except client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] != "BucketNotEmpty":
                    raise
                # SeaweedFS takes its objects along, others want it empty.
                for key in self.keys(name):
                    client.delete_object(Bucket=name, Key=key)
                client.delete_bucket(Bucket=name)

    def keys(self, bucket_name: str, prefix: str = "") -> list[str]:
        """The names of all objects below `prefix`, sorted."""
        pages = self.client().get_paginator("list_objects_v2").paginate
        return sorted(
            item["Key"]
            for page in pages(Bucket=bucket_name, Prefix=prefix)
            for item in page.get("Contents", ())
        )
