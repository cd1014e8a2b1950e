"""The settings: one frozen object, and the one function that gathers it from every source.

This module owns the keys, their defaults and ranges, the order of sources, and the process
environment, which no other module reads. It must not look at the disk, NIXL or SGLang.

Sources, later wins: defaults, environment, file, mapping (SGLang's extra config). A key in the
environment is `HICACHE_NIXL_` + the key in capitals; `HICACHE_NIXL_CONFIG` names the file. A null
value and an empty variable count as not given.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hicache_nixl import intree
from hicache_nixl.errors import SettingsError
from hicache_nixl.sources import ENVIRONMENT, Given, nearest, read_settings_file, unknown_key
from hicache_nixl.store_url import StoreUrl, parse_store_urls, refuse_unserved
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

PREFIX = "HICACHE_NIXL_"
CONFIG_VARIABLE = "HICACHE_NIXL_CONFIG"
MAX_DEADLINE = 600.0
_ALIGNMENT = 4 * KIB
_HUGEPAGES = {"2mb": 2 * MIB, "2mib": 2 * MIB, "1gb": GIB, "1gib": GIB}

# What Kubernetes puts into every pod beside a Service whose name starts with "hicache-nixl".
_KUBERNETES = re.compile(
    r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)"
)


def _stores(value: object) -> tuple[StoreUrl, ...]:
    urls = parse_store_urls(value)
    refuse_unserved(urls)
    return urls


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


_file_plugin = _one_of("auto", "posix", "gds", "gds_mt", "3fs")
_hugepages_mode = _one_of("off", "prefer", "required")


def _plugin(value: object) -> str:
    if isinstance(value, str) and value.strip().lower() in ("obj", "azure_blob"):
        raise SettingsError(
            f"{value!r} serves object stores, and this version serves slab:// stores; "
            "choose one of auto, posix, gds, gds_mt, 3fs"
        )
    return _file_plugin(value)


def _hugepages(value: object) -> str:
    return _hugepages_mode("off" if value is False else value)  # YAML reads a bare off as false


def _hugepage_size(value: object) -> int:
    size = _HUGEPAGES.get(value.strip().lower()) if isinstance(value, str) else value
    if isinstance(size, int) and size in _HUGEPAGES.values():
        return size
    raise SettingsError(f'{describe(value)} is not a huge page size; write "2MB" or "1GB"')


def _text(value: object) -> str:
    # The value is not shown: a salt may be private.
    if not isinstance(value, str):
        kind = type(value).__name__
        raise SettingsError(f"a value of type {kind} is not a text; write it in quotes")
    if not value.isprintable() or len(value) > 1024:
        raise SettingsError("the text must be printable and at most 1024 characters long")
    return value


_PARSERS: dict[str, Callable[[object], Any]] = {
    "store": _stores,
    "capacity": _size(MIB),
    "staging": _size(MIB),
    "segment": _optional(_size(MIB, multiple=_ALIGNMENT)),
    "verify": _one_of("full", "trailer"),
    "deadline": _seconds,
    "use_direct_io": parse_bool,
    "queue": _one_of("auto", "uring", "aio"),
    "plugin": _plugin,
    "hugepages": _hugepages,
    "hugepage_size": _optional(_hugepage_size),
    "host_pool_allocator": parse_bool,
    "model_revision": _optional(_text),
    "salt": _optional(_text),
}
KEYS = tuple(_PARSERS)


def _by(key: str) -> BeforeValidator:
    return BeforeValidator(_PARSERS[key])


class Settings(BaseModel):
    """How the cache is kept. Immutable; sizes are bytes, times seconds.

    Made by `load_settings`, whose errors are one line; made directly, values are parsed the same
    way and pydantic's `ValidationError` is raised.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)

    store: Annotated[tuple[StoreUrl, ...], _by("store")] = Field(
        default=(),
        description='Where pages are kept: "slab:///nvme0/hicache", or several, striped.',
    )
    capacity: Annotated[int, _by("capacity")] = Field(
        default=64 * GIB, description='Byte budget of the store, such as "2TiB"; at least 1MiB.'
    )
    staging: Annotated[int, _by("staging")] = Field(
        default=256 * MIB,
        description="Memory for pages that cannot move between host pool and disk directly; "
        "at least 1MiB.",
    )
    segment: Annotated[int | None, _by("segment")] = Field(
        default=None,
        description="Size of one segment file, a multiple of 4KiB, at most the capacity; "
        "chosen from the capacity when not given.",
    )
    verify: Annotated[Literal["full", "trailer"], _by("verify")] = Field(
        default="full",
        description="What is checked when a page is read: payload and trailer (full), or the "
        "trailer alone (trailer).",
    )
    deadline: Annotated[float, _by("deadline")] = Field(
        default=10.0,
        description='Longest time a get or set may take, such as "10s"; at most 10m.',
    )
    use_direct_io: Annotated[bool, _by("use_direct_io")] = Field(
        default=True,
        description="Bypass the page cache with O_DIRECT; falls back where it is refused.",
    )
    queue: Annotated[Literal["auto", "uring", "aio"], _by("queue")] = Field(
        default="auto", description="Kernel interface for disk I/O: auto, uring or aio."
    )
    plugin: Annotated[Literal["auto", "posix", "gds", "gds_mt", "3fs"], _by("plugin")] = Field(
        default="auto", description="NIXL plug-in: auto, posix, gds, gds_mt or 3fs."
    )
    plugin_parameters: tuple[tuple[str, str, str], ...] = Field(
        default=(),
        description="(plug-in, name, value) of each parameter in an in-tree plugin.<name> map.",
    )
    hugepages: Annotated[Literal["off", "prefer", "required"], _by("hugepages")] = Field(
        default="off",
        description="Huge pages for host memory: off, prefer (fall back with a warning) or "
        "required (a shortage is an error).",
    )
    hugepage_size: Annotated[int | None, _by("hugepage_size")] = Field(
        default=None,
        description='Size of a huge page, "2MB" or "1GB"; 2MB when huge pages are on.',
    )
    host_pool_allocator: Annotated[bool, _by("host_pool_allocator")] = Field(
        default=False,
        description="Let SGLang's host pools use this package's allocator. Read before SGLang "
        f"parses its flags: set {PREFIX}HOST_POOL_ALLOCATOR=1 or write it to the settings file.",
    )
    model_revision: Annotated[str | None, _by("model_revision")] = Field(
        default=None, description="Keeps pages of one revision of a model apart from another's."
    )
    salt: Annotated[str | None, _by("salt")] = Field(
        default=None, repr=False, description="Keeps pages apart from those under another salt."
    )
    notes: tuple[str, ...] = Field(
        default=(), description="How keys of the in-tree connector were understood."
    )

    @model_validator(mode="before")
    @classmethod
    def _pair_hugepages(cls, data: Any) -> Any:
        """A size alone means prefer, a mode alone means 2 MiB, and off has no size."""
        if not isinstance(data, dict):
            return data
        size = data.get("hugepage_size")
        mode = _hugepages(data.get("hugepages", "off" if size is None else "prefer"))
        size = None if mode == "off" else 2 * MIB if size is None else size
        return {**data, "hugepages": mode, "hugepage_size": size}

    @model_validator(mode="after")
    def _segment_fits(self) -> Self:
        if self.segment is not None and self.segment > self.capacity:
            raise SettingsError(
                f"segment = {format_size(self.segment)} is larger than "
                f"capacity = {format_size(self.capacity)}; lower the one or raise the other"
            )
        return self

    def parameters_for(self, plugin: str) -> dict[str, str]:
        """The given NIXL parameters of `plugin`, such as "posix"; without the queue."""
        return {name: text for owner, name, text in self.plugin_parameters if owner == plugin}


def load_settings(
    extra_config: Mapping[str, object] | None = None,
    *,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    require_store: bool = True,
) -> Settings:
    """The settings from environment, file and `extra_config`, later wins.

    `config_file` takes the place of `HICACHE_NIXL_CONFIG`; `environ` that of the process
    environment. Reads the file and resolves links of store directories, nothing else on disk.

    Raises `SettingsError`, one line that names key, value (never a credential's) and source: for
    an unknown key, a value out of its range, two sources that contradict each other, or no store
    where `require_store`.
    """
    env = os.environ if environ is None else environ
    file = config_file if config_file is not None else env.get(CONFIG_VARIABLE, "").strip()
    layers = [_from_environment(env)]
    notes: list[str] = []
    if file:
        source = f"file {file}"
        layers.append(_from_mapping(read_settings_file(file), source, notes))
    if extra_config is not None:
        layers.append(_from_extra_config(extra_config, notes))

    _refuse_two_stores([given for layer in layers for given in layer if given.setting == "store"])
    winners: dict[str, tuple[Given, Any]] = {}
    parameters: dict[tuple[str, str], str] = {}
    for layer in layers:
        winners |= _layer(layer, parameters)

    values = {setting: value for setting, (_, value) in winners.items()}
    if require_store and not values.get("store"):
        raise SettingsError(
            'no store is configured; set store to for example "slab:///nvme0/hicache" in SGLang\'s '
            f"extra config, in the settings file, or as {PREFIX}STORE"
        )
    if values.get("hugepages") == "off" and values.get("hugepage_size") is not None:
        notes.append(f"{winners['hugepage_size'][0].origin} is not used: hugepages is off")
    early = [given.setting for layer in layers[: 1 + bool(file)] for given in layer]
    if values.get("host_pool_allocator") and "host_pool_allocator" not in early:
        notes.append(
            f"{winners['host_pool_allocator'][0].origin} comes too late for SGLang's host pools; "
            f"set {PREFIX}HOST_POOL_ALLOCATOR=1"
        )
    notes = [note for given, value in winners.values() if (note := _note(given, value))] + notes
    try:
        return Settings(
            **values,
            plugin_parameters=tuple((*key, text) for key, text in parameters.items()),
            notes=tuple(notes),
        )
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise SettingsError(reason.removeprefix("Value error, ")) from None


def load_host_pool_settings(environ: Mapping[str, str] | None = None) -> Settings | None:
    """The settings if `host_pool_allocator` is on, else None. No store is needed.

    Raises as `load_settings`, but only where its variable or `HICACHE_NIXL_CONFIG` is set.
    """
    env = os.environ if environ is None else environ
    if not (env.get(f"{PREFIX}HOST_POOL_ALLOCATOR") or env.get(CONFIG_VARIABLE)):
        return None
    settings = load_settings(environ=env, require_store=False)
    return settings if settings.host_pool_allocator else None


def _from_environment(environ: Mapping[str, str]) -> list[Given]:
    found = intree.from_environment(environ)
    for name, value in environ.items():
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE:
            continue
        key = name.removeprefix(PREFIX)
        if key.lower() in KEYS and key.isupper():
            if value.strip():
                found.append(Given(key.lower(), value, name, ENVIRONMENT))
        elif not _KUBERNETES.fullmatch(key):
            known = (*KEYS, "config")
            raise unknown_key(key, ENVIRONMENT, known, prefix=PREFIX, spell=str.upper)
    return found


def _from_mapping(mapping: Mapping[str, object], source: str, notes: list[str]) -> list[Given]:
    known = {*KEYS, *intree.FLAT_KEYS}
    for key in mapping:
        if key not in known and key not in intree.SGLANG_KEYS:
            raise unknown_key(key, source, known, listed=KEYS)
    found, more_notes = intree.from_mapping(mapping, source)
    notes += more_notes
    for key, value in mapping.items():
        in_tree_form = key == "plugin" and isinstance(value, Mapping)
        if key in KEYS and value is not None and not in_tree_form:
            found.append(Given(key, value, key, source))
    return found


def _from_extra_config(mapping: Mapping[str, object], notes: list[str]) -> list[Given]:
    if not isinstance(mapping, Mapping):
        raise SettingsError(f"the extra config is a {type(mapping).__name__}; pass a mapping")
    by_sglang = "backend_name" in mapping or "class_name" in mapping
    if by_sglang and not mapping.get("interface_v1"):
        raise SettingsError(
            'SGLang\'s extra config: set "interface_v1": 1; without it SGLang moves pages through '
            "single-tensor calls, which this connector does not serve"
        )
    return _from_mapping(mapping, "SGLang's extra config" if by_sglang else "given settings", notes)


def _layer(
    layer: list[Given], parameters: dict[tuple[str, str], str]
) -> dict[str, tuple[Given, Any]]:
    """The parsed values of one source, in which no key may be contradicted by another."""
    found: dict[str, tuple[Given, Any]] = {}
    for given in layer:
        if given.setting == intree.PARAMETER:
            plugin, name, text = given.value
            parameters[plugin, name] = text
            continue
        value = intree.explained(given, functools.partial(_PARSERS[given.setting], given.value))
        if given.setting == "store" and not value:
            continue
        other = found.setdefault(given.setting, (given, value))
        if other[1] != value:
            raise SettingsError(f"{other[0].origin} and {given.origin} disagree; keep one of them")
    return found


def _refuse_two_stores(stores: list[Given]) -> None:
    in_tree = [given for given in stores if given.key == intree.STORAGE_DIR]
    own = [given for given in stores if given.key != intree.STORAGE_DIR and given.value]
    if in_tree and own:
        raise SettingsError(
            f"{own[-1].origin} and {in_tree[0].origin} both say where the store is; keep store "
            f"and unset {intree.STORAGE_DIR}"
        )


def _note(given: Given, value: Any) -> str | None:
    """How a key of the in-tree connector was understood; None for a key of this one."""
    if given.key in (given.setting, PREFIX + given.setting.upper()):
        return None
    if given.setting == "store":
        urls = ", ".join(map(str, value))
        return f"{given.origin} is read as store = {urls}; in-tree cache files there are not read"
    shown = format_size(value) if given.setting == "hugepage_size" else str(value).lower()
    return f"{given.origin} is read as {given.setting} = {shown}"
