"""The picture: bars for each page size, the device as a line across them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.plan import format_size
from bench.report import RATES, target_for
from bench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"ours": "#1b7f5c", "in-tree": "#c2683a", "nixl": "#8c9bb0"}
_DEVICE = "#222222"
_UNNAMED = "_nolegend_"


def write_plot(file: Path, rows: Sequence[Row], title: str) -> None:
    """A PNG: one panel per operation and layout."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [row for row in rows if row.operation in RATES]
    operations = list(dict.fromkeys(row.operation for row in shown))
    layouts = list(dict.fromkeys(row.layout for row in shown))
    figure, axes = plt.subplots(
        len(operations),
        len(layouts),
        figsize=(1.5 + 3.9 * len(layouts), 1.2 + 2.6 * len(operations)),
        squeeze=False,
        sharey="row",
    )
    for line, operation in enumerate(operations):
        for column, layout in enumerate(layouts):
            panel = axes[line][column]
            here = [row for row in shown if (row.operation, row.layout) == (operation, layout)]
            here.sort(key=lambda row: row.page)
            _panel(panel, here)
            panel.set_title(f"{operation}, {layout}", fontsize=9)
            if column == 0:
                panel.set_ylabel("GB/s")
        highest = max(v for row in shown if row.operation == operation for v in row.values.values())
        axes[line][0].set_ylim(0, 1.06 * highest)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _panel(panel: Axes, rows: Sequence[Row]) -> None:
    bars = [name for name in _COLORS if any(name in row.values for row in rows)]
    width = 0.8 / max(1, len(bars))
    for place, name in enumerate(bars):
        panel.bar(
            [index - 0.4 + width * (place + 0.5) for index in range(len(rows))],
            [row.values.get(name, 0.0) for row in rows],
            width * 0.92,
            label=name,
            color=_COLORS[name],
        )
    for index, row in enumerate(rows):
        device = row.values.get("fio")
        if device is None:
            continue
        first = index == 0
        span = (index - 0.45, index + 0.45)
        panel.hlines(
            device, *span, color=_DEVICE, linewidth=1.6, label="device (fio)" if first else _UNNAMED
        )
        target = target_for(row.operation, row.page)
        if target is not None and target.ratio is not None:
            panel.hlines(
                device * target.ratio, *span, color=_DEVICE, linewidth=1, linestyles="dotted",
                label="target" if first else _UNNAMED,
            )  # fmt: skip
    panel.set_xticks(range(len(rows)), [format_size(row.page) for row in rows], fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
