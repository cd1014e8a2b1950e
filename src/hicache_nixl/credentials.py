"""Resolves where credentials come from to what they are now. Nothing of it is ever shown.

Files, profiles and the chain are read by botocore. The same credentials go to NIXL and to the
client of the bucket, because NIXL's own chain cannot be told to look again.
"""

import configparser
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_nixl.bucket import Bucket, CredentialSource, SecretText
from hicache_nixl.errors import StoreError

logger = logging.getLogger(__name__)

_DEFAULT_SECTION = "default"
_QUOTING = ("auth", "endpoint", "parsers", "utils")
"""Loggers of botocore that quote."""


@dataclass(frozen=True)
class Credentials:
    """Keys for S3, or a connection string for Azure; equal when the secrets are."""

    access_key: SecretText | None = None
    secret_key: SecretText | None = None
    session_token: SecretText | None = None
    connection_string: SecretText | None = None


class CredentialResolver:
    """Safe for threads. `current` and `refresh` may block on the network (web identity, instance
    metadata). Both raise StoreError, one line without secrets, where there are no credentials.

    Args:
        source: where they come from.
        needs_keys: there must be some; Azure can do without, by its own chain.
    """

    def __init__(self, source: CredentialSource, *, needs_keys: bool = True) -> None:
        self.source = source
        self._needs_keys = needs_keys
        self._lock = threading.Lock()
        self._known: Credentials | None = None
        self._live: Any = None
        self._file_state: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, bucket: Bucket) -> "CredentialResolver":
        """The resolver for a bucket."""
        return cls(bucket.credentials, needs_keys=bucket.kind == "s3")

    @property
    def is_fixed(self) -> bool:
        """Whether `current` is always the same, so that it need not be asked again."""
        source = self.source
        return source.access_key is not None or not self._needs_keys

    def current(self) -> Credentials:
        """What to sign with now: a file that changed is read again, temporary keys that run out
        are renewed. If that fails, those known before."""
        with self._lock:
            if self._known is None:
                self._known = self._resolve()
            else:
                try:
                    self._known = self._renewed(self._known)
                except StoreError as error:
                    logger.warning("%s; using those known before", error)
            return self._known

    def refresh(self) -> bool:
        """Resolve again from the start; whether they changed."""
        with self._lock:
            before, self._known = self._known, self._resolve()
            return self._known != before

    def _renewed(self, known: Credentials) -> Credentials:
        if self.source.file is not None and self._state_of_file() != self._file_state:
            return self._resolve()
        return known if self._live is None else _frozen(self._live)

    def _resolve(self) -> Credentials:
        source = self.source
        self._live = None
        if source.access_key is not None:
            return Credentials(source.access_key, source.secret_key, source.session_token)
        if not self._needs_keys:
            return Credentials(connection_string=source.connection_string)
        if source.file is not None:
            self._file_state = self._state_of_file()
            return _from_file(source.file, source.profile or _DEFAULT_SECTION)
        self._live = _by_botocore(source)
        return _frozen(self._live)

    def _state_of_file(self) -> tuple[int, int, int] | None:
        try:
            facts = Path(str(self.source.file)).stat()
        except OSError:
            return None
        return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _from_file(file: str, section: str) -> Credentials:
    parser = configparser.RawConfigParser(default_section="", strict=False)
    found: dict[str, str] | None
    try:
        with Path(file).open(encoding="utf-8") as lines:
            parser.read_file(lines)
        found = dict(parser.items(section))
    except OSError as error:
        raise StoreError(f"credentials file {file} cannot be read: {error.strerror}") from error
    except configparser.NoSectionError:
        raise StoreError(
            f"credentials file {file} has no section [{section}]; add it, or name another profile"
        ) from None
    except (configparser.Error, UnicodeDecodeError):
        found = None
    if found is None:  # raised here, so that it does not carry an error that quotes the file
        raise StoreError(
            f"credentials file {file} is no INI file; write [{section}], aws_access_key_id = … and "
            "aws_secret_access_key = …"
        )
    keys = [found.get(f"aws_{name}") for name in ("access_key_id", "secret_access_key")]
    if not all(keys):
        raise StoreError(
            f"credentials file {file}, section [{section}], lacks aws_access_key_id or "
            "aws_secret_access_key; add them"
        )
    access, secret, token = (
        SecretText(text) if text else None for text in (*keys, found.get("aws_session_token"))
    )
    return Credentials(access, secret, token)


def _by_botocore(source: CredentialSource) -> Any:
    """botocore's credentials, which renew themselves where they are temporary."""
    try:
        import botocore.session
    except ImportError as error:
        raise missing_extra("botocore") from error
    quiet_botocore()
    try:
        live = botocore.session.Session(profile=source.profile).get_credentials()
    except _failures() as error:
        raise _unresolved(source, error) from None
    if live is None:
        raise StoreError(
            f"no credentials in {source}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name "
            "a profile or a credentials file"
        )
    return live


def quiet_botocore() -> None:
    """Keep botocore from logging at DEBUG, where it quotes requests and answers with the tokens
    and keys in them."""
    for name in ("botocore", *(f"botocore.{part}" for part in _QUOTING)):
        log = logging.getLogger(name)
        if log.getEffectiveLevel() < logging.INFO:
            log.setLevel(logging.INFO)


def _frozen(live: Any) -> Credentials:
    try:
        keys = live.get_frozen_credentials()
    except _failures() as error:
        raise StoreError(
            f"credentials of {live.method} cannot be renewed: {type(error).__name__}"
        ) from None
    token = SecretText(keys.token) if keys.token else None
    return Credentials(SecretText(keys.access_key), SecretText(keys.secret_key), token)


def _failures() -> tuple[type[Exception], ...]:
    """What botocore raises when a provider fails; RuntimeError where new keys are old already."""
    from botocore.exceptions import BotoCoreError

    return (BotoCoreError, OSError, ValueError, RuntimeError)


def _unresolved(source: CredentialSource, error: Exception) -> StoreError:
    # The message may quote what a provider said, secrets among it; the type says enough.
    return StoreError(
        f"{source} gives no credentials: {type(error).__name__}; correct it or name another"
    )


def missing_extra(package: str) -> StoreError:
    """The error for a library that stores of objects need."""
    return StoreError(
        f'{package} is not installed; stores of objects need pip install "hicache-nixl[objects]"'
    )
