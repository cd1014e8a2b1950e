"""Buckets are made when asked for, and their expiry rules are set beside those of others."""

from collections.abc import Callable
from typing import Any

import pytest

from hicache_nixl.bucket import Bucket
from hicache_nixl.credentials import CredentialResolver
from hicache_nixl.errors import StoreError
from hicache_nixl.stores.objects_admin import (
    create_bucket,
    remove_lifecycle,
    set_lifecycle,
    show_lifecycle,
)
from s3_access import READER, STRANGER
from s3_server import S3Address, bucket

OTHERS = [
    {
        "ID": f"rule {days}",
        "Status": "Enabled",
        "Filter": {"Prefix": f"other{days}/"},
        "Expiration": {"Days": days},
    }
    for days in (3, 30)
]


def rules(s3: S3Address, name: str) -> list[Any]:
    return s3.client().get_bucket_lifecycle_configuration(Bucket=name)["Rules"]


def test_a_rule_is_set_shown_changed_and_removed(
    s3: S3Address, make_bucket: Callable[[], str]
) -> None:
    """For pages of the prefix alone; the last one leaves nothing behind."""
    place = bucket(s3, make_bucket(), "some/prefix")
    resolver = CredentialResolver.of(place)
    assert show_lifecycle(place, resolver) is None
    assert not remove_lifecycle(place, resolver)
    for days in (7, 14):
        set_lifecycle(place, resolver, days=days)
        assert show_lifecycle(place, resolver) == days
    (rule,) = rules(s3, place.name)
    assert rule["Expiration"] == {"Days": 14}
    assert rule["Filter"]["Prefix"] == "some/prefix/pages/"
    assert remove_lifecycle(place, resolver)
    assert show_lifecycle(place, resolver) is None


def test_rules_of_others_stay(s3: S3Address, make_bucket: Callable[[], str]) -> None:
    """Also those of another store in the bucket."""
    name = make_bucket()
    s3.client().put_bucket_lifecycle_configuration(
        Bucket=name, LifecycleConfiguration={"Rules": OTHERS}
    )
    before = rules(s3, name)
    places = [bucket(s3, name, prefix) for prefix in ("p", "p1")]
    resolver = CredentialResolver.of(places[0])
    for days, place in enumerate(places, 5):
        assert show_lifecycle(place, resolver) is None
        set_lifecycle(place, resolver, days=days)
    assert [show_lifecycle(place, resolver) for place in places] == [5, 6]
    assert len(rules(s3, name)) == 4
    for place in places:
        assert remove_lifecycle(place, resolver)
    assert rules(s3, name) == before


def test_a_bucket_is_made_once(s3: S3Address) -> None:
    """What is there is left as it is."""
    name = s3.make_bucket()
    s3.client().put_object(Bucket=name, Key="k", Body=b"")
    s3.remove_bucket(name)
    place = bucket(s3, name)
    try:
        assert create_bucket(place, CredentialResolver.of(place))
        s3.client().put_object(Bucket=name, Key="k", Body=b"")
        assert not create_bucket(place, CredentialResolver.of(place))
        assert s3.keys(name) == ["k"]
    finally:
        s3.remove_bucket(name)


@pytest.mark.parametrize(
    "ask",
    [
        create_bucket,
        show_lifecycle,
        lambda place, resolver: set_lifecycle(place, resolver, days=1),
        remove_lifecycle,
    ],
    ids=["create", "show", "set", "remove"],
)
def test_trouble_is_one_line(s3: S3Address, ask: Callable[..., object]) -> None:
    """With the bucket, the fix, and no secret: wrong keys, nobody there, Azure."""
    place = bucket(s3, "no-such-bucket", identity=STRANGER)
    with pytest.raises(StoreError, match=r"s3://no-such-bucket at .* refuses to .* \(") as caught:
        ask(place, CredentialResolver.of(place))
    assert STRANGER.secret_key not in str(caught.value)
    place = bucket(s3, "no-such-bucket", endpoint="http://127.0.0.1:1")
    with pytest.raises(StoreError, match=r"EndpointConnectionError; correct the endpoint"):
        ask(place, CredentialResolver.of(place))
    place = Bucket("azure", "container", "p", "https://account.example")
    with pytest.raises(StoreError, match=r"do it in the account"):
        ask(place, CredentialResolver.of(place))


def test_a_proxy_of_the_environment_is_not_used(
    s3: S3Address, module_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages would not go through it either."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    place = bucket(s3, module_bucket, "proxied")
    assert show_lifecycle(place, CredentialResolver.of(place)) is None


def test_who_may_only_read_makes_nothing(s3: S3Address, module_bucket: str) -> None:
    """A refusal is said, not taken for success."""
    place = bucket(s3, module_bucket, identity=READER)
    with pytest.raises(StoreError, match=r"refuses to set the expiry rule \(AccessDenied\)"):
        set_lifecycle(place, CredentialResolver.of(place), days=1)


def test_days_are_checked_before_anything_is_asked(s3: S3Address) -> None:
    """No rule that removes everything at once."""
    place = bucket(s3, "any", endpoint="http://127.0.0.1:1")
    with pytest.raises(StoreError, match=r"cannot expire after 0 days; give 1 or more"):
        set_lifecycle(place, CredentialResolver.of(place), days=0)
