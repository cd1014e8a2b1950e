"""`hicache-nixl ls | verify | clear`: what a store holds, whether it is right, and away with it."""

import time

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hicache_nixl.cli.common import (
    ConfigOption,
    JsonOption,
    NamespaceOption,
    SetOption,
    StoreOption,
    err,
    errors_as_one_line,
    matching,
    open_existing,
    out,
    print_json,
    settings_from,
)
from hicache_nixl.stores.base import NamespaceUse
from hicache_nixl.units import format_duration, format_size

LS_EXAMPLE = "Example: hicache-nixl ls --store slab:///nvme0/hicache"
VERIFY_EXAMPLE = "Example: hicache-nixl verify --store slab:///nvme0/hicache"
CLEAR_EXAMPLE = "Example: hicache-nixl clear --store slab:///nvme0/hicache --namespace 3fa9"


def ls(
    store: StoreOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """List namespaces: what they are, how many pages and bytes, when used."""
    with errors_as_one_line():
        opened = open_existing(settings_from(store, config, settings))
        try:
            uses = opened.namespaces()
            allocated = opened.use().allocated_bytes
        finally:
            opened.close()
    if json:
        print_json({"allocated_bytes": allocated, "namespaces": [_as_json(use) for use in uses]})
        return
    table = Table(box=None, pad_edge=False)
    age = "written" if allocated is None else "used"
    for column in ("namespace", "model", "pool", "dtype", "byte order", "pages", "bytes", age):
        justify = "right" if column in ("pages", "bytes") else "left"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for use in uses:
        manifest = use.namespace.manifest
        table.add_row(
            use.namespace.digest.hex()[:12],
            *(str(manifest.get(key, "")) for key in ("model_name", "pool", "kv_dtype")),
            str(manifest.get("byte_order", "")),
            str(use.pages),
            format_size(use.record_bytes, digits=1),
            _age(use.newest_use_ns) if use.pages else "never",
        )
    out.print(table)
    if allocated is not None:
        out.print(f"{format_size(allocated, digits=1)} allocated")


def verify(
    store: StoreOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    namespace: NamespaceOption = None,
    json: JsonOption = False,
) -> None:
    """Read and check every page; forget damaged ones. Exit code 1 if there were any."""
    results: dict[str, dict[str, int]] = {}
    with errors_as_one_line():
        opened = open_existing(settings_from(store, config, settings))
        try:
            digests = matching(opened, namespace)
            pages = {use.namespace.digest: use.pages for use in opened.namespaces()}
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
                for digest in digests:
                    short = digest.hex()[:12]
                    task = progress.add_task(short, total=pages[digest])
                    counts = results.setdefault(short, {"good": 0, "damaged": 0})
                    for page in opened.verify(digest):
                        counts["good" if page.good else "damaged"] += 1
                        progress.advance(task)
        finally:
            opened.close()
    damaged = sum(counts["damaged"] for counts in results.values())
    if json:
        print_json(results)
    else:
        good = sum(counts["good"] for counts in results.values())
        out.print(f"{good} pages are right, {damaged} were damaged and are forgotten")
    if damaged:
        raise typer.Exit(1)


def clear(
    store: StoreOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    namespace: NamespaceOption = None,
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
    json: JsonOption = False,
) -> None:
    """Forget the pages of one namespace, or of all."""
    with errors_as_one_line():
        opened = open_existing(settings_from(store, config, settings))
        try:
            digests = matching(opened, namespace)
            if not yes:
                names = ", ".join(digest.hex()[:12] for digest in digests) or "nothing"
                question = f"Forget all pages of {names}? (--yes does not ask)"
                typer.confirm(question, abort=True, err=True)
            gone = {digest.hex()[:12]: opened.clear(digest) for digest in digests}
        finally:
            opened.close()
    if json:
        print_json(gone)
    else:
        out.print(f"cleared {sum(gone.values())} pages")


def _as_json(use: NamespaceUse) -> dict[str, object]:
    return {
        "digest": use.namespace.digest.hex(),
        "manifest": use.namespace.manifest,
        "pages": use.pages,
        "bytes": use.record_bytes,
        "oldest_use_ns": use.oldest_use_ns,
        "newest_use_ns": use.newest_use_ns,
    }


def _age(used_ns: int) -> str:
    return f"{format_duration(max(0, round(time.time() - used_ns / 1e9)))} ago"
