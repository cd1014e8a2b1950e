"""A row of figures, what it is measured against, and how tables show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table


@dataclass(frozen=True)
class Target:
    """A figure to reach: at least `ratio` of `peer`, or at most `seconds`."""

    ratio: float | None = None
    seconds: float | None = None
    peer: str = "fio"

    def reached(self, ratio: float | None, seconds: float | None) -> bool | None:
        """None where the figure was not measured."""
        if self.ratio is not None:
            return None if ratio is None else ratio >= self.ratio
        if self.seconds is not None:
            return None if seconds is None else seconds <= self.seconds
        return None

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"≥ {self.ratio:g} {self.peer}"
        if self.seconds is None:
            return ""
        return f"≤ {self.seconds * 1e3:g} ms" if self.seconds < 1 else f"≤ {self.seconds:g} s"


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
    over_raw: float | None = None
    """`objects` over the plain client."""
    requests: dict[str, float] = field(default_factory=dict)
    """What the S3 server was asked for each page, or for each call where nothing is moved."""


def over(of: float | None, to: float | None) -> float | None:
    """`of / to`, None where either is missing or `to` is zero."""
    return None if of is None or not to else of / to


def shown_mark(reached: bool | None) -> str:
    """The last cell of a row with a target."""
    return {True: "[green]reached[/]", False: "[red]not reached[/]", None: ""}[reached]


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def new_table(
    title: str, words: Sequence[str], figures: Sequence[str], target: bool = True
) -> Table:
    """An empty table; a column for `shown_mark` stands last if there is a target."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    if target:
        table.add_column("target", no_wrap=True)
    return table
