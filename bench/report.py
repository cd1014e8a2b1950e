"""From samples to rows, verdicts, tables and the JSON file.

Owns the arithmetic: medians over rounds, ratios of medians, targets. Reads no clock, moves no byte.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from bench import files, large, modes
from bench.measure import COLD, FRESH, STEADY, Sample
from bench.plan import KIB, format_size

RATES = (FRESH, STEADY, COLD)
EXISTS_LIMIT, OPEN_LIMIT, REBUILD_LIMIT = 0.0005, 2.0, 15.0
FILES_LIMIT, FILES_SLOW_LIMIT = 0.003, 0.040
_NOISY = 1.5


@dataclass(frozen=True)
class Target:
    """A figure to reach: `ours / fio` at least `ratio`, or seconds at most `seconds`."""

    ratio: float | None = None
    seconds: float | None = None

    def reached(self, ratio: float | None, seconds: float | None) -> bool | None:
        """None where the figure was not measured."""
        if self.ratio is not None:
            return None if ratio is None else ratio >= self.ratio
        if self.seconds is not None:
            return None if seconds is None else seconds <= self.seconds
        return None

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"≥ {self.ratio:g} fio"
        if self.seconds is None:
            return ""
        return f"≤ {self.seconds * 1e3:g} ms" if self.seconds < 1 else f"≤ {self.seconds:g} s"


def target_for(operation: str, page: int) -> Target | None:
    """What ours is to reach, if there is a target."""
    if operation == STEADY:
        return Target(ratio=0.85 if page >= 256 * KIB else 0.6)
    if operation == COLD and page >= 256 * KIB:
        return Target(ratio=0.9)
    if operation.startswith(files.SLOW):
        return Target(seconds=FILES_SLOW_LIMIT)
    if operation.startswith(files.LOCAL):
        return Target(seconds=FILES_LIMIT)
    if is_exists(operation):
        return Target(seconds=EXISTS_LIMIT)
    if operation == large.OPEN:
        return Target(seconds=OPEN_LIMIT)
    if operation == large.REBUILD:
        return Target(seconds=REBUILD_LIMIT)
    return None


@dataclass(frozen=True)
class Row:
    """One operation on one page size in one layout. GB/s, or seconds where nothing is moved."""

    operation: str
    page: int
    layout: str
    values: dict[str, float]
    over_fio: float | None
    over_in_tree: float | None
    files_over_in_tree: float | None
    target: str
    reached: bool | None
    noisy: bool
    failed_pages: int
    keys: int


def ratio(of: float | None, to: float | None) -> float | None:
    """`of / to`, None where either is missing or `to` is zero."""
    return None if of is None or not to else of / to


def is_exists(operation: str) -> bool:
    """Whether an operation is an `exists` call, of whatever store."""
    return operation.startswith("exists")


def moves_bytes(operation: str) -> bool:
    """Whether an operation is a bandwidth (else it is a time)."""
    return operation in RATES or operation in modes.OPERATIONS


def build_rows(samples: Sequence[Sample]) -> list[Row]:
    """One row per operation, page size and layout, in the order they were measured."""
    groups: dict[tuple[str, int, str], dict[str, list[Sample]]] = {}
    for sample in samples:
        group = groups.setdefault((sample.operation, sample.page, sample.layout), {})
        group.setdefault(sample.subject, []).append(sample)
    return [_row(*place, group) for place, group in groups.items()]


def _row(operation: str, page: int, layout: str, group: dict[str, list[Sample]]) -> Row:
    rates = moves_bytes(operation)
    figures = {
        who: [sample.rate if rates else sample.seconds for sample in taken]
        for who, taken in group.items()
    }
    values = {who: statistics.median(figure) for who, figure in figures.items()}
    ours, fio = values.get("ours"), figures.get("fio", [])
    over_fio = ratio(ours, values.get("fio"))
    over_in_tree = ratio(ours, values.get("in-tree"))
    files_over_in_tree = ratio(values.get("files"), values.get("in-tree"))
    if operation.startswith(files.LOCAL):  # of the files store alone, which is not an index
        ours = values.get("files")
    target = target_for(operation, page)
    everything = [sample for taken in group.values() for sample in taken]
    return Row(
        operation,
        page,
        layout,
        values,
        over_fio,
        over_in_tree,
        files_over_in_tree,
        "" if target is None else str(target),
        None if target is None else target.reached(over_fio, ours),
        bool(fio) and max(fio) > _NOISY * min(fio),
        sum(sample.failed_pages for sample in everything),
        max(sample.keys for sample in everything),
    )


def _mark(reached: bool | None) -> str:
    return {True: "[green]reached[/]", False: "[red]not reached[/]", None: ""}[reached]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(title: str, words: Sequence[str], figures: Sequence[str], target: bool = True) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    if target:
        table.add_column("target", no_wrap=True)
    return table


def rate_table(operation: str, rows: Sequence[Row], subjects: Sequence[str]) -> Table:
    """GB/s of one operation beside the device."""
    goals = list(dict.fromkeys(row.target for row in rows if row.target))
    title = f"{operation}, GB/s" + (f" (target: {', '.join(goals)})" if goals else "")
    columns = (*subjects, "ours/fio", "ours/in-tree", "files/in-tree")
    table = _table(title, ("page", "layout"), columns, target=bool(goals))
    page = 0
    for row in rows:
        cells = [
            format_size(row.page) if row.page != page else "",
            row.layout,
            *(_number(row.values.get(name)) for name in subjects),
            ("~" if row.noisy else "") + _number(row.over_fio),
            _number(row.over_in_tree, 1),
            _number(row.files_over_in_tree, 1),
        ]
        page = row.page
        table.add_row(*cells, *([_mark(row.reached)] if goals else []))
    return table


def exists_table(rows: Sequence[Row]) -> Table:
    """Milliseconds of one `exists` call."""
    columns = ("keys", "ours", "files", "in-tree", "in-tree/ours", "in-tree/files")
    title = f"exists, ms a call (target: {Target(seconds=EXISTS_LIMIT)})"
    table = _table(title, ("keys are", "page", "layout"), columns)
    for row in rows:
        times = {who: seconds * 1e3 for who, seconds in row.values.items()}
        table.add_row(
            row.operation.removeprefix("exists, "),
            format_size(row.page),
            row.layout,
            str(row.keys),
            _number(times.get("ours")),
            _number(times.get("files")),
            _number(times.get("in-tree")),
            _number(ratio(times.get("in-tree"), times.get("ours")), 1),
            _number(ratio(times.get("in-tree"), times.get("files")), 1),
            _mark(row.reached),
        )
    return table


def files_table(rows: Sequence[Row]) -> Table:
    """Milliseconds of an `exists` of many keys on the files store."""
    table = _table(
        f"exists of {files.KEYS} keys, ms a call (slow: a call of the file system takes 1 ms)",
        ("keys are",),
        ("files", "in-tree", "in-tree/files", "at most"),
    )
    for row in rows:
        times = {who: seconds * 1e3 for who, seconds in row.values.items()}
        table.add_row(
            row.operation.removeprefix(files.LOCAL).strip(" ,"),
            _number(times.get("files")),
            _number(times.get("in-tree")),
            _number(ratio(times.get("in-tree"), times.get("files")), 1),
            row.target.removeprefix("≤ "),
            _mark(row.reached),
        )
    return table


def modes_table(rows: Sequence[Row]) -> Table:
    """GB/s of each way to reach the disk."""
    title = f"GB/s by mode, pages of {format_size(rows[0].page)}, {rows[0].layout}"
    table = _table(title, ("connector and mode",), [row.operation for row in rows], target=False)
    for who in rows[0].values:
        table.add_row(who, *(_number(row.values.get(who)) for row in rows))
    return table


def open_table(rows: Sequence[Row]) -> Table:
    """Seconds to open and to rebuild."""
    table = _table("opening a store, s", ("operation",), ("pages", "ours", "at most"))
    for row in rows:
        table.add_row(
            row.operation,
            f"{row.keys:,}",
            _number(row.values.get("ours")),
            row.target.removeprefix("≤ "),
            _mark(row.reached),
        )
    return table


def tables(rows: Sequence[Row], subjects: Sequence[str]) -> list[Table]:
    """Those tables that have something to show."""
    made = []
    for operation in RATES:
        if chosen := [row for row in rows if row.operation == operation]:
            made.append(rate_table(operation, chosen, subjects))
    asked = [row for row in rows if is_exists(row.operation)]
    many = [row for row in asked if row.operation.startswith(files.LOCAL)]
    if chosen := [row for row in asked if row not in many]:
        made.append(exists_table(chosen))
    if many:
        made.append(files_table(many))
    for group, make in (
        (modes.OPERATIONS, modes_table),
        ((large.OPEN, large.REBUILD), open_table),
    ):
        if chosen := [row for row in rows if row.operation in group]:
            made.append(make(chosen))
    return made


def verdict(rows: Sequence[Row]) -> str:
    """One line: how many targets are reached, and what to make of the figures."""
    judged = [row for row in rows if row.reached is not None]
    parts = []
    if judged:
        parts.append(
            f"{sum(row.reached is True for row in judged)} of {len(judged)} targets reached"
        )
    if noisy := sum(row.noisy for row in rows):
        parts.append(f"~ ({noisy} rows): fio's own rounds differ by more than {_NOISY:g} times")
    if failed := sum(row.failed_pages for row in rows):
        parts.append(f"{failed} pages failed and are not counted as bytes")
    return "; ".join(parts)


def write_json(
    file: Path, samples: Sequence[Sample], rows: Sequence[Row], facts: dict[str, object]
) -> None:
    """Every sample, the rows made of them, and what the figures depend on."""
    content = {
        **facts,
        "units": {"seconds": "s", "nbytes": "B", "values": "GB/s, or s where no byte is moved"},
        "rows": [asdict(row) for row in rows],
        "samples": [asdict(sample) for sample in samples],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
