"""Rows of the object store: their targets and tables. Reads no clock, moves no byte."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench import object_lookups as lookups
from bench import objects
from bench.plan import KIB, OBJECT_SUBJECTS, format_size
from bench.rows import Row, Target, new_table, number, over, shown_mark

RATES = (objects.SET, objects.GET)
RATIO, RATIO_FROM = 0.85, 256 * KIB
LOOKUP_LIMIT, LATER_LIMIT = 0.100, 0.001
_US = "objects"


def is_ours(operation: str) -> bool:
    """Whether an operation is one of this module's."""
    return operation in RATES or operation.startswith(
        (lookups.LOOKUP, lookups.FIRST, lookups.LATER)
    )


def target_for(operation: str, page: int) -> Target | None:
    """What the object store is to reach, if there is a target."""
    if operation in RATES and page >= RATIO_FROM:
        return Target(ratio=RATIO, peer="raw")
    if operation.startswith(lookups.LOOKUP):
        return Target(seconds=LOOKUP_LIMIT)
    if operation.startswith(lookups.LATER):
        return Target(seconds=LATER_LIMIT)
    return None


def tables(rows: Sequence[Row]) -> list[Table]:
    """Those that have something to show."""
    made = []
    for operation in RATES:
        if chosen := [row for row in rows if row.operation == operation]:
            made.append(_rate_table(operation, chosen))
    if chosen := [row for row in rows if row.operation.startswith(lookups.LOOKUP)]:
        made.append(_lookup_table(chosen))
    if chosen := [row for row in rows if row.operation.startswith((lookups.FIRST, lookups.LATER))]:
        made.append(_down_table(chosen))
    return made


def _rate_table(operation: str, rows: Sequence[Row]) -> Table:
    subjects = [name for name in OBJECT_SUBJECTS if any(name in row.values for row in rows)]
    goals = list(dict.fromkeys(row.target for row in rows if row.target))
    title = f"{operation}, MB/s; requests a page" + (
        f" (target: {', '.join(goals)})" if goals else ""
    )
    columns = (
        *subjects, "÷ raw", "÷ nixl", "÷ in-tree", *(f"{name} req." for name in subjects[:2]),
    )  # fmt: skip
    table = new_table(title, ("page", "layout"), columns, target=bool(goals))
    for row in rows:
        table.add_row(
            format_size(row.page),
            row.layout,
            *(_megabytes(row.values.get(name)) for name in subjects),
            ("~" if row.noisy else "") + number(row.over_raw),
            number(over(row.values.get(_US), row.values.get("nixl"))),
            number(over(row.values.get(_US), row.values.get("in-tree"))),
            *(number(row.requests.get(name)) for name in subjects[:2]),
            *([shown_mark(row.reached)] if goals else []),
        )
    return table


def _megabytes(rate: float | None) -> str:
    return number(None if rate is None else rate * 1e3, 0)


def _lookup_table(rows: Sequence[Row]) -> Table:
    who = list(dict.fromkeys(name for row in rows for name in row.values))
    milliseconds = f"{lookups.ROUND_TRIP * 1e3:g}"
    table = new_table(
        f"exists of {lookups.KEYS} keys in a bucket {milliseconds} ms away, ms and requests a call",
        ("keys are",),
        (*who, *(f"{name} req." for name in who), "at most"),
    )
    for row in rows:
        table.add_row(
            row.operation.removeprefix(f"{lookups.LOOKUP}, "),
            *(_milliseconds(row.values.get(name)) for name in who),
            *(number(row.requests.get(name), 0) for name in who),
            row.target.removeprefix("≤ "),
            shown_mark(row.reached),
        )
    return table


def _down_table(rows: Sequence[Row]) -> Table:
    who = list(dict.fromkeys(name for row in rows for name in row.values))
    table = new_table("after the S3 server was killed, ms a call", ("call",), (*who, "at most"))
    for row in rows:
        table.add_row(
            row.operation.partition(", ")[2],
            *(_milliseconds(row.values.get(name)) for name in who),
            row.target.removeprefix("≤ "),
            shown_mark(row.reached),
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1e3)
