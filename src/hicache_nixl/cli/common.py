"""What the commands share: where settings come from, how errors and JSON leave."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hicache_nixl.bucket import Bucket
from hicache_nixl.errors import HiCacheNixlError
from hicache_nixl.settings import Settings, load_settings
from hicache_nixl.stores.base import Store
from hicache_nixl.stores.files import FilesStore
from hicache_nixl.stores.slab import SlabStore
from hicache_nixl.units import describe

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store", help="Store URL, for instance slab:///nvme0/hicache or s3://bucket/prefix."
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file (TOML, JSON or YAML)."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting, for instance --set capacity=2TiB. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", help="Only this namespace: the first digits of its digest."),
]


def given(store: str | None, settings: list[str] | None) -> dict[str, Any]:
    """Settings named on the command line."""
    values: dict[str, Any] = {}
    if store is not None:
        values["store"] = store
    for item in settings or []:
        key, sep, value = item.partition("=")
        if not sep:
            raise typer.BadParameter(f"--set {describe(item)} has no '='; write capacity=2TiB")
        values[key.strip()] = value.strip()
    return values


def settings_from(store: str | None, config: Path | None, settings: list[str] | None) -> Settings:
    """Settings from the command line, over those of file and environment."""
    return load_settings(given(store, settings), config_file=config)


def print_notes(settings: Settings) -> None:
    """How keys of the in-tree connector were understood, on standard error."""
    for note in settings.notes:
        err.print(f"note: {note}", markup=False)


def open_existing(settings: Settings) -> Store:
    """The store of these settings, which must exist; nothing is created or evicted."""
    if settings.bucket is not None:
        return _open_bucket(settings.bucket, settings.deadline)
    directories = [Path(url.path) for url in settings.store]
    for directory in directories:
        if not (directory / "store.json").is_file():
            raise HiCacheNixlError(
                f"{directory} holds no store; name the directory SGLang writes to with --store"
            )
    capacity = max(settings.capacity, _UNBOUNDED)
    if settings.store[0].scheme == "files":
        return FilesStore(
            directories[0],
            capacity_bytes=capacity,
            timeout_s=settings.deadline,
            keeps_house=False,
        )
    return SlabStore(
        directories,
        capacity_bytes=capacity,
        busy_timeout_s=settings.deadline,
    )


def _open_bucket(bucket: Bucket, timeout_s: float) -> Store:
    from hicache_nixl.stores.objects import ObjectsStore

    opened = ObjectsStore(bucket, timeout_s=timeout_s)
    try:
        if not opened.is_made():
            raise HiCacheNixlError(
                f"{bucket} holds no store; name bucket and prefix SGLang writes to with --store"
            )
    except HiCacheNixlError:
        opened.close()
        raise
    return opened


_UNBOUNDED = 1 << 62  # an administrator who looks at a store must not shrink it


@contextlib.contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Our errors leave as one line and exit code 1."""
    try:
        yield
    except HiCacheNixlError as error:
        err.print(f"[red]error:[/red] {escape(str(error))}", markup=True)
        raise typer.Exit(1) from error


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2, default=str))


def matching(store: Store, prefix: str | None) -> list[bytes]:
    """Digests of the namespaces whose hexadecimal digest starts with `prefix`; all if None."""
    digests = [use.namespace.digest for use in store.namespaces()]
    if prefix is None:
        return digests
    found = [digest for digest in digests if digest.hex().startswith(prefix.lower())]
    if not found:
        known = ", ".join(digest.hex()[:12] for digest in digests) or "none"
        raise HiCacheNixlError(f"no namespace starts with {prefix!r}; the store has {known}")
    return found
