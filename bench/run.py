"""One run from the first check to the last file: what is measured in which order, and shown."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from bench.disk import PageCache, describe_machine, workspace
from bench.fio import Fio, fio_version
from bench.plan import MIB, BenchError, Plan, format_size, large_bytes, shape_of
from bench.s3_server import check_server_parts

if TYPE_CHECKING:
    from bench.measure import Sample

_FORMAT = 1


@dataclass(frozen=True)
class Outputs:
    """Where the figures go besides the terminal."""

    directory: Path
    json: Path | None = None
    plot: Path | None = None


def run(plan: Plan, outputs: Outputs, console: Console, *, opening: bool) -> None:
    """Measure, show, write; everything put on disk meanwhile is gone afterwards.

    Raises BenchError with one line where it cannot start or a subject misbehaves, and
    KeyboardInterrupt when told to stop.
    """
    # torch and SGLang take seconds to import: check the cheap things first.
    fio = "" if opening or "fio" not in plan.subjects else fio_version()
    if "objects" in plan.what and not opening:
        check_server_parts()
    needed = 2 * large_bytes(plan.large_pages) if opening else plan.disk_needed()
    if outputs.plot is not None:
        _check_plot(plan)
    start = time.monotonic()
    with _stop_on_sigterm(), workspace(outputs.directory, needed) as directory:
        with console.status("importing SGLang"), warnings.catch_warnings():
            # which of its GPU kernels a machine cannot run
            warnings.simplefilter("ignore", UserWarning)
            from bench import plot, report, subjects

            subjects.preload()
        cache = PageCache(directory)
        machine = describe_machine(directory, fio)
        console.print(_heading(machine, cache))
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if load > cores / 2:
            console.print(
                f"[yellow]load is {load:.1f} on {cores} cores: others disturb this run[/]"
            )
        notes: list[str] = []
        samples = list(_measure(plan, directory, cache, console, notes, opening=opening))
        rows = report.build_rows(samples)
        names = [name for name in plan.subjects if any(s.subject == name for s in samples)]
        for table in report.tables(rows, names):
            console.print(table)
        for note in notes:
            console.print(f"not measured: {note}", highlight=False)
        minutes = (time.monotonic() - start) / 60
        console.print(f"{report.verdict(rows)}; {minutes:.1f} minutes".removeprefix("; "))
        if outputs.json is not None:
            facts: dict[str, object] = {
                "format": _FORMAT,
                "plan": asdict(plan),
                "page_shapes": {page: asdict(shape_of(page)) for page in plan.pages},
                "machine": machine | {"load_average_after": os.getloadavg()},
                "page_cache": cache.method,
                "not_measured": notes,
                "seconds": time.monotonic() - start,
            }
            report.write_json(outputs.json, samples, rows, facts)
            console.print(f"samples: {outputs.json}")
        if outputs.plot is not None:
            plot.write_plot(outputs.plot, rows, _heading(machine, cache))
            console.print(f"plot: {outputs.plot}")


def _check_plot(plan: Plan) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install matplotlib")
    if not {"set", "get"} & set(plan.what):
        raise BenchError("--plot shows sets and gets: add --what set,get")


def _measure(
    plan: Plan,
    directory: Path,
    cache: PageCache,
    console: Console,
    notes: list[str],
    *,
    opening: bool,
) -> Iterator[Sample]:
    from bench import files, large, measure, modes, objects

    numbers = measure.Numbers()
    cells = [(page, layout) for page in plan.pages for layout in plan.layouts]
    if opening or not {"set", "get", "exists"} & set(plan.what):
        cells = []
    parts = [part for part in ("files", "objects", "modes", "large") if part in plan.what]
    extra = ["open"] if opening else parts
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20))
    with Progress(
        *columns, MofNCompleteColumn(), Elapsed(), console=console, transient=True
    ) as bar:
        task = bar.add_task("starting", total=len(cells) + len(extra))
        fio = _lay_out(plan, directory, lambda text: bar.update(task, description=text))

        def steps(name: str) -> Callable[[str], None]:
            return lambda text: bar.update(task, description=f"{name}: {text}")

        for page, layout in cells:
            name = f"{format_size(page)} {layout}"
            here = directory / f"cell-{page}-{layout}"
            with measure.Cell(plan, page, layout, here, fio, cache, numbers, steps(name)) as cell:
                taken = []
                for sample in cell.run():
                    taken.append(sample)
                    yield sample
            shutil.rmtree(here)
            bar.advance(task)
            console.print(_summary(name, taken), highlight=False, style="dim")
        for part in extra:
            here = directory / part
            if part == "modes":
                yield from modes.run_modes(plan, here, cache, numbers, steps(part), notes.append)
            elif part == "files":
                if "files" in plan.subjects:
                    yield from files.run_files(plan, here, numbers, steps(part))
                else:
                    notes.append("files: --subjects leaves it out")
            elif part == "objects":
                yield from objects.run_objects(plan, here, numbers, steps(part))
            elif "ours" not in plan.subjects:
                notes.append(f"{part}: it measures ours, which --subjects leaves out")
            elif part == "large":
                yield from large.run_large(plan, here, numbers, steps(part))
            else:
                yield from large.run_open(plan, here, cache, numbers, steps(part))
            shutil.rmtree(here, ignore_errors=True)
            bar.advance(task)


def _lay_out(plan: Plan, directory: Path, step: Callable[[str], None]) -> Fio | None:
    if "fio" not in plan.subjects or not {"set", "get"} & set(plan.what):
        return None
    step(f"fio lays out {format_size(plan.fio_file)}")
    fio = Fio(directory / "fio", plan.fio_file, plan.fio_bytes)
    fio.lay_out()
    return fio


def _summary(name: str, samples: Sequence[Sample]) -> str:
    """One line for a finished cell."""
    from bench import measure, report

    parts = []
    for row in report.build_rows(samples):
        if row.operation in (measure.STEADY, measure.COLD):
            who = next(iter(row.values))
            parts.append(
                f"{row.operation} {row.values[who]:.2f}"
                + (f" ({row.values['fio']:.2f})" if "fio" in row.values else "")
            )
    return f"{name:26s} " + ", ".join(parts)


def _heading(machine: dict[str, object], cache: PageCache) -> str:
    device, memory = machine["device"], machine["memory_bytes"]
    name = device.get("name") if isinstance(device, dict) else device
    size = format_size(memory // MIB * MIB) if isinstance(memory, int) else memory
    return (
        f"{machine['file_system']} on {name}, kernel {machine['kernel']}, "
        f"{machine['cores']} cores, {size}, cold = {cache.method}"
    )


@contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Let a SIGTERM unwind as Ctrl-C does, so that the disk is cleaned up."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
