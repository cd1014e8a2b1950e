"""From samples to rows, verdicts, tables and the JSON file.

Owns the arithmetic: medians over rounds, ratios of medians, targets. Reads no clock, moves no byte.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from bench import files, large, modes, object_report
from bench.measure import COLD, FRESH, STEADY, Sample
from bench.plan import KIB, format_size
from bench.rows import Row, Target, new_table, number, over, shown_mark

RATES = (FRESH, STEADY, COLD)
EXISTS_LIMIT, OPEN_LIMIT, REBUILD_LIMIT = 0.0005, 2.0, 15.0
FILES_LIMIT, FILES_SLOW_LIMIT = 0.003, 0.040
_NOISY = 1.5


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
    return object_report.target_for(operation, page)


def is_exists(operation: str) -> bool:
    """Whether an operation is an `exists` call, of whatever store."""
    return operation.startswith("exists")


def moves_bytes(operation: str) -> bool:
    """Whether an operation is a bandwidth (else it is a time)."""
    return operation in (*RATES, *modes.OPERATIONS, *object_report.RATES)


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
    over_fio = over(values.get("ours"), values.get("fio"))
    over_raw = over(values.get("objects"), values.get("raw"))
    ours, peer = values.get("ours"), "fio"
    if operation.startswith(files.LOCAL):  # of the files store alone, which is not an index
        ours = values.get("files")
    elif object_report.is_ours(operation):
        ours, peer = values.get("objects"), "raw"
    device = figures.get(peer, [])
    target = target_for(operation, page)
    everything = [sample for taken in group.values() for sample in taken]
    return Row(
        operation,
        page,
        layout,
        values,
        over_fio,
        over(values.get("ours"), values.get("in-tree")),
        over(values.get("files"), values.get("in-tree")),
        "" if target is None else str(target),
        None if target is None else target.reached(over_raw if peer == "raw" else over_fio, ours),
        rates and bool(device) and max(device) > _NOISY * min(device),
        sum(sample.failed_pages for sample in everything),
        max(sample.keys for sample in everything),
        over_raw,
        _requests(group),
    )


def _requests(group: dict[str, list[Sample]]) -> dict[str, float]:
    """Of each subject that made any: for a page that was to be moved, or for a call."""
    counted = {}
    for who, taken in group.items():
        if any(sample.requests for sample in taken):
            counted[who] = statistics.median(
                sample.requests / max(1, sample.nbytes // sample.page + sample.failed_pages)
                for sample in taken
            )
    return counted


def rate_table(operation: str, rows: Sequence[Row], subjects: Sequence[str]) -> Table:
    """GB/s of one operation beside the device."""
    subjects = [name for name in subjects if any(name in row.values for row in rows)]
    goals = list(dict.fromkeys(row.target for row in rows if row.target))
    title = f"{operation}, GB/s" + (f" (target: {', '.join(goals)})" if goals else "")
    columns = (*subjects, "ours/fio", "ours/in-tree", "files/in-tree")
    table = new_table(title, ("page", "layout"), columns, target=bool(goals))
    page = 0
    for row in rows:
        cells = [
            format_size(row.page) if row.page != page else "",
            row.layout,
            *(number(row.values.get(name)) for name in subjects),
            ("~" if row.noisy else "") + number(row.over_fio),
            number(row.over_in_tree, 1),
            number(row.files_over_in_tree, 1),
        ]
        page = row.page
        table.add_row(*cells, *([shown_mark(row.reached)] if goals else []))
    return table


def exists_table(rows: Sequence[Row]) -> Table:
    """Milliseconds of one `exists` call."""
    columns = ("keys", "ours", "files", "in-tree", "in-tree/ours", "in-tree/files")
    title = f"exists, ms a call (target: {Target(seconds=EXISTS_LIMIT)})"
    table = new_table(title, ("keys are", "page", "layout"), columns)
    for row in rows:
        times = {who: seconds * 1e3 for who, seconds in row.values.items()}
        table.add_row(
            row.operation.removeprefix("exists, "),
            format_size(row.page),
            row.layout,
            str(row.keys),
            number(times.get("ours")),
            number(times.get("files")),
            number(times.get("in-tree")),
            number(over(times.get("in-tree"), times.get("ours")), 1),
            number(over(times.get("in-tree"), times.get("files")), 1),
            shown_mark(row.reached),
        )
    return table


def files_table(rows: Sequence[Row]) -> Table:
    """Milliseconds of an `exists` of many keys on the files store."""
    table = new_table(
        f"exists of {files.KEYS} keys, ms a call (slow: a call of the file system takes 1 ms)",
        ("keys are",),
        ("files", "in-tree", "in-tree/files", "at most"),
    )
    for row in rows:
        times = {who: seconds * 1e3 for who, seconds in row.values.items()}
        table.add_row(
            row.operation.removeprefix(files.LOCAL).strip(" ,"),
            number(times.get("files")),
            number(times.get("in-tree")),
            number(over(times.get("in-tree"), times.get("files")), 1),
            row.target.removeprefix("≤ "),
            shown_mark(row.reached),
        )
    return table


def modes_table(rows: Sequence[Row]) -> Table:
    """GB/s of each way to reach the disk."""
    title = f"GB/s by mode, pages of {format_size(rows[0].page)}, {rows[0].layout}"
    table = new_table(title, ("connector and mode",), [row.operation for row in rows], target=False)
    for who in rows[0].values:
        table.add_row(who, *(number(row.values.get(who)) for row in rows))
    return table


def open_table(rows: Sequence[Row]) -> Table:
    """Seconds to open and to rebuild."""
    table = new_table("opening a store, s", ("operation",), ("pages", "ours", "at most"))
    for row in rows:
        table.add_row(
            row.operation,
            f"{row.keys:,}",
            number(row.values.get("ours")),
            row.target.removeprefix("≤ "),
            shown_mark(row.reached),
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
    return [*made, *object_report.tables(rows)]


def verdict(rows: Sequence[Row]) -> str:
    """One line: how many targets are reached, and what to make of the figures."""
    judged = [row for row in rows if row.reached is not None]
    parts = []
    if judged:
        parts.append(
            f"{sum(row.reached is True for row in judged)} of {len(judged)} targets reached"
        )
    if noisy := sum(row.noisy for row in rows):
        parts.append(
            f"~ ({noisy} rows): the device's own rounds differ by more than {_NOISY:g} times"
        )
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
