"""Configuration written for SGLang's in-tree NIXL connector, read as settings of this one.

This module owns SGLang's names: the `plugin` map, its flat and dotted forms, `l3_cleaner_*` and
the `SGLANG_*` variables. It must not know defaults, nor which source wins.

What has no counterpart here becomes a note; what would be served wrongly is refused.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hicache_nixl.errors import SettingsError
from hicache_nixl.intree_plugins import (
    ALIASES,
    CREDENTIALS,
    OWNERS,
    PARAMETERS,
    QUEUES,
    REFUSED_QUEUE,
)
from hicache_nixl.intree_store import CLEANER_KEYS
from hicache_nixl.sources import ENVIRONMENT, Given, looks_like_credential, unknown_key
from hicache_nixl.units import describe, parse_bool

STORAGE_DIR = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
PLUGIN_VARIABLE = "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"
_VARIABLES = {
    STORAGE_DIR: "directories",
    PLUGIN_VARIABLE: "plugin",
    "SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "use_direct_io",
    "SGLANG_HUGEPAGE_SIZE": "hugepage_size",
}
PARAMETER = "plugin_parameters"
"""The setting of one plug-in parameter; its value is the triple (plug-in, name, text)."""

_MISSPELT = "secrete_key"
FLAT_KEYS = (*OWNERS, *CLEANER_KEYS, _MISSPELT)
"""Top-level keys of the in-tree connector that are not also keys of this one."""

# Read by SGLang from its extra config, and nowhere else.
_TUNING = frozenset(
    {
        "hicache_storage_pass_prefix_keys",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
SGLANG_KEYS = _TUNING | {
    "allocator",
    "backend_name",
    "class_name",
    "file_storage_path",
    "interface_v1",
    "interface_v2",
    "module_path",
}
"""Read by SGLang, or put there by it; they mean nothing to a store."""

# Values by which the in-tree connector takes a plug-in for active; others are not, in silence.
_ACTIVE = (True, "true", "True")
_TOP_LEVEL = ("use_direct_io", *CLEANER_KEYS)
_T = TypeVar("_T")


@dataclass
class Reading:
    """What a source says in the in-tree connector's words."""

    given: list[Given] = field(default_factory=list)
    flat: list[Given] = field(default_factory=list)
    """Parameters without a plug-in, which are meant for the one in use."""
    notes: list[str] = field(default_factory=list)


def from_environment(environ: Mapping[str, str]) -> list[Given]:
    """What the `SGLANG_*` variables set; an empty variable counts as unset."""
    return [
        Given(setting, environ[name], name, ENVIRONMENT)
        for name, setting in _VARIABLES.items()
        if environ.get(name, "").strip()
    ]


def from_mapping(mapping: Mapping[str, object], source: str) -> Reading:
    """What the in-tree keys in `mapping` set. A null value counts as not given."""
    reading = Reading()
    plugins = _plugin_map(mapping, source)
    flat = {key: value for key, value in mapping.items() if key in OWNERS and value is not None}
    if plugins is not None:
        if flat:
            name = next(iter(flat))
            raise SettingsError(
                f"{source}: {name} stands beside a plugin map; "
                f"move it to plugin.{OWNERS[name][0]}.{name}"
            )
        _read_plugin_map(plugins, source, reading)
    by_plugin: dict[str, dict[str, object]] = {}
    for name, value in flat.items():
        reading.flat.append(Given(PARAMETER, value, name, source))
        for owner in OWNERS[name]:
            by_plugin.setdefault(owner, {})[name] = value
    for plugin, section in by_plugin.items():
        _read_parameters(plugin, section, "", source, reading)
    if mapping.get(_MISSPELT) not in (None, ""):
        reading.given.append(Given("secret_key", mapping[_MISSPELT], _MISSPELT, source))
    for key in CLEANER_KEYS:
        if mapping.get(key) is not None:
            reading.given.append(Given(key, mapping[key], key, source))
    direct = mapping.get("use_direct_io")
    if isinstance(direct, str) and not truth(direct, "use_direct_io", source):
        reading.notes.append(
            f"use_direct_io = {describe(direct)} ({source}) is read as false; "
            "the in-tree connector takes every text for true"
        )
    return reading


def tuning_notes(mapping: Mapping[str, object], source: str) -> list[str]:
    """Notes on keys that SGLang reads from its extra config and not from a settings file."""
    return [
        f"{key} ({source}) is not used: SGLang reads it from its extra config only"
        for key in mapping
        if key in _TUNING
    ]


def explained(given: Given, read: Callable[[], _T]) -> _T:
    """`read()`, whose errors then name the key and source of `given`."""
    try:
        return read()
    except SettingsError as error:
        raise SettingsError(f"{given.origin}: {error}") from None


def truth(value: object, key: str, source: str) -> bool:
    """`value` as a boolean; errors name `key` and `source`."""
    return explained(Given(key, value, key, source), lambda: parse_bool(value))


def _plugin_map(mapping: Mapping[str, object], source: str) -> dict[str, dict[str, object]] | None:
    """Sections by plug-in, nested and dotted forms together; None where there are none."""
    pairs: list[tuple[str, object]] = []
    nested = mapping.get("plugin")
    if isinstance(nested, Mapping):
        for name, section in nested.items():
            if not isinstance(name, str):
                raise unknown_key(name, source, PARAMETERS, prefix="plugin.")
            pairs.append((name, section))
    pairs += [(key[7:], value) for key, value in mapping.items() if key.startswith("plugin.")]
    if not pairs and not isinstance(nested, Mapping):
        return None
    if nested is not None and not isinstance(nested, Mapping):
        raise SettingsError(
            f"{source}: plugin = {describe(nested)} stands beside plugin.{pairs[0][0]}; keep one"
        )
    sections: dict[str, dict[str, object]] = {}
    spelled: dict[str, str] = {}
    for path, value in pairs:
        written, _, parameter = path.partition(".")
        name = ALIASES.get(written.lower(), written.lower())
        if name not in PARAMETERS:
            raise unknown_key(written, source, (*PARAMETERS, *ALIASES), prefix="plugin.")
        if parameter:
            value = {parameter: value}
        if not isinstance(value, Mapping):
            raise SettingsError(
                f"plugin.{written} ({source}): {describe(value)} is not a map of parameters; "
                'write for example {"active": true}'
            )
        twice = spelled.setdefault(name, written) != written
        section = sections.setdefault(name, {})
        again = next((key for key in value if key in section), None)
        if twice or again is not None:
            what = f"plugin.{name}" if twice else f"plugin.{name}.{again}"
            raise SettingsError(f"{source}: {what} is given twice; keep one")
        section.update(value)
    return sections


def _read_plugin_map(
    plugins: Mapping[str, Mapping[str, object]], source: str, reading: Reading
) -> None:
    active: list[str] = []
    for name, section in plugins.items():
        _check_keys(name, section, source)
        if _is_active(section.get("active"), f"plugin.{name}.active", source):
            active.append(name)
    if not active:
        raise SettingsError(
            f"plugin ({source}): none is active; set active = true for one, "
            f"for example plugin.{next(iter(plugins), 'posix')}.active"
        )
    # As in-tree: the first active one counts.
    chosen, *others = active
    key = f"plugin.{chosen}.active"
    reading.given.append(Given("plugin", chosen, key, source))
    reading.notes += [
        f"plugin.{name}.active ({source}) is not used: {key} comes first" for name in others
    ]
    idle = [f"plugin.{name}" for name in plugins if name not in active]
    if idle:
        what = f"{', '.join(idle)} ({source})"
        reading.notes.append(f"{what} {'is' if len(idle) == 1 else 'are'} not active")
    section = {name: value for name, value in plugins[chosen].items() if name != "active"}
    _read_parameters(chosen, section, f"plugin.{chosen}.", source, reading)


def _is_active(value: object, key: str, source: str) -> bool:
    if value is None or not truth(value, key, source):
        return False
    if value not in _ACTIVE:
        raise SettingsError(
            f"{key} ({source}): {describe(value)} does not make a plug-in active in the in-tree "
            "connector; write true"
        )
    return True


def _check_keys(plugin: str, section: Mapping[Any, object], source: str) -> None:
    known = ("active", *PARAMETERS[plugin], *CREDENTIALS.get(plugin, ()))
    for key, value in section.items():
        # The in-tree sample file lists every credential with an empty value.
        if isinstance(key, str) and looks_like_credential(key) and value in ("", None):
            continue
        if key in _TOP_LEVEL:
            raise SettingsError(
                f"{source}: plugin.{plugin}.{key} is read by nobody; {key} stands outside the "
                "plugin map, in TOML above the first [plugin.…] line"
            )
        if key not in known:
            raise unknown_key(key, source, known, prefix=f"plugin.{plugin}.")


def _read_parameters(
    plugin: str, section: Mapping[str, object], prefix: str, source: str, reading: Reading
) -> None:
    """The parameters of the plug-in in use; keys are written as `prefix` + name."""
    queues: dict[str, bool] = {}
    secrets = CREDENTIALS.get(plugin, {})
    for name, value in section.items():
        key = prefix + name
        if name in secrets and value not in (None, ""):
            reading.given.append(Given(secrets[name], value, key, source))
        check = PARAMETERS[plugin].get(name)
        if check is None or value is None:
            continue
        given = Given(PARAMETER, value, key, source)
        text = explained(given, functools.partial(check, value))
        if text == "":
            note = f"{key} ({source}) is empty and counts as not given"
            reading.notes += [note] if note not in reading.notes else []
        elif name in QUEUES or name == REFUSED_QUEUE:
            queues[name] = text == "true"
        elif name == "num_threads":
            reading.given.append(Given("requests", text, key, source))
        else:
            reading.given.append(Given(PARAMETER, (plugin, name, text), key, source))
    _read_queues(queues, prefix, source, reading)


def _read_queues(queues: Mapping[str, bool], prefix: str, source: str, reading: Reading) -> None:
    if queues.get(REFUSED_QUEUE):
        raise SettingsError(
            f"{prefix}{REFUSED_QUEUE} ({source}): true is refused, because after one failed POSIX "
            'AIO transfer every later one fails; set queue to "auto", "uring" or "aio"'
        )
    chosen = {name: queue for name, queue in QUEUES.items() if queues.get(name)}
    if not chosen and queues.get("use_uring") is False and "use_aio" not in queues:
        chosen = {"use_uring": "aio"}  # what NIXL then uses
    reading.given += [
        Given("queue", queue, prefix + name, source) for name, queue in chosen.items()
    ]
    reading.notes += [
        f"{prefix}{name} = false ({source}) chooses no queue"
        for name in queues
        if name not in chosen
    ]
