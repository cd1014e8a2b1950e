"""What stands in the URL of an object store: bucket, prefix, and parameters.

This module owns which parameters `s3://` and `azure://` take, and the rules for names in them. It
must not know where a URL comes from, nor what a client does with it.

    s3://bucket/prefix?endpoint=http://host:9000&region=eu-west-1&addressing=virtual
    azure://container/prefix?account_url=https://account.blob.core.windows.net

Every function raises `SettingsError` with the value, unless it may hold a secret, and the fix.
"""

import ipaddress
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from hicache_nixl.errors import SettingsError
from hicache_nixl.sources import nearest
from hicache_nixl.units import describe

Check = Callable[[str], str]

MAX_PREFIX = 512
"""Characters; S3 takes 1024 for the whole name of an object, of which ours need 140."""
MAX_REQUESTS = 1024

_BUCKET = re.compile(r"[a-z0-9](?:[a-z0-9.-]{1,61})[a-z0-9]", re.ASCII)
_CONTAINER = re.compile(r"[a-z0-9](?:-?[a-z0-9]){2,62}", re.ASCII)
# What every client writes in the same way; others encode, or sign, some characters differently.
_PREFIX = re.compile(r"[A-Za-z0-9._=-]+(?:/[A-Za-z0-9._=-]+)*", re.ASCII)
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)


def check_bucket(scheme: str, name: str) -> str:
    """`name` if it can be that of a bucket (s3) or a container (azure)."""
    if scheme == "azure":
        if len(name) > 63 or not _CONTAINER.fullmatch(name):
            raise SettingsError(
                f"{describe(name)} is not the name of a container: 3 to 63 small letters, digits "
                "and single hyphens, a letter or digit at either end"
            )
        return name
    if is_address(name.rpartition(":")[0] or name) or re.fullmatch(r"[\w.-]+:\d+", name):
        raise SettingsError(
            f"{describe(name)} is a server, not the name of a bucket; write "
            f"s3://bucket/prefix?endpoint=http://{name}"
        )
    if not _BUCKET.fullmatch(name) or ".." in name:
        raise SettingsError(
            f"{describe(name)} is not the name of a bucket: 3 to 63 small letters, digits, hyphens "
            "and single dots, a letter or digit at either end"
        )
    return name


def check_prefix(prefix: str) -> str:
    """`prefix`, without slashes at its ends, if names of objects can start with it."""
    stripped = prefix.strip("/")
    if not stripped:
        return ""
    if len(stripped) > MAX_PREFIX:
        raise SettingsError(
            f"a prefix of {len(stripped)} characters is longer than {MAX_PREFIX}; shorten it"
        )
    segments = stripped.split("/")
    if not _PREFIX.fullmatch(stripped) or "." in segments or ".." in segments:
        raise SettingsError(
            f"the prefix {describe(stripped)} is not made of names from letters, digits and "
            '"._=-" with single slashes between; write for example team/hicache'
        )
    return stripped


def is_address(host: str) -> bool:
    """Whether `host` is an IP address and not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def check_endpoint(text: str) -> str:
    """The http or https URL of a server, canonical: small letters, nothing after the port."""
    url = check_server(text)
    if urlsplit(url).path:
        raise SettingsError(
            f"{describe(url)} has a path, and bucket and prefix stand before the parameters; "
            f"write {_ENDPOINT}"
        )
    return url


def check_server(text: str) -> str:
    """As `check_endpoint`, with a path."""
    url = text.strip()
    if "@" in url:
        raise SettingsError("the given URL holds a user name; it carries no credential")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise SettingsError(
            f"{describe(url)} is not a URL; write for example {_ENDPOINT}"
        ) from None
    if "://" not in url and re.fullmatch(r"[\w.\-\[\]:]+", url, re.ASCII):
        raise SettingsError(f'{describe(url)} lacks http:// or https://; write "http://{url}"')
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable():
        raise SettingsError(f"{describe(url)} is not an http or https URL; write {_ENDPOINT}")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise SettingsError(
            f"the URL of {describe(parts.hostname)} holds more than a server; write {_ENDPOINT}"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    place = host if port is None else f"{host}:{port}"
    return f"{parts.scheme}://{place}{parts.path.rstrip('/')}"


_ENDPOINT = "http://minio:9000"


def _region(text: str) -> str:
    if not _REGION.fullmatch(text):
        raise SettingsError(f"{describe(text)} is not a region; write for example eu-west-1")
    return text


def _addressing(text: str) -> str:
    if text not in ("path", "virtual"):
        raise SettingsError(f"{describe(text)} is not accepted; choose one of path, virtual")
    return text


def _file(text: str) -> str:
    if not text.startswith("/") or not text.isprintable():
        raise SettingsError(f"{describe(text)} is not the absolute name of a file")
    return text


def check_requests(value: object) -> int | None:
    """How many requests run at a time: None for auto, or 1 to 1024."""
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    if text in ("auto", "") and isinstance(value, str):
        return None
    whole = not isinstance(value, bool) and re.fullmatch(r"[0-9]{1,4}", text, re.ASCII)
    if not whole or not 1 <= int(text) <= MAX_REQUESTS:
        raise SettingsError(
            f'{describe(value)} is not a number from 1 to {MAX_REQUESTS}; write for example "auto"'
        )
    return int(text)


def _requests(text: str) -> str:
    return str(check_requests(text) or "auto")


PARAMETERS: dict[str, dict[str, Check]] = {
    "s3": {
        "endpoint": check_endpoint,
        "region": _region,
        "addressing": _addressing,
        "ca_bundle": _file,
        "requests": _requests,
    },
    "azure": {"account_url": check_server, "ca_bundle": _file, "requests": _requests},
}
"""Check of each parameter, by scheme; returns the canonical text."""

_ALIASES = {
    "endpoint_url": "endpoint",
    "endpoint_override": "endpoint",
    "addressing_style": "addressing",
    "num_threads": "requests",
}
"""Names that other tools have for the same."""


def check_parameter(scheme: str, name: str, value: str) -> tuple[str, str]:
    """The canonical name and value of one parameter of a URL."""
    known = PARAMETERS[scheme]
    own = name if name in known else _ALIASES.get(name, name)
    if own not in known:
        guess = nearest(name, known)
        advice = f"did you mean {guess}?" if guess else f"known are {', '.join(known)}"
        shown = repr(name) if name.isprintable() and len(name) <= 80 else "given"
        raise SettingsError(f"the parameter {shown} is unknown; {advice}")
    if not value:
        raise SettingsError(f"the parameter {name!r} is empty; give it a value or leave it out")
    try:
        return own, known[own](value)
    except SettingsError as error:
        raise SettingsError(f"the parameter {name!r}: {error}") from None
