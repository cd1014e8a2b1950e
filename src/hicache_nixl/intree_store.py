"""Where a configuration of the in-tree connector keeps pages, as a store URL and a byte budget.

This module owns the choice between the slab and the files store, and what the cleaner's watermarks
come to. It asks `FileSystems` about the disk and must not touch it otherwise, nor know sources.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hicache_nixl.errors import SettingsError
from hicache_nixl.file_systems import FileSystems
from hicache_nixl.sources import Given
from hicache_nixl.store_url import StoreUrl, parse_store_urls, slab_directory
from hicache_nixl.units import describe, format_size, parse_bool

DEFAULT_DIRECTORY = "/tmp/hicache_storage"
SUBDIRECTORY = "hicache-nixl"
"""Below each in-tree directory, so that neither side takes the other's files for its own."""

ENABLED = "l3_cleaner_enabled"
HIGH = "l3_cleaner_high_watermark"
LOW = "l3_cleaner_low_watermark"
CLEANER_KEYS = (ENABLED, HIGH, LOW)
_DEFAULT_HIGH = 80.0

Winners = Mapping[str, tuple[Given, Any]]


def cleaner_value(key: str, value: object) -> bool | float:
    """The parsed value of one of `CLEANER_KEYS`. Raises `SettingsError` without the key."""
    if key == ENABLED:
        return parse_bool(value)
    try:
        percent = float(value) if isinstance(value, str | int | float) else -1.0
    except (ValueError, OverflowError):
        percent = -1.0
    if isinstance(value, bool) or not 0 < percent <= 100:
        raise SettingsError(
            f"{describe(value)} is not a percentage above 0 and up to 100; write for example 80.0"
        )
    return percent


def directories_in(text: str) -> tuple[str, ...]:
    """The directories of a comma-separated text, absolute and normal."""
    names = [name.strip() for name in text.split(",")]
    return tuple(slab_directory(name).path for name in names if name)


def store_of(
    directories: Sequence[str], plugin: str, mount_point: str, file_systems: FileSystems
) -> tuple[tuple[StoreUrl, ...], str]:
    """The store for in-tree `directories`, and why it is of its kind.

    Local file systems make a slab store, one directory each. A shared one, or the 3FS plug-in,
    makes a files store, which has one directory.
    """
    if plugin == "3fs":
        _below_mount_point(directories, mount_point)
    below = [f"{directory.rstrip('/')}/{SUBDIRECTORY}" for directory in directories]
    found = [file_systems.under(directory) for directory in directories]
    shared = [
        f"{directory} is on {file_system}, which other hosts may share"
        for directory, file_system in zip(directories, found, strict=True)
        if file_system.shared
    ]
    if plugin != "3fs" and not shared:
        why = ", ".join(dict.fromkeys(map(str, found)))
        return parse_store_urls([StoreUrl("slab", path) for path in below]), f"{why}: local"
    why = shared[0] if shared else "plugin is 3fs"
    if len(below) > 1:
        raise SettingsError(
            f"{why}, and a store on a shared file system has one directory; name one, or set "
            f'store to "{",".join(f"slab://{path}" for path in below)}" if no other host uses them'
        )
    return (StoreUrl("files", below[0]),), why


def _below_mount_point(directories: Sequence[str], mount_point: str) -> None:
    top = os.path.normpath(mount_point) if mount_point else ""
    for directory in directories:
        if top and not f"{directory}/".startswith(f"{top}/"):
            raise SettingsError(
                f"{directory} is not below plugin.3fs.mount_point = {top}, where 3FS can reach it; "
                f"name a directory such as {top}/hicache"
            )


def budget_of(
    cleaner: Winners,
    urls: Sequence[StoreUrl],
    *,
    in_tree_store: bool,
    capacity: str | None,
    file_systems: FileSystems,
) -> tuple[int | None, list[str]]:
    """The byte budget that the cleaner's keys come to, or None for the default; and notes.

    `cleaner` has the given ones of `CLEANER_KEYS`. `capacity` says where a capacity was given,
    which then counts instead. Without keys, a store of in-tree directories has the in-tree
    connector's default watermark.
    """
    high = cleaner.get(HIGH)
    enabled = ENABLED not in cleaner or cleaner[ENABLED][1]
    percent = high[1] if high else _DEFAULT_HIGH
    if enabled and LOW in cleaner and cleaner[LOW][1] >= percent:
        raise SettingsError(
            f"{cleaner[LOW][0].origin}: {cleaner[LOW][1]:g} is not below {HIGH} = {percent:g}; "
            "lower the one or raise the other"
        )
    notes = []
    if ENABLED in cleaner:
        notes.append(
            f"{_shown(cleaner, ENABLED)} is not used: the store keeps inside capacity by itself"
            + ("" if enabled else "; keep other cleaners away from it, they would damage it")
        )
    if LOW in cleaner:
        notes.append(
            f"{_shown(cleaner, LOW)} is not used: at the budget, room is made for new pages only"
        )
    said = _shown(cleaner, HIGH) if high else f"{HIGH} = {_DEFAULT_HIGH:g} (in-tree default)"
    if capacity is not None:
        return None, [*notes, f"{said} is not used: {capacity} is set"] if high else notes
    if not enabled:
        return None, [*notes, f"{said} is not used: the cleaner is off"] if high else notes
    if not (cleaner or in_tree_store) or not urls:
        return None, notes
    budget = file_systems.budget([url.path for url in urls], percent)
    if not budget.size_bytes:
        return None, [*notes, f"{said} is not used: the file system does not say its size"]
    share = (
        f"that share of {format_size(budget.size_bytes, digits=1)}, less "
        f"{format_size(budget.other_bytes, digits=1)} that other files take or are reserved"
    )
    if budget.is_least:
        share = (
            f"the least there is, because nothing is left of {share}; free space, or set capacity"
        )
    notes.append(f"{said} is read as capacity = {format_size(budget.nbytes)}: {share}")
    return budget.nbytes, notes


def _shown(cleaner: Winners, key: str) -> str:
    given, value = cleaner[key]
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
    return f"{key} = {shown} ({given.source})"
