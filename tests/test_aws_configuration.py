"""The region that the user's AWS configuration names."""

from pathlib import Path

import pytest

from configurations import write
from hicache_nixl.aws_configuration import configured_region
from hicache_nixl.settings import load_settings

CONFIG = "[default]\nregion = eu-west-1\n[profile prod]\nregion = us-west-2\n[profile bare]\n"


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An AWS configuration file, and no variable beside it."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(write(tmp_path / "config", CONFIG)))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("profile", "region"),
    [(None, "eu-west-1"), ("prod", "us-west-2"), ("bare", None), ("absent", None)],
)
def test_region_of_a_profile(profile: str | None, region: str | None) -> None:
    """The profile's own region, or none; a profile that does not exist has none."""
    assert configured_region(profile) == region


def test_profile_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_PROFILE chooses the profile, as for every AWS tool."""
    monkeypatch.setenv("AWS_PROFILE", "prod")
    assert configured_region(None) == "us-west-2"


def test_broken_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read names no region and is no error here."""
    monkeypatch.setenv("AWS_CONFIG_FILE", str(write(tmp_path / "broken", "region = [\n")))
    assert configured_region(None) is None


@pytest.mark.parametrize(
    ("config", "region"),
    [
        ({"store": "s3://kv-cache"}, "eu-west-1"),
        ({"store": "s3://kv-cache", "profile": "prod"}, "us-west-2"),
        ({"store": "s3://kv-cache?region=eu-south-1", "profile": "prod"}, "eu-south-1"),
        ({"store": "s3://kv-cache", "profile": "bare"}, "us-east-1"),
    ],
)
def test_region_of_a_store(config: dict[str, str], region: str) -> None:
    """A store without a region lies in the profile's, which is told."""
    settings = load_settings(config)
    assert settings.bucket is not None
    assert settings.bucket.region == region
    told = any("(AWS configuration) is read as region" in note for note in settings.notes)
    assert told == (region in ("eu-west-1", "us-west-2"))


def test_a_variable_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable counts instead of the configuration, and a given environment stands alone."""
    monkeypatch.setenv("AWS_REGION", "ap-east-1")
    assert "region=ap-east-1" in str(load_settings({"store": "s3://kv-cache"}).store[0])
    assert load_settings({"store": "s3://kv-cache"}, environ={}).notes == ()
