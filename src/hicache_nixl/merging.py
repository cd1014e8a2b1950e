"""What several sources say, made one: later sources win, and in-tree keys find their meaning.

This module owns precedence, contradictions, and the notes on how in-tree keys were understood. It
must not know how a source is written.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache_nixl import intree
from hicache_nixl.errors import SettingsError
from hicache_nixl.file_systems import FileSystems
from hicache_nixl.intree import Reading, explained
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
from hicache_nixl.units import format_size

_IN_TREE_PARSERS: dict[str, Callable[[Any], Any]] = {
    "directories": directories_in,
    **{key: functools.partial(cleaner_value, key) for key in CLEANER_KEYS},
}
_LAYER_PARSERS = PARSERS | _IN_TREE_PARSERS
Winners = dict[str, tuple[Given, Any]]


@dataclass
class Merged:
    """The values that count, by setting, and where each comes from."""

    winners: Winners = field(default_factory=dict)
    parameters: dict[tuple[str, str], tuple[Given, str]] = field(default_factory=dict)
    """NIXL parameters by plug-in and name."""
    values: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Settings`, without the notes."""
    in_tree: bool = False
    """Whether anything was written for the in-tree connector alone."""
    _notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self._notes.append(text)

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each in-tree key, and for each key without effect."""
        return tuple(self._notes)

    @property
    def plugin(self) -> str:
        """The plug-in in use, such as "posix"; auto is POSIX."""
        chosen: str = self.values.get("plugin", "auto")
        return "posix" if chosen == "auto" else chosen

    def complete(self, file_systems: FileSystems) -> None:
        """Set store and capacity from in-tree keys, where the own keys do not."""
        in_tree_store = "store" not in self.values and self._take_directories(file_systems)
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


def merge(readings: Sequence[Reading]) -> Merged:
    """One from several, later wins. Raises `SettingsError` for what contradicts itself."""
    givens = [list(reading.given) for reading in readings]
    merged = Merged()
    _drop_unused_variable(givens, merged)
    _drop_overruled_directories(givens, merged)
    _refuse_two_stores([given for layer in givens for given in layer])
    for layer in givens:
        merged.winners |= _layer(layer, merged.parameters)
    merged.in_tree = any(_is_in_tree(given) for layer in givens for given in layer)
    merged.values = {
        setting: value for setting, (_, value) in merged.winners.items() if setting in PARSERS
    }
    merged.values["plugin_parameters"] = tuple(
        (*key, text) for key, (_, text) in merged.parameters.items()
    )
    _refuse_foreign([given for reading in readings for given in reading.flat], merged.plugin)
    for given, value in merged.winners.values():
        if (note := _note(given, value)) is not None:
            merged.note(note)
    for (plugin, _), (given, text) in merged.parameters.items():
        used = plugin == merged.plugin
        merged.note(
            f"{given.origin} is "
            + (f"passed to NIXL as {text}" if used else f"not used: plugin is {merged.plugin}")
        )
    for reading in readings:
        for note in reading.notes:
            merged.note(note)
    return merged


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
        owner = OWNERS[given.key][0]
        if owner != plugin:
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
    shown = format_size(value) if given.setting == "hugepage_size" else str(value).lower()
    return f"{given.origin} is read as {given.setting} = {shown}"
