"""Which keys each kind of store takes, and which credentials go together.

This module owns what happens to a key that was given for a store that has no use for it: a note,
or for a credential a refusal by its name. It must not know where the store lies.
"""

from collections.abc import Mapping
from typing import Any

from hicache_nixl.errors import SettingsError
from hicache_nixl.intree_store import CLEANER_KEYS
from hicache_nixl.sources import ENVIRONMENT, Given

Winners = Mapping[str, tuple[Given, Any]]

SECRETS = ("access_key", "secret_key", "session_token", "connection_string")
"""Settings that are credentials themselves."""
_IN_FILES = "objects are not kept in files"
_FOR_DIRECTORIES = {
    "capacity": "a bucket is bounded by its lifecycle rule, see hicache-nixl lifecycle",
    "segment": "each page is an object",
    "use_direct_io": _IN_FILES,
    "queue": _IN_FILES,
    "directories": _IN_FILES,
    **dict.fromkeys(CLEANER_KEYS, _IN_FILES),
}
_FOR_BUCKETS = ("credentials_file", "profile", "create_bucket", "requests")
_OF_SCHEME = {
    "s3": ("access_key", "secret_key", "session_token", "credentials_file", "profile"),
    "azure": ("connection_string",),
}


def unused(winners: Winners, scheme: str) -> dict[str, str]:
    """A note for each key that was given and that a store of this scheme has no use for.

    Raises `SettingsError`, which shows no value, for a credential among them.
    """
    given = {key: source for key, (source, value) in winners.items() if value is not None}
    if scheme in _OF_SCHEME:
        for other, keys in _OF_SCHEME.items():
            for key in keys:
                if key in given and other != scheme:
                    raise SettingsError(
                        f"{given[key].origin} is for {other}:// stores, and the store is "
                        f"{scheme}://; remove it"
                    )
        return {
            key: f"{given[key].origin} is not used: {why}"
            for key, why in _FOR_DIRECTORIES.items()
            if key in given
        }
    for key in SECRETS:
        if key in given:
            raise SettingsError(
                f"{given[key].origin} is a credential, and a store in a directory takes none; "
                "remove it"
            )
    return {
        key: f"{given[key].origin} is not used: the store is in a directory"
        for key in _FOR_BUCKETS
        if key in given
    }


def check_credentials(winners: Winners) -> list[str]:
    """Notes on the credentials of an object store. Raises `SettingsError`, which shows no value,
    where they are incomplete, or where two kinds of them are given."""
    given = {key: source for key, (source, value) in winners.items() if value is not None}
    pair = ("access_key", "secret_key")
    for key, other in (pair, pair[::-1], ("session_token", "access_key")):
        if key in given and other not in given:
            raise SettingsError(f"{given[key].origin} is given without {other}; add it")
    for key in ("credentials_file", "profile"):
        if key in given and "access_key" in given:
            raise SettingsError(
                f"{given['access_key'].origin} and {given[key].origin} are two sources of "
                "credentials; keep one"
            )
    clear = [given[key].origin for key in SECRETS if key in given and not _is_private(given[key])]
    if not clear:
        return []
    return [
        f"{', '.join(clear)} stand in clear in a configuration, which SGLang logs when they are in "
        "its flags; better is credentials_file, or the variables of the AWS or Azure tools"
    ]


def _is_private(given: Given) -> bool:
    return given.source == ENVIRONMENT
