"""Claims about the URLs of object stores: what is accepted, in which form, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configurations import SECRET
from hicache_nixl.errors import SettingsError
from hicache_nixl.store_url import StoreUrl, parse_store_urls


def parse(text: str) -> StoreUrl:
    (url,) = parse_store_urls(text)
    return url


def refusal(value: Any) -> str:
    """The one line by which a URL is refused."""
    with pytest.raises(SettingsError) as caught:
        parse_store_urls(value)
    message = str(caught.value)
    assert "\n" not in message
    assert SECRET not in message
    return message


@pytest.mark.parametrize(
    ("text", "bucket", "prefix", "params"),
    [
        ("s3://bucket", "bucket", "", {}),
        ("S3://bucket/", "bucket", "", {}),
        ("s3://my.bucket-1/team/hi_cache=v2/", "my.bucket-1", "team/hi_cache=v2", {}),
        ("s3://b-1/p?endpoint=http://Minio:9000/", "b-1", "p", {"endpoint": "http://minio:9000"}),
        ("s3://b-1?endpoint_url=https://[::1]:9000", "b-1", "", {"endpoint": "https://[::1]:9000"}),
        ("s3://b-1?region=eu-west-1&addressing=virtual", "b-1", "", None),
        ("s3://b-1?num_threads=8&ca_bundle=/etc/ca.pem", "b-1", "", None),
        ("azure://container/p?account_url=https://a.blob.core.windows.net", "container", "p", None),
        ("azure://cc1?account_url=http://127.0.0.1:10000/devstore&requests=auto", "cc1", "", None),
    ],
)
def test_accepted(text: str, bucket: str, prefix: str, params: dict[str, str] | None) -> None:
    """A URL gives bucket, prefix and canonical parameters, and its text is read back as itself."""
    url = parse(text)
    assert (url.bucket, url.prefix) == (bucket, prefix)
    assert not url.is_directory
    if params is not None:
        assert dict(url.params) == params
    assert parse(str(url)) == url


def test_other_names_of_parameters() -> None:
    """What other tools call a parameter is read under our name."""
    url = parse("s3://b-1?endpoint_override=http://h&num_threads=8&addressing_style=path")
    assert dict(url.params) == {"endpoint": "http://h", "requests": "8", "addressing": "path"}


_names = st.from_regex(r"[a-z0-9](-?[a-z0-9]){2,20}", fullmatch=True)
_prefixes = st.lists(
    st.from_regex(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,8}", fullmatch=True), max_size=3
)


@given(
    bucket=_names,
    prefix=_prefixes,
    host=_names,
    port=st.none() | st.integers(1, 65535),
    extra=st.fixed_dictionaries(
        {},
        optional={
            "region": _names,
            "addressing": st.sampled_from(["path", "virtual"]),
            "requests": st.integers(1, 1024).map(str),
            "ca_bundle": st.just("/etc/ssl/my certs&more,%.pem"),
        },
    ),
)
def test_round_trip(
    bucket: str, prefix: list[str], host: str, port: int | None, extra: dict[str, str]
) -> None:
    """Every location survives being written as text, whatever stands in its parameters."""
    endpoint = f"http://{host}" + (f":{port}" if port else "")
    url = StoreUrl("s3", "/".join([bucket, *prefix]), (("endpoint", endpoint), *extra.items()))
    assert parse(str(url)) == url


@pytest.mark.parametrize(
    "name",
    ["ab", "a" * 64, "Bucket", "my_bucket", "-bucket", "bucket-", ".bucket", "bucket.", "a..b"],
)
def test_refused_buckets(name: str) -> None:
    """A name that S3 would not take as a bucket's is refused with the rule."""
    message = refusal(f"s3://{name}/prefix")
    assert "3 to 63 small letters" in message


@pytest.mark.parametrize("name", ["ab", "a" * 64, "Container", "a.b.c", "a--b", "-abc", "abc-"])
def test_refused_containers(name: str) -> None:
    """The same for Azure's rule for containers."""
    assert "is not the name of a container" in refusal(f"azure://{name}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://192.168.0.1/bucket", "endpoint=http://192.168.0.1"),
        ("s3://minio:9000/bucket", "s3://bucket/prefix?endpoint=http://minio:9000"),
        ("s3://[b", "is not a store URL"),
        ("s3://bucket/a//b", "single slashes"),
        ("s3://bucket/../b", "single slashes"),
        ("s3://bucket/a b", "single slashes"),
        ("s3://bucket/ü", "single slashes"),
        ("s3://bucket/a~b", "single slashes"),
        (f"s3://bucket/{'a' * 513}", "longer than 512"),
        ("s3://bucket?region=a&region=b", "twice"),
        ("s3://bucket?endpoint=http://h&endpoint_url=http://i", "are the same"),
        ("s3://bucket?endpont=http://h", "did you mean endpoint?"),
        ("s3://bucket?zzz=1", "known are endpoint, region, addressing, ca_bundle, requests"),
        ("s3://bucket?account_url=https://h", "unknown"),
        ("azure://container?endpoint=https://h", "unknown"),
        ("s3://bucket?endpoint=", "is empty"),
        ("s3://bucket?endpoint=minio:9000", 'write "http://minio:9000"'),
        ("s3://bucket?endpoint=minio", 'write "http://minio"'),
        ("s3://bucket?endpoint=ftp://minio", "not an http or https URL"),
        ("s3://bucket?endpoint=http://", "not an http or https URL"),
        ("s3://bucket?endpoint=http://minio:port", "is not a URL"),
        ("s3://bucket?endpoint=http://minio:9000/bucket", "stand before the parameters"),
        ("s3://bucket?endpoint=http://minio%3Fx=1", "more than a server"),
        ("s3://bucket?region=eu west", "is not a region"),
        ("s3://bucket?region=a%26b", "is not a region"),
        ("s3://bucket?addressing=vhost", "choose one of path, virtual"),
        ("s3://bucket?ca_bundle=ca.pem", "absolute name"),
        ("s3://bucket?requests=0", "from 1 to 1024"),
        ("s3://bucket?requests=all", '"auto"'),
        ("s3://bucket,s3://other", "name one store"),
        (["s3://bucket", "slab:///a"], "only slab stores can be striped"),
        ("s3://bucket?region=a,s3://bucket?region=b", "are the same"),
        ("s3://bucket#x", "%23"),
    ],
)
def test_refused(text: Any, words: str) -> None:
    """What no object store could be reached by is refused in one line, with what to write."""
    assert words in refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        f"s3://AKIA:{SECRET}@bucket",
        f"s3://bucket?secret_key={SECRET}",
        f"s3://bucket?aws_secret_access_key={SECRET}",
        f"s3://bucket?session_token={SECRET}",
        f"s3://bucket?endpoint=http://AKIA:{SECRET}@minio",
        f"s3://bucket?endpoint=http://minio/{SECRET}@x",
        f"azure://container?account_key={SECRET}",
        f"azure://container?sas={SECRET}",
        f"azure://container?account_url=https://a.net?sig={SECRET}",
        f"azure://container?account_url=https://a.net%3Fsv=1%26sig={SECRET}",
        f"azure://container?connection_string=AccountKey={SECRET}",
        f"s3://{SECRET * 4}/prefix?region=secret_key={SECRET}",
    ],
)
def test_credentials_are_refused_unseen(text: str) -> None:
    """A URL that carries a credential is refused without showing it."""
    refusal(text)
