"""How the value of each setting is read: from JSON values, or from text as in the environment.

This module owns the parsers and the range of each value. It must not know where a value comes
from, and names no key in its errors.
"""

from collections.abc import Callable
from typing import Any

from pydantic import SecretStr

from hicache_nixl.errors import SettingsError
from hicache_nixl.intree_plugins import ALIASES, OBJECT_STORES
from hicache_nixl.object_url import check_requests
from hicache_nixl.sources import nearest
from hicache_nixl.store_url import parse_store_urls
from hicache_nixl.units import (
    GIB,
    KIB,
    MIB,
    describe,
    format_size,
    parse_bool,
    parse_duration,
    parse_size,
)

MAX_DEADLINE = 600.0
PLUGINS = ("auto", "posix", "gds", "gds_mt", "3fs", *OBJECT_STORES)
_ALIGNMENT = 4 * KIB
_HUGEPAGES = {"2mb": 2 * MIB, "2mib": 2 * MIB, "1gb": GIB, "1gib": GIB}


def _size(minimum: int, multiple: int = 1) -> Callable[[object], int]:
    def parse(value: object) -> int:
        size = parse_size(value, minimum=minimum)
        if size % multiple:
            raise SettingsError(
                f"{describe(value)} is not a multiple of {format_size(multiple)}; "
                f'write for example "{format_size(minimum * 64)}"'
            )
        return size

    return parse


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None or value == "" else parse(value)


def _seconds(value: object) -> float:
    return parse_duration(value, maximum=MAX_DEADLINE)


def _one_of(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        if text in choices:
            return text
        guess = nearest(text, choices)
        advice = f"did you mean {guess}?" if guess else f"choose one of {', '.join(choices)}"
        raise SettingsError(f"{describe(value)} is not accepted; {advice}")

    return parse


_known_plugin = _one_of(*PLUGINS)
_hugepages_mode = _one_of("off", "prefer", "required")


def _plugin(value: object) -> str:
    name = value.strip().lower() if isinstance(value, str) else ""
    return _known_plugin(ALIASES.get(name, value))


def parse_hugepages(value: object) -> str:
    """off, prefer or required."""
    return _hugepages_mode("off" if value is False else value)  # YAML reads a bare off as false


def _hugepage_size(value: object) -> int:
    size = _HUGEPAGES.get(value.strip().lower()) if isinstance(value, str) else value
    if isinstance(size, int) and size in _HUGEPAGES.values():
        return size
    raise SettingsError(f'{describe(value)} is not a huge page size; write "2MB" or "1GB"')


def _private_text(value: object, longest: int = 1024) -> str:
    # The value is not shown: a salt may be private.
    if not isinstance(value, str):
        kind = type(value).__name__
        raise SettingsError(f"a value of type {kind} is not a text; write it in quotes")
    if not value.isprintable() or len(value) > longest:
        raise SettingsError(f"the text must be printable and at most {longest} characters long")
    return value


def _secret(value: object) -> SecretStr:
    if isinstance(value, SecretStr):
        return value
    text = _private_text(value, 8192).strip()
    if not text:
        raise SettingsError("the text holds nothing but spaces; leave it out")
    return SecretStr(text)


def _file(value: object) -> str:
    name = _private_text(value).strip()
    if not name.startswith("/"):
        raise SettingsError("the text is not the absolute name of a file, such as /run/secrets/s3")
    return name


PARSERS: dict[str, Callable[[object], Any]] = {
    "store": parse_store_urls,
    "capacity": _size(MIB),
    "staging": _size(MIB),
    "segment": _optional(_size(MIB, multiple=_ALIGNMENT)),
    "verify": _one_of("full", "trailer"),
    "deadline": _seconds,
    "use_direct_io": parse_bool,
    "queue": _one_of("auto", "uring", "aio"),
    "plugin": _plugin,
    "hugepages": parse_hugepages,
    "hugepage_size": _optional(_hugepage_size),
    "host_pool_allocator": parse_bool,
    "model_revision": _optional(_private_text),
    "salt": _optional(_private_text),
    "credentials_file": _optional(_file),
    "profile": _optional(_private_text),
    "access_key": _optional(_secret),
    "secret_key": _optional(_secret),
    "session_token": _optional(_secret),
    "connection_string": _optional(_secret),
    "create_bucket": parse_bool,
    "requests": check_requests,
}
"""The parser of each key. Every one raises `SettingsError`."""
