"""What several sources say, made one: later sources win, and in-tree keys find their meaning.

This module owns precedence, contradictions, and the notes on how in-tree keys were understood. It
must not know how a source is written.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from hicache_nixl import intree, intree_objects
from hicache_nixl.errors import SettingsError
from hicache_nixl.file_systems import FileSystems
from hicache_nixl.intree import Reading, explained
from hicache_nixl.intree_objects import PLACE_NAMES, SCHEME_OF
from hicache_nixl.intree_plugins import OWNERS
from hicache_nixl.intree_store import (
    CLEANER_KEYS,
    DEFAULT_DIRECTORY,
    budget_of,
    cleaner_value,
    directories_in,
    store_of,
)
from hicache_nixl.setting_values import PARSERS
from hicache_nixl.sources import ENVIRONMENT, Given
from hicache_nixl.store_keys import check_credentials, unused
from hicache_nixl.store_url import StoreUrl
from hicache_nixl.units import format_size

_IN_TREE_PARSERS: dict[str, Callable[[Any], Any]] = {
    "directories": directories_in,
    **{key: functools.partial(cleaner_value, key) for key in CLEANER_KEYS},
}
_LAYER_PARSERS = PARSERS | _IN_TREE_PARSERS
Winners = dict[str, tuple[Given, Any]]
Defaults = Mapping[str, Mapping[str, Given]]

_PLUGIN_OF = {scheme: plugin for plugin, scheme in SCHEME_OF.items()}


@dataclass
class Merged:
    """The values that count, by setting, and where each comes from."""

    winners: Winners = field(default_factory=dict)
    parameters: dict[tuple[str, str], tuple[Given, str]] = field(default_factory=dict)
    """NIXL parameters by plug-in and name."""
    values: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Settings`, without the notes."""
    layers: dict[str, int] = field(default_factory=dict)
    """The number of the source that each winner is from."""
    in_tree: bool = False
    """Whether anything was written for the in-tree connector alone."""
    defaults: Defaults = field(default_factory=dict)
    """What variables of the AWS and Azure tools say, by scheme and name."""
    region_of: Callable[[str | None], str | None] | None = None
    """The region of an AWS profile; None where the AWS configuration is not to be looked at."""
    _notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self._notes.append(text)

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each in-tree key, and for each key without effect."""
        return tuple(self._notes)

    @property
    def plugin(self) -> str:
        """The plug-in in use, such as "posix"; auto is what serves the store, POSIX in files."""
        chosen: str = self.values.get("plugin", "auto")
        urls = self.values.get("store") or ()
        return (
            _PLUGIN_OF.get(urls[0].scheme if urls else "", "posix") if chosen == "auto" else chosen
        )

    def complete(self, file_systems: FileSystems) -> None:
        """Set store and capacity from in-tree keys, where the own keys do not; and say how in-tree
        keys were understood."""
        if self.plugin in SCHEME_OF:
            self._take_bucket(SCHEME_OF[self.plugin])
            return
        in_tree_store = "store" not in self.values and self._take_directories(file_systems)
        self._note_keys("slab")
        cleaner = {key: self.winners[key] for key in CLEANER_KEYS if key in self.winners}
        capacity = self.winners.get("capacity")
        nbytes, notes = budget_of(
            cleaner,
            self.values.get("store", ()),
            in_tree_store=in_tree_store,
            capacity=capacity[0].origin if capacity else None,
            file_systems=file_systems,
        )
        if nbytes is not None:
            self.values["capacity"] = nbytes
        self._notes += notes

    def _note_keys(self, scheme: str) -> None:
        """How each given key was understood, or why it is not used."""
        silent = unused(self.winners, scheme)
        for key, (given, value) in self.winners.items():
            note = silent.get(key) or _note(given, value)
            if note is not None:
                self.note(note)
        places = PLACE_NAMES.get(self.plugin, ())
        for (plugin, name), (given, text) in self.parameters.items():
            if plugin == self.plugin and name in places:
                continue  # part of the store URL
            used = plugin == self.plugin
            self.note(
                f"{given.origin} is "
                + (f"passed to NIXL as {text}" if used else f"not used: plugin is {self.plugin}")
            )

    def _take_bucket(self, scheme: str) -> None:
        """Complete the URL of an object store, or make it from in-tree keys."""
        place, notes = intree_objects.place_of(self.plugin, self.parameters)
        defaults = dict(self.defaults.get(scheme, {}))
        if scheme == "s3" and "region" not in defaults and self.region_of is not None:
            profile = self.values.get("profile")
            if (region := self.region_of(profile)) is not None:
                key = f"region of profile {profile}" if profile else "region"
                defaults["region"] = Given("region", region, key, "AWS configuration")
        if "connection_string" in defaults and "connection_string" not in self.values:
            given = defaults["connection_string"]  # NIXL reads this variable anyhow
            self.winners["connection_string"] = (given, SecretStr(given.value))
            self.values["connection_string"] = SecretStr(given.value)
        if not self.values.get("store"):
            url, note = intree_objects.store_from(self.plugin, place, defaults)
            self.note(note)
        else:
            (url,) = self.values["store"]
        url, more = intree_objects.completed(url, place, defaults)
        self.values["store"] = (url,)
        for note in (*notes, *more):
            self.note(note)
        self._note_keys(scheme)
        self._notes += check_credentials(self.winners)
        self._check_requests(url)
        if scheme == "azure" and not (
            url.parameter("account_url") or self.values.get("connection_string")
        ):
            raise SettingsError(
                f"store = {url} names no account; write for example "
                f"{url}?account_url=https://ACCOUNT.blob.core.windows.net"
            )

    def _check_requests(self, url: StoreUrl) -> None:
        said, key = url.parameter("requests"), self.winners.get("requests")
        if key is not None and said is not None and str(key[1] or "auto") != said:
            raise SettingsError(
                f"{key[0].origin} and requests = {said} of the store disagree; keep one of them"
            )

    def _take_directories(self, file_systems: FileSystems) -> bool:
        """Make a store of the in-tree directories; False if the configuration is not in-tree."""
        mount_point = self.parameters.get(("3fs", "mount_point"), (None, ""))
        if "directories" in self.winners:
            given, directories = self.winners["directories"]
            origin = given.origin
        elif not self.in_tree:
            return False
        elif self.plugin != "3fs":
            directories = (DEFAULT_DIRECTORY,)
            origin = f"{DEFAULT_DIRECTORY} (the in-tree default: {intree.STORAGE_DIR} is not set)"
        elif mount_point[0] is not None:
            directories = explained(mount_point[0], lambda: directories_in(mount_point[1]))
            origin = mount_point[0].origin
        else:
            raise SettingsError(
                "plugin 3fs has no directory; set plugin.3fs.mount_point, or "
                f"{intree.STORAGE_DIR} to a directory on the 3FS mount"
            )
        if not directories:
            return False
        try:
            urls, why = store_of(directories, self.plugin, mount_point[1], file_systems)
        except SettingsError as error:
            raise SettingsError(f"{origin}: {error}") from None
        self.values |= {"store": urls, "in_tree_directories": tuple(directories)}
        self._notes.insert(
            0,
            f"{origin} is read as store = {','.join(map(str, urls))} ({why}); in-tree cache files "
            "are not read; set store to choose otherwise",
        )
        self._notes[1:1] = [
            f"{directory} does not exist, nor does {above}; both are made at start: if a disk "
            "belongs there, mount it before"
            for directory in directories
            if not file_systems.exists(above := Path(directory).parent)
        ]
        return True


def merge(
    readings: Sequence[Reading],
    defaults: Defaults,
    region_of: Callable[[str | None], str | None] | None,
) -> Merged:
    """One from several, later wins. Raises `SettingsError` for what contradicts itself.

    `defaults` and `region_of`: see `Merged`.
    """
    givens = [list(reading.given) for reading in readings]
    merged = Merged(defaults=defaults, region_of=region_of)
    _drop_unused_variable(givens, merged)
    _drop_overruled_directories(givens, merged)
    _refuse_two_stores([given for layer in givens for given in layer])
    for number, layer in enumerate(givens):
        found = _layer(layer, merged.parameters)
        merged.winners |= found
        merged.layers |= dict.fromkeys(found, number)
    merged.in_tree = any(_is_in_tree(given) for layer in givens for given in layer)
    merged.values = {
        setting: value for setting, (_, value) in merged.winners.items() if setting in PARSERS
    }
    _reconcile_plugin(merged)
    flat = [given for reading in readings for given in reading.flat]
    _refuse_foreign(flat, merged.plugin)
    _drop_other_owners(merged)
    places = PLACE_NAMES.get(merged.plugin, ())
    merged.values["plugin_parameters"] = tuple(
        (plugin, name, text)
        for (plugin, name), (_, text) in merged.parameters.items()
        if plugin != merged.plugin or name not in places
    )
    for reading in readings:
        for note in reading.notes:
            merged.note(note)
    return merged


def _reconcile_plugin(merged: Merged) -> None:
    """A store in a later source counts instead of a plug-in that cannot serve it."""
    store, plugin = merged.winners.get("store"), merged.winners.get("plugin")
    if store is None or plugin is None or plugin[1] == "auto":
        return
    scheme = store[1][0].scheme
    if SCHEME_OF.get(plugin[1], scheme if scheme not in _PLUGIN_OF else "") == scheme:
        return
    if merged.layers["store"] > merged.layers["plugin"]:
        merged.note(f"{plugin[0].origin} is not used: {store[0].origin} is set")
        del merged.winners["plugin"]
        merged.values["plugin"] = "auto"
        return
    serves = f"{SCHEME_OF[plugin[1]]}://" if plugin[1] in SCHEME_OF else "slab:// and files://"
    raise SettingsError(
        f"{plugin[0].origin}: {plugin[1]} serves {serves} stores, and {store[0].origin} is "
        f"{scheme}://; remove one of them"
    )


def _drop_other_owners(merged: Merged) -> None:
    """A parameter without a plug-in that several have is the one of the plug-in in use."""
    for (plugin, name), (given, _) in list(merged.parameters.items()):
        if given.key in OWNERS and plugin != merged.plugin:
            del merged.parameters[plugin, name]


def _layer(layer: list[Given], parameters: dict[tuple[str, str], tuple[Given, str]]) -> Winners:
    """The parsed values of one source, in which no key may be contradicted by another."""
    found: Winners = {}
    for given in layer:
        if given.setting == intree.PARAMETER:
            plugin, name, text = given.value
            parameters[plugin, name] = (given, text)
            continue
        parse = functools.partial(_LAYER_PARSERS[given.setting], given.value)
        value = explained(given, parse)
        if given.setting in ("store", "directories") and not value:
            continue
        other = found.setdefault(given.setting, (given, value))
        if other[1] != value:
            raise SettingsError(f"{other[0].origin} and {given.origin} disagree; keep one of them")
    return found


def _drop_unused_variable(givens: list[list[Given]], merged: Merged) -> None:
    """A plug-in map decides alone, as in the in-tree connector."""
    chosen = next((g for layer in givens for g in layer if g.key.startswith("plugin.")), None)
    for layer in givens:
        for given in [given for given in layer if given.key == intree.PLUGIN_VARIABLE and chosen]:
            layer.remove(given)
            merged.note(f"{given.origin} is not used: {chosen.source} has a plugin map")  # type: ignore[union-attr]


def _drop_overruled_directories(givens: list[list[Given]], merged: Merged) -> None:
    """A store in a later source counts instead of the in-tree connector's directories."""
    for number, layer in enumerate(givens):
        later = [g for after in givens[number + 1 :] for g in after]
        store = next((g for g in later if g.setting == "store" and g.value), None)
        for given in [given for given in layer if given.setting == "directories" and store]:
            layer.remove(given)
            merged.note(f"{given.origin} is not used: {store.origin} is set")  # type: ignore[union-attr]


def _refuse_two_stores(givens: list[Given]) -> None:
    in_tree = [given for given in givens if given.setting == "directories"]
    own = [given for given in givens if given.setting == "store" and given.value]
    if in_tree and own:
        raise SettingsError(
            f"{own[-1].origin} and {in_tree[0].origin} both say where the store is; keep store "
            f"and unset {intree.STORAGE_DIR}"
        )


def _refuse_foreign(flat: list[Given], plugin: str) -> None:
    """The in-tree connector passes them on to a plug-in that does not read them."""
    for given in flat:
        owners = OWNERS[given.key]
        owner = owners[0]
        if plugin not in owners:
            raise SettingsError(
                f"{given.origin} is a parameter of plugin {owner}, and plugin is {plugin}; "
                f'remove it, or set plugin to "{owner}"'
            )


def _is_in_tree(given: Given) -> bool:
    names = (intree.PLUGIN_VARIABLE, intree.STORAGE_DIR, *intree.FLAT_KEYS)
    return given.key in names or given.key.startswith("plugin.")


def _note(given: Given, value: Any) -> str | None:
    """How a key of the in-tree connector was understood; None for a key of this one."""
    own = given.key == given.setting and given.source != ENVIRONMENT
    if own or given.setting in _IN_TREE_PARSERS or given.key.startswith("HICACHE_NIXL_"):
        return None
    if isinstance(value, SecretStr):
        return f"{given.origin} is read as {given.setting}"
    shown = format_size(value) if given.setting == "hugepage_size" else str(value).lower()
    return f"{given.origin} is read as {given.setting} = {shown}"
