"""Configuration written for SGLang's in-tree NIXL connector, read as settings of this one.

This module owns SGLang's names: the `plugin` map, its flat form, `l3_cleaner_*` and the
`SGLANG_*` variables. It must not know defaults, nor which source wins.

What has no counterpart here becomes a note; what would be served wrongly is refused.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from hicache_nixl.errors import SettingsError
from hicache_nixl.sources import ENVIRONMENT, Given, looks_like_credential, unknown_key
from hicache_nixl.store_url import StoreUrl, slab_directory
from hicache_nixl.units import describe, parse_bool

STORAGE_DIR = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
# One plug-in parameter; its value is the triple (plug-in, name, text).
PARAMETER = "plugin_parameters"

# Read by SGLang, or put there by it; they mean nothing to a store.
SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "interface_v2",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
_T = TypeVar("_T")

_VARIABLES = {
    "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN": "plugin",
    "SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "use_direct_io",
    "SGLANG_HUGEPAGE_SIZE": "hugepage_size",
}
_QUEUES = {"use_uring": "uring", "use_aio": "aio"}
_REFUSED_QUEUE = "use_posix_aio"
# Values that must be whole numbers above zero, and values of any text.
_COUNTS = {
    "posix": ("ios_pool_size", "kernel_queue_size"),
    "gds": ("batch_pool_size", "batch_limit", "max_request_size"),
    "gds_mt": ("thread_count",),
    "3fs": ("iopool_size",),
    "obj": ("num_threads", "crtMinLimit", "throughput_target_gbps"),
}
_TEXTS = {
    "3fs": ("mount_point", "mem_config"),
    "obj": (
        "bucket",
        "ca_bundle",
        "endpoint_override",
        "region",
        "req_checksum",
        "resp_checksum",
        "scheme",
        "use_virtual_addressing",
    ),
}
PLUGINS = tuple(_COUNTS)
_CLEANER_KEYS = ("l3_cleaner_enabled", "l3_cleaner_high_watermark", "l3_cleaner_low_watermark")


def _parameters(plugin: str) -> tuple[str, ...]:
    queues = (*_QUEUES, _REFUSED_QUEUE) if plugin == "posix" else ()
    return (*queues, *_COUNTS[plugin], *_TEXTS.get(plugin, ()))


_OWNER = {name: plugin for plugin in PLUGINS for name in _parameters(plugin)}
# Top-level keys of the in-tree connector that are not also keys of this one.
FLAT_KEYS = (*_OWNER, *_CLEANER_KEYS)


def from_environment(environ: Mapping[str, str]) -> list[Given]:
    """What the `SGLANG_*` variables set; an empty variable counts as unset."""
    found = [
        Given(setting, environ[name], name, ENVIRONMENT)
        for name, setting in _VARIABLES.items()
        if environ.get(name, "").strip()
    ]
    if directories := environ.get(STORAGE_DIR, "").strip():
        given = Given("store", None, STORAGE_DIR, ENVIRONMENT)
        urls = explained(given, lambda: _directories(directories))
        if urls:
            found.append(Given("store", urls, STORAGE_DIR, ENVIRONMENT))
    return found


def from_mapping(mapping: Mapping[str, object], source: str) -> tuple[list[Given], list[str]]:
    """What the in-tree keys in `mapping` set, and notes on those without a counterpart."""
    found: list[Given] = []
    plugin = mapping.get("plugin")
    flat = {key: value for key, value in mapping.items() if key in _OWNER and value is not None}
    if isinstance(plugin, Mapping):
        found += _from_plugin_map(plugin, source)
        if flat:
            raise SettingsError(
                f"{source}: {next(iter(flat))} stands beside a plugin map; "
                f"move it to plugin.{_OWNER[next(iter(flat))]}.{next(iter(flat))}"
            )
    for name, value in flat.items():
        if _OWNER[name] == "obj":
            raise SettingsError(
                f"{name} ({source}) belongs to object stores, and this version serves slab:// "
                "stores; remove it"
            )
        found += _from_parameter(_OWNER[name], name, value, name, source)
    return found, _cleaner_notes(mapping, source)


def explained(given: Given, read: Callable[[], _T]) -> _T:
    """`read()`, whose errors then name the key and source of `given`."""
    try:
        return read()
    except SettingsError as error:
        raise SettingsError(f"{given.origin}: {error}") from None


def _directories(text: str) -> tuple[StoreUrl, ...]:
    names = [name.strip() for name in text.split(",")]
    return tuple(slab_directory(name) for name in names if name)


def _from_plugin_map(plugins: Mapping[str, object], source: str) -> list[Given]:
    active: dict[str, Mapping[str, object]] = {}
    seen: set[str] = set()
    for raw_name, section in plugins.items():
        name = raw_name.lower() if isinstance(raw_name, str) else raw_name
        if name not in PLUGINS:
            raise unknown_key(raw_name, source, PLUGINS, prefix="plugin.")
        if name in seen:
            raise SettingsError(f"{source}: plugin.{name} is given twice; keep one")
        seen.add(name)
        if not isinstance(section, Mapping):
            raise SettingsError(
                f"plugin.{name} ({source}): {describe(section)} is not a map of parameters; "
                'write for example {"active": true}'
            )
        _check_section(name, section, source)
        if _truth(section.get("active", False), f"plugin.{name}.active", source):
            active[name] = section
    if len(active) != 1:
        what = f"{' and '.join(active)} are" if active else "none is"
        raise SettingsError(
            f"plugin ({source}): {what} active; set active = true for exactly one, "
            "for example plugin.posix.active"
        )
    ((name, section),) = active.items()
    found = [Given("plugin", name, f"plugin.{name}.active", source)]
    for key, value in section.items():
        if key != "active":
            found += _from_parameter(name, key, value, f"plugin.{name}.{key}", source)
    return found


def _check_section(plugin: str, section: Mapping[str, object], source: str) -> None:
    known = ("active", *_parameters(plugin))
    for key, value in section.items():
        # The in-tree sample file lists every credential with an empty value.
        if isinstance(key, str) and looks_like_credential(key) and value in ("", None):
            continue
        if key not in known:
            raise unknown_key(key, source, known, prefix=f"plugin.{plugin}.")


def _from_parameter(plugin: str, name: str, value: object, key: str, source: str) -> list[Given]:
    if plugin == "obj":
        return []  # refused as a plug-in, by the setting
    if name == _REFUSED_QUEUE:
        if _truth(value, key, source):
            raise SettingsError(
                f"{key} ({source}): true is refused, because after one failed POSIX AIO transfer "
                'every later one fails; set queue to "auto", "uring" or "aio"'
            )
        return []
    if name in _QUEUES:
        chosen = _truth(value, key, source)
        return [Given("queue", _QUEUES[name], key, source)] if chosen else []
    text = "" if value is None else str(value).strip()
    if name in _COUNTS[plugin]:
        whole = isinstance(value, str | int) and not isinstance(value, bool)
        if not whole or re.fullmatch("[1-9][0-9]{0,17}", text) is None:
            raise SettingsError(
                f"{key} ({source}): {describe(value)} is not a whole number above zero; "
                "write for example 256"
            )
    elif not isinstance(value, str | None):
        raise SettingsError(f"{key} ({source}): {describe(value)} is not a text")
    return [Given(PARAMETER, (plugin, name, text), key, source)] if text else []


def _truth(value: object, key: str, source: str) -> bool:
    return explained(Given(key, value, key, source), lambda: parse_bool(value))


def _cleaner_notes(mapping: Mapping[str, object], source: str) -> list[str]:
    notes: list[str] = []
    for key in _CLEANER_KEYS:
        value = mapping.get(key)
        if value is None:
            continue
        if key == "l3_cleaner_enabled":
            if not _truth(value, key, source):
                notes.append(
                    f"{key} = false ({source}) is not used: the store keeps inside capacity by "
                    "itself, and no cleaner runs beside it"
                )
            continue
        percent = _percent(value, key, source)
        notes.append(
            f"{key} = {percent:g} ({source}) is not used: capacity is the byte budget, and the "
            "fill level of the disk starts no eviction"
        )
    return notes


def _percent(value: object, key: str, source: str) -> float:
    try:
        percent = float(value) if isinstance(value, str | int | float) else -1.0
    except (ValueError, OverflowError):
        percent = -1.0
    if isinstance(value, bool) or not 0 <= percent <= 100:
        raise SettingsError(
            f"{key} ({source}): {describe(value)} is not a percentage; write for example 80.0"
        )
    return percent
