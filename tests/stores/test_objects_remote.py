"""What NIXL's plug-ins and obstore are told of a bucket, and how many requests are in flight."""

from typing import Any

import pytest

from hicache_nixl.bucket import Bucket, CredentialSource, SecretText
from hicache_nixl.credentials import CredentialResolver
from hicache_nixl.errors import StoreError
from hicache_nixl.stores.objects_engines import choose_threads, plan_engines
from hicache_nixl.stores.objects_remote import engine_parameters, make_store
from s3_access import ADMIN
from s3_server import S3Address, bucket

KEYS = CredentialSource(access_key=SecretText("AK"), secret_key=SecretText("SK"))
ACCOUNT_KEY = "QWJjZGVmZ2g="


def parameters(place: Bucket, threads: int = 8) -> dict[str, str]:
    return engine_parameters(place, CredentialResolver.of(place).current(), threads)


def azure(text: str | None, endpoint: str | None = None) -> Bucket:
    source = CredentialSource(connection_string=None if text is None else SecretText(text))
    return Bucket("azure", "pages", "p", endpoint, credentials=source)


def remote(place: Bucket) -> Any:
    return make_store(place, CredentialResolver.of(place).current(), timeout_s=5.0)


def test_obj_is_told_everything() -> None:
    """What NIXL would take from elsewhere otherwise, credentials among it, is said."""
    place = Bucket("s3", "b", "p", "http://h:9000", "eu-west-1", credentials=KEYS)
    assert parameters(place) == {
        "access_key": "AK",
        "secret_key": "SK",
        "bucket": "b",
        "endpoint_override": "http://h:9000",
        "scheme": "http",
        "region": "eu-west-1",
        "use_virtual_addressing": "false",
        "num_threads": "8",
        "req_checksum": "required",
        "resp_checksum": "required",
    }


def test_obj_is_told_what_is_special() -> None:
    """A session token, a CA, virtual addressing, AWS itself; and what the user gave wins."""
    source = CredentialSource(
        access_key=SecretText("AK"), secret_key=SecretText("SK"), session_token=SecretText("ST")
    )
    place = Bucket(
        "s3",
        "b",
        "p",
        virtual_addressing=True,
        ca_bundle="/ca.pem",
        credentials=source,
        nixl=(("num_threads", "3"), ("crtMinLimit", "1"), ("resp_checksum", "supported")),
    )
    assert parameters(place) == {
        "access_key": "AK",
        "secret_key": "SK",
        "session_token": "ST",
        "bucket": "b",
        "scheme": "https",
        "region": "us-east-1",
        "use_virtual_addressing": "true",
        "ca_bundle": "/ca.pem",
        "num_threads": "3",
        "crtMinLimit": "1",
        "req_checksum": "required",
        "resp_checksum": "supported",
    }


def test_azure_is_told_its_own_names() -> None:
    """A connection string, or the account's URL and Azure's own chain."""
    text = f"AccountName=acct;AccountKey={ACCOUNT_KEY};EndpointSuffix=core.windows.net"
    assert parameters(azure(text)) == {
        "connection_string": text,
        "container_name": "pages",
        "num_threads": "8",
    }
    assert parameters(azure(None, "https://acct.blob.core.windows.net")) == {
        "account_url": "https://acct.blob.core.windows.net",
        "container_name": "pages",
        "num_threads": "8",
    }


@pytest.mark.parametrize(
    ("text", "endpoint", "expected"),
    [
        (
            f"DefaultEndpointsProtocol=https;AccountName=acct;AccountKey={ACCOUNT_KEY};"
            "EndpointSuffix=core.chinacloudapi.cn",
            None,
            {
                "account_name": "acct",
                "account_key": ACCOUNT_KEY,
                "endpoint": "https://acct.blob.core.chinacloudapi.cn",
            },
        ),
        (
            f"BlobEndpoint=http://127.0.0.1:10000/acct;AccountName=acct;AccountKey={ACCOUNT_KEY}",
            None,
            {
                "account_name": "acct",
                "account_key": ACCOUNT_KEY,
                "endpoint": "http://127.0.0.1:10000/acct",
            },
        ),
        (None, "https://acct.blob.x", {"account_name": "acct", "endpoint": "https://acct.blob.x"}),
    ],
    ids=["suffix", "endpoint", "url"],
)
def test_obstore_is_told_the_parts_of_a_connection_string(
    text: str | None, endpoint: str | None, expected: dict[str, str]
) -> None:
    """It knows no connection strings. An "=" at the end of a key is part of it."""
    config = dict(remote(azure(text, endpoint)).config)
    assert {name: config.get(name) for name in expected} == expected


def test_azure_without_an_account_is_refused() -> None:
    """Neither URL nor connection string."""
    with pytest.raises(StoreError, match=r"azure://pages/p .*: no account; give the account's URL"):
        remote(azure(None))


def test_obstore_is_told_its_endpoint() -> None:
    """Also AWS's, which it would take from the environment otherwise; with virtual addressing the
    bucket is part of the host."""
    place = Bucket("s3", "b", "", region="cn-north-1", credentials=KEYS)
    assert remote(place).config["endpoint"] == "https://s3.cn-north-1.amazonaws.com.cn"
    place = Bucket("s3", "b", "", "http://h:9000", virtual_addressing=True, credentials=KEYS)
    assert remote(place).config["endpoint"] == "http://b.h:9000"
    place = Bucket("s3", "b", "", virtual_addressing=True, credentials=KEYS)
    assert remote(place).config["endpoint"] == "https://b.s3.us-east-1.amazonaws.com"


def test_no_repr_shows_a_secret(s3: S3Address) -> None:
    """Not of what is made from credentials."""
    place = bucket(s3, "any")
    plan = plan_engines(place, CredentialResolver.of(place))
    assert plan.parameters["secret_key"] == ADMIN.secret_key
    assert ADMIN.secret_key not in repr(plan)
    assert ADMIN.secret_key not in repr(remote(place))


@pytest.mark.parametrize(
    ("round_trip_s", "cores", "threads"),
    [(0.0005, 2, 16), (0.0005, 16, 34), (0.01, 2, 34), (0.1, 8, 64)],
)
def test_far_buckets_get_more_requests(round_trip_s: float, cores: int, threads: int) -> None:
    """Threads mostly wait: their number follows the round trip, within bounds."""
    assert choose_threads(round_trip_s, cores) == threads


def test_a_plan_says_what_was_chosen(s3: S3Address) -> None:
    """And that it was not chosen, where the user did."""
    place = bucket(s3, "any")
    plan = plan_engines(place, CredentialResolver.of(place))
    assert plan.plugin == "OBJ"
    assert plan.parameters["num_threads"] == str(plan.threads)
    assert plan.note.startswith(f"{plan.threads} requests at once: a round trip takes ")
    place = bucket(s3, "any", nixl=[("num_threads", "5")])
    plan = plan_engines(place, CredentialResolver.of(place))
    assert (plan.threads, plan.note) == (5, "5 requests at once, as set by num_threads")


def test_a_plan_needs_a_server(s3: S3Address) -> None:
    """Nobody there is an error; whether the bucket is, is not looked at."""
    place = bucket(s3, "any", endpoint="http://127.0.0.1:1")
    with pytest.raises(StoreError, match="the connection is refused"):
        plan_engines(place, CredentialResolver.of(place))
