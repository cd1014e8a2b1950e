"""Claims about keys that a kind of store has no use for, and about secrets in the settings."""

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configurations import LOADER, SECRET, STORE, refusal, write
from hicache_nixl.errors import SettingsError
from hicache_nixl.settings import Settings, fail_fast, load_settings
from hicache_nixl.store_keys import SECRETS

BUCKET = "s3://kv-cache"
KEYS = {"access_key": "AKIA" + SECRET, "secret_key": SECRET}


def load(config: dict[str, Any], environ: dict[str, str] | None = None) -> Settings:
    return load_settings(config, environ=environ or {})


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("capacity", "2TiB", "lifecycle"),
        ("segment", "1GiB", "each page is an object"),
        ("use_direct_io", True, "not kept in files"),
        ("queue", "uring", "not kept in files"),
        ("l3_cleaner_enabled", True, "not kept in files"),
        ("l3_cleaner_high_watermark", 85, "not kept in files"),
        ("l3_cleaner_low_watermark", 70, "not kept in files"),
    ],
)
def test_keys_of_directories_are_noted_for_a_bucket(key: str, value: Any, why: str) -> None:
    """What means nothing to objects is not silently dropped: one note, and no second reading."""
    notes = [note for note in load({"store": BUCKET, key: value}).notes if key in note]
    assert len(notes) == 1
    assert notes[0].startswith(f"{key} (given settings) is not used: ")
    assert why in notes[0]
    assert load({"store": BUCKET}).notes == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("credentials_file", "/run/secrets/s3"),
        ("profile", "prod"),
        ("create_bucket", True),
        ("requests", 8),
    ],
)
@pytest.mark.parametrize("store", [STORE, "files:///mnt/kv"])
def test_keys_of_buckets_are_noted_for_a_directory(key: str, value: Any, store: str) -> None:
    """The reverse."""
    expected = f"{key} (given settings) is not used: the store is in a directory"
    assert load({"store": store, key: value}).notes == (expected,)


def test_bucket_of_the_settings() -> None:
    """Everything that was set of an object store is in its bucket."""
    settings = load(
        {
            "store": f"{BUCKET}/team?endpoint=https://h:1&region=eu-west-1&addressing=virtual",
            "credentials_file": "/run/secrets/s3",
            "profile": "prod",
            "requests": 16,
        }
    )
    bucket = settings.bucket
    assert bucket is not None
    assert (bucket.name, bucket.prefix, bucket.endpoint) == ("kv-cache", "team", "https://h:1")
    assert (bucket.region, bucket.virtual_addressing) == ("eu-west-1", True)
    assert (bucket.credentials.file, bucket.credentials.profile) == ("/run/secrets/s3", "prod")
    assert bucket.nixl == (("num_threads", "16"),)
    assert settings.notes == ()
    assert load({"store": STORE}).bucket is None
    assert load({"store": f"{BUCKET}?requests=auto"}).bucket.nixl == ()  # type: ignore[union-attr]


# --- secrets


@pytest.mark.parametrize("source", ["mapping", "environment", "toml", "json", "yaml"])
def test_secrets_of_every_source(source: str, tmp_path: Path) -> None:
    """Keys may stand in every source, and no form of the settings shows them."""
    environ = {}
    given: dict[str, Any] = {}
    if source == "mapping":
        given = dict(KEYS)
    elif source == "environment":
        environ = {f"HICACHE_NIXL_{key.upper()}": value for key, value in KEYS.items()}
    else:
        lines = [f"{key} = {json.dumps(value)}" for key, value in KEYS.items()]
        text = "\n".join(lines) if source == "toml" else json.dumps(KEYS)
        environ = {"HICACHE_NIXL_CONFIG": str(write(tmp_path / f"s.{source}", text))}
    settings = load({"store": BUCKET} | given, environ)
    assert settings.secret_key is not None
    assert settings.secret_key.get_secret_value() == SECRET
    for form in (repr, str, Settings.model_dump, Settings.model_dump_json, lambda s: s.bucket):
        assert SECRET not in str(form(settings))
        assert SECRET not in repr(form(settings))
    warned = any("in clear" in note for note in settings.notes)
    assert warned == (source != "environment")


WRONG: list[dict[str, Any]] = [
    {"store": STORE},
    {"store": "files:///mnt/kv"},
    {"store": BUCKET, "profile": "p"},
    {"store": BUCKET, "deadline": "never"},
    {"store": BUCKET, "capacity": {"secret_key": SECRET}},
    {"store": BUCKET, "secret_kye": SECRET},
    {"store": BUCKET, "plugin": {"obj": {"active": True, "secret": SECRET}}},
    {"store": BUCKET, "plugin": {"obj": {"active": True, "region": f"key {SECRET}"}}},
    {"store": f"{BUCKET}?key={SECRET}"},
    {"store": "azure://container"},
    {"store": BUCKET, "segment": "1TiB"},
]


@pytest.mark.parametrize("config", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("loader", [{}, LOADER], ids=["ours", "SGLang's"])
def test_no_secret_in_a_refusal(config: dict[str, Any], loader: dict[str, Any]) -> None:
    """Whatever else is wrong with a configuration, its secrets are not in message or traceback."""
    with pytest.raises(SettingsError) as caught:
        load(KEYS | config | loader)
    assert "\n" not in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("key", SECRETS)
@pytest.mark.parametrize("value", [[SECRET], {"x": SECRET}, SECRET + "\n", SECRET * 1000])
def test_no_secret_of_a_wrong_value(key: str, value: Any) -> None:
    """A credential that cannot be used is refused by its name alone."""
    message = refusal({"store": BUCKET} | KEYS | {key: value})
    assert key in message
    assert SECRET not in message


def test_no_secret_in_pydantics_error() -> None:
    """Settings made directly show no secret when something else in them is wrong."""
    for wrong in ({"capcity": 1}, {"deadline": "never"}, {"segment": 1 << 40}):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - what counts is what it shows
            Settings(**(KEYS | wrong))
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        if isinstance(caught.value, ValidationError):
            assert SECRET not in repr(caught.value)


# --- retries of the AWS clients


@pytest.mark.parametrize(
    ("environ", "counts"),
    [
        ({}, "AWS_RETRY_MODE=standard, AWS_MAX_ATTEMPTS=1"),
        ({"AWS_RETRY_MODE": ""}, "AWS_RETRY_MODE=standard, AWS_MAX_ATTEMPTS=1"),
        (
            {"AWS_MAX_ATTEMPTS": "3"},
            "AWS_RETRY_MODE=standard, AWS_MAX_ATTEMPTS=3 (AWS_MAX_ATTEMPTS as set)",
        ),
        (
            {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "1"},
            "AWS_RETRY_MODE=standard, AWS_MAX_ATTEMPTS=1",
        ),
        (
            {"AWS_RETRY_MODE": "adaptive", "AWS_MAX_ATTEMPTS": "2"},
            "AWS_RETRY_MODE=adaptive, AWS_MAX_ATTEMPTS=2 (AWS_RETRY_MODE and AWS_MAX_ATTEMPTS as "
            "set)",
        ),
    ],
)
def test_clients_fail_fast(environ: dict[str, str], counts: str) -> None:
    """The AWS clients of the process try once, unless the user said otherwise; what counts is
    told."""
    own = {name: value for name, value in environ.items() if value}
    assert fail_fast(environ) == counts
    assert environ == {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "1"} | own
