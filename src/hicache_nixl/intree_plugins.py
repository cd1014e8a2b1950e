"""The NIXL plug-ins that a configuration of the in-tree connector may name, and their parameters.

This module owns which parameter belongs to which plug-in and which values NIXL takes for it. It
must not know where a configuration comes from.

A check takes a value as it was written, a JSON value or a text, and returns the text for NIXL;
"" means not given. It raises `SettingsError` without the key.
"""

import re
from collections.abc import Callable

from hicache_nixl.errors import SettingsError
from hicache_nixl.sources import nearest
from hicache_nixl.units import describe, parse_bool

Check = Callable[[object], str]

QUEUES = {"use_uring": "uring", "use_aio": "aio"}
"""Flags of the POSIX plug-in that choose a queue, and the queue."""
REFUSED_QUEUE = "use_posix_aio"
ALIASES = {"hf3fs": "3fs"}
"""NIXL's own names for plug-ins that the in-tree connector calls otherwise."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"{describe(value)} is not a text; write it in quotes")
    return value.strip()


_LIMITS = ("of 0 or more", "above zero")


def _count(minimum: int = 1, maximum: int = 10**18 - 1) -> Check:
    def check(value: object) -> str:
        text = str(value).strip() if isinstance(value, str | int) else ""
        whole = not isinstance(value, bool) and re.fullmatch(r"[0-9]{1,18}", text, re.ASCII)
        if value == "":
            return ""
        if not whole or not minimum <= int(text) <= maximum:
            limits = f"from {minimum} to {maximum}" if minimum > 1 else _LIMITS[minimum]
            raise SettingsError(
                f"{describe(value)} is not a whole number {limits}; "
                f"write for example {max(256, minimum)}"
            )
        return str(int(text))

    return check


def _choice(*choices: str) -> Check:
    def check(value: object) -> str:
        text = _text(value)
        if text and text not in choices:
            guess = nearest(text, choices)
            advice = f"did you mean {guess}?" if guess else f"choose one of {', '.join(choices)}"
            raise SettingsError(f"{describe(value)} is not accepted; {advice}")
        return text

    return check


def _flag(value: object) -> str:
    return "" if value == "" else str(parse_bool(value)).lower()


_CHECKSUM = _choice("required", "supported")
PARAMETERS: dict[str, dict[str, Check]] = {
    "posix": {
        **dict.fromkeys((*QUEUES, REFUSED_QUEUE), _flag),
        "ios_pool_size": _count(),
        "kernel_queue_size": _count(),
    },
    "gds": {
        "batch_pool_size": _count(),
        "batch_limit": _count(),
        "max_request_size": _count(),
    },
    "gds_mt": {"thread_count": _count()},
    "3fs": {
        "mount_point": _text,
        "mem_config": _choice("dram", "dram_zc", "auto"),
        "iopool_size": _count(64, 1 << 20),
    },
    "obj": {
        "num_threads": _count(),
        "endpoint_override": _text,
        "crtMinLimit": _count(0),  # 0 is off
        "throughput_target_gbps": _count(),
        "scheme": _choice("http", "https"),
        "region": _text,
        "req_checksum": _CHECKSUM,
        "resp_checksum": _CHECKSUM,
        "ca_bundle": _text,
        "use_virtual_addressing": _flag,
        "bucket": _text,
        "accelerated": _flag,
        "type": _text,
    },
    "azure_blob": {
        "account_url": _text,
        "container_name": _text,
        "ca_bundle": _text,
        "num_threads": _count(),
    },
}
"""Check of each parameter of each plug-in; credentials are not among them."""

CREDENTIALS = {
    "obj": {
        "access_key": "access_key",
        "secret_key": "secret_key",
        "secrete_key": "secret_key",  # so the in-tree README; NIXL would ignore it
        "session_token": "session_token",
    },
    "azure_blob": {"connection_string": "connection_string"},
}
"""The setting for each credential of each plug-in."""

OBJECT_STORES = ("obj", "azure_blob")
OWNERS = {
    name: tuple(plugin for plugin, names in PARAMETERS.items() if name in names)
    for names in PARAMETERS.values()
    for name in names
}
"""The plug-ins that have a parameter of this name."""
