"""Where credentials come from, how a change is noticed, and that they are never shown."""

import json
import os
import traceback
from pathlib import Path

import pytest

from hicache_nixl.bucket import Bucket, CredentialSource, SecretText
from hicache_nixl.credentials import CredentialResolver, Credentials
from hicache_nixl.errors import StoreError

ACCESS, SECRET, TOKEN = "AKIATESTTESTTEST", "s3cr3t/With+Chars=", "t0ken-of-a-session"
OTHER = "an0ther/Secret+Text"


@pytest.fixture(autouse=True)
def no_chain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own is found, and nobody is asked over the network."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))


def ini(
    path: Path, section: str = "default", secret: str = SECRET, token: str | None = None
) -> Path:
    """Write an INI file in one step, as a mounted secret changes."""
    text = f"[{section}]\naws_access_key_id = {ACCESS}\naws_secret_access_key = {secret}\n"
    draft = path.with_suffix(".draft")
    draft.write_text(text + (f"aws_session_token = {token}\n" if token else ""))
    draft.rename(path)
    return path


def shown(credentials: Credentials) -> tuple[str | None, ...]:
    return tuple(
        None if secret is None else secret.get_secret_value()
        for secret in (
            credentials.access_key,
            credentials.secret_key,
            credentials.session_token,
            credentials.connection_string,
        )
    )


def inline(**more: SecretText) -> CredentialSource:
    return CredentialSource(access_key=SecretText(ACCESS), secret_key=SecretText(SECRET), **more)


def test_keys_in_the_settings_are_taken_as_they_are() -> None:
    """They never change."""
    resolver = CredentialResolver(inline(session_token=SecretText(TOKEN)))
    assert shown(resolver.current()) == (ACCESS, SECRET, TOKEN, None)
    assert resolver.is_fixed
    assert not resolver.refresh()


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("profile", [None, "store"])
def test_a_file_is_read(tmp_path: Path, profile: str | None, token: str | None) -> None:
    """Its section "default", or the one that is named; % and ; in a secret mean nothing."""
    odd = SECRET + "%(x)s;#"
    file = ini(tmp_path / "keys", profile or "default", odd, token)
    resolver = CredentialResolver(CredentialSource(file=str(file), profile=profile))
    assert shown(resolver.current()) == (ACCESS, odd, token, None)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    """Without anybody asking for it."""
    resolver = CredentialResolver(CredentialSource(file=str(ini(tmp_path / "keys"))))
    before = resolver.current()
    assert resolver.current() == before
    ini(tmp_path / "keys", secret=OTHER)
    assert shown(resolver.current())[1] == OTHER
    assert not resolver.refresh()


def test_a_file_that_goes_leaves_what_was_known(tmp_path: Path) -> None:
    """A secret that is being replaced does not stop requests; asked for anew, it is missed."""
    file = ini(tmp_path / "keys")
    resolver = CredentialResolver(CredentialSource(file=str(file)))
    before = resolver.current()
    file.unlink()
    assert resolver.current() == before
    with pytest.raises(StoreError, match=r"cannot be read: No such file"):
        resolver.refresh()
    ini(file, secret=OTHER)
    assert shown(resolver.current())[1] == OTHER


def test_the_environment_is_part_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh notices what changed there."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    resolver = CredentialResolver(CredentialSource())
    assert shown(resolver.current()) == (ACCESS, SECRET, None, None)
    assert not resolver.refresh()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OTHER)
    assert resolver.refresh()
    assert shown(resolver.current())[1] == OTHER


def test_a_profile_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the AWS configuration, and again on a refresh."""
    file = ini(tmp_path / "credentials", "store")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    resolver = CredentialResolver(CredentialSource(profile="store"))
    assert shown(resolver.current())[:2] == (ACCESS, SECRET)
    ini(file, "store", OTHER)
    assert resolver.refresh()
    assert shown(resolver.current())[1] == OTHER


def test_temporary_keys_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider whose keys have run out is asked again, whoever asks for the current ones."""
    config, count = tmp_path / "config", tmp_path / "count"
    document = {
        "Version": 1,
        "AccessKeyId": ACCESS,
        "SecretAccessKey": "@",
        "SessionToken": TOKEN,
        "Expiration": "2000-01-01T00:00:00Z",
    }
    (tmp_path / "text").write_text(json.dumps(document))
    (tmp_path / "say").write_text(
        f'#!/bin/sh\necho x >> {count}\nsed "s/@/$(wc -l < {count})/" {tmp_path / "text"}\n'
    )
    (tmp_path / "say").chmod(0o700)
    config.write_text(f"[profile live]\ncredential_process = {tmp_path / 'say'}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    resolver = CredentialResolver(CredentialSource(profile="live"))
    with pytest.raises(StoreError, match=r"profile live|cannot be renewed"):
        resolver.current()  # botocore does not take keys that are expired when they come
    (tmp_path / "text").write_text(json.dumps({**document, "Expiration": "2999-01-01T00:00:00Z"}))
    first = resolver.current()
    assert resolver.current() == first
    assert resolver.refresh()
    assert shown(resolver.current())[2] == TOKEN


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (CredentialSource(), r"no credentials in the credential chain; set AWS_ACCESS_KEY_ID"),
        (CredentialSource(profile="none"), r"profile none gives no credentials: ProfileNotFound"),
        (CredentialSource(file="/nowhere/keys"), r"/nowhere/keys cannot be read: No such file"),
    ],
    ids=["chain", "profile", "file"],
)
def test_no_credentials_is_an_error(source: CredentialSource, message: str) -> None:
    """One line that says where was looked."""
    with pytest.raises(StoreError, match=message):
        CredentialResolver(source).current()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[other]\naws_secret_access_key = {SECRET}\n", r"no section \[default\]"),
        (f"[default]\naws_secret_access_key = {SECRET}\n", r"lacks aws_access_key_id"),
        (f"aws_secret_access_key = {SECRET}\n", r"is no INI file"),
        (f"[default]\n{SECRET[:-1]}", r"is no INI file"),
    ],
    ids=["section", "half", "headless", "no pair"],
)
def test_a_bad_file_is_an_error_that_quotes_nothing(
    tmp_path: Path, text: str, message: str
) -> None:
    """It names file and fix, and nothing that stands in the file."""
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(StoreError, match=message) as caught:
        CredentialResolver(CredentialSource(file=str(file))).current()
    assert SECRET[:-1] not in "".join(traceback.format_exception(caught.value))


def test_azure_can_do_without_keys() -> None:
    """A connection string is passed on; without one, Azure's own chain is asked later."""
    given = CredentialSource(connection_string=SecretText("AccountKey=abc"))
    bucket = Bucket("azure", "pages", "p", credentials=given)
    assert shown(CredentialResolver.of(bucket).current())[3] == "AccountKey=abc"
    bucket = Bucket("azure", "pages", "p")
    assert CredentialResolver.of(bucket).current() == Credentials()


def test_nothing_shows_a_secret(tmp_path: Path) -> None:
    """Not repr, nor str, of anything that holds one."""
    source = inline(session_token=SecretText(TOKEN), connection_string=SecretText(OTHER))
    resolver = CredentialResolver(source)
    bucket = Bucket("s3", "name", "prefix", credentials=source)
    for thing in (source, bucket, resolver, resolver.current()):
        for text in (repr(thing), str(thing)):
            assert not any(secret in text for secret in (SECRET, TOKEN, OTHER))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (inline(), "keys in the settings"),
        (
            CredentialSource(connection_string=SecretText("x")),
            "the connection string in the settings",
        ),
        (CredentialSource(file="/keys"), "file /keys"),
        (CredentialSource(file="/keys", profile="a"), "file /keys, section a"),
        (CredentialSource(profile="a"), "profile a"),
        (CredentialSource(), "the credential chain"),
    ],
)
def test_a_source_has_a_name(source: CredentialSource, text: str) -> None:
    """Messages can say where credentials come from."""
    assert str(source) == text


@pytest.mark.parametrize(
    ("bucket", "root", "text"),
    [
        (Bucket("s3", "b", "p/q", "http://h:1"), "p/q/", "s3://b/p/q at http://h:1"),
        (Bucket("s3", "b", "", region="eu-west-1"), "", "s3://b at AWS eu-west-1"),
        (Bucket("azure", "c", "p", "https://a.blob.x"), "p/", "azure://c/p at https://a.blob.x"),
    ],
)
def test_a_bucket_has_a_name(bucket: Bucket, root: str, text: str) -> None:
    """Messages can say which one, and where."""
    assert (bucket.root, str(bucket)) == (root, text)
