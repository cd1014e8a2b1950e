"""`python -m bench`: both connectors and the bare device in one run; `python -m bench open`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import plan as plans
from bench.plan import BenchError, Plan
from bench.run import Outputs, run

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

_PAGES, _QUICK_PAGES = "64KiB,256KiB,2MiB,9MiB", "256KiB,2MiB"
_QUICK_LAYOUT = "layer_first"
_PLAIN_WIDTH = 110

Directory = Annotated[Path, typer.Option("--dir", help="Disk to measure; left as it was found.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")]
Quick = Annotated[bool, typer.Option("--quick", help="A look in a minute, objects in three.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds of each operation.")]


@app.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    quick: Quick = False,
    directory: Directory = Path(".bench"),
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this PNG.")] = None,
    rounds: Rounds = None,
    pages: Annotated[str, typer.Option(help="Page sizes.", show_default=_PAGES)] = "",
    layouts: Annotated[str, typer.Option(help="Host layouts.", show_default="all")] = "",
    what: Annotated[str, typer.Option(help=", ".join(plans.WHAT), show_default="all")] = "",
    subjects: Annotated[str, typer.Option(help="Who is measured.")] = ",".join(plans.SUBJECTS),
) -> None:
    """Speed of this connector, SGLang's own NIXL connector, bare NIXL and fio, in one run.

    Objects are measured at 256KiB and 2MiB in layer_first and page_first if not told otherwise.

    Example: python -m bench --pages 2MiB --layouts page_first --json speed.json --plot speed.png
    """
    if context.invoked_subcommand is not None:
        return
    default_what = "set,get,exists" if quick else ",".join(plans.WHAT)
    default_layouts = _QUICK_LAYOUT if quick else ",".join(plans.LAYOUTS)
    default_pages = _QUICK_PAGES if quick else _PAGES

    def plan() -> Plan:
        made = (plans.quick_plan if quick else plans.full_plan)(
            plans.parse_pages(pages or default_pages),
            plans.choose("layouts", layouts or default_layouts, plans.LAYOUTS),
            plans.choose("what", what or default_what, plans.WHAT),
            plans.choose("subjects", subjects, plans.SUBJECTS),
            rounds or (3 if quick else 5),
        )
        return replace(
            made,
            object_pages=made.pages if pages else plans.OBJECT_PAGES,
            object_layouts=made.layouts if layouts else plans.OBJECT_LAYOUTS,
        )

    _run(plan, Outputs(directory, json, plot), opening=False)


@app.command("open")
def open_store(
    quick: Quick = False,
    directory: Directory = Path(".bench"),
    json: Json = None,
    rounds: Rounds = None,
) -> None:
    """Time to open a store with 300,000 pages, and one of 100,000 that lost its index.

    Example: python -m bench open --rounds 5
    """

    def plan() -> Plan:
        make = plans.quick_plan if quick else plans.full_plan
        return make((), plans.LAYOUTS[:1], ("large",), ("ours",), rounds or 3)

    _run(plan, Outputs(directory, json), opening=True)


def _run(make_plan: Callable[[], Plan], outputs: Outputs, *, opening: bool) -> None:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_PLAIN_WIDTH)
    _clean_environment()
    try:
        run(make_plan(), outputs, console, opening=opening)
    except BenchError as error:
        Console(stderr=True).print(f"[red]bench:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("bench: stopped; nothing is left on disk")
        sys.exit(130)


def _clean_environment() -> None:
    """Forget settings of the caller's shell that would redirect or retune a connector."""
    for name in list(os.environ):
        if name.startswith(("HICACHE_NIXL_", "SGLANG_HICACHE_NIXL_", "AWS_")):
            del os.environ[name]
    for name in ("NO_PROXY", "no_proxy"):  # the S3 server of a run is on this machine
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    # In-tree provokes an error on purpose at start; what matters arrives as an exception too.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")


if __name__ == "__main__":
    app(prog_name="python -m bench")
