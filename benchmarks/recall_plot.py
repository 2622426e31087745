"""The picture of the recall suite: accuracy against length, a panel a task, a line a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
from recall_tasks import TASKS

# label, colour, marker, size of it, dashes, width; what lies on top of each other is drawn from wide to narrow
LINES = {
    "2of4": ("2 attention of 4", "#7dcea0", "D", 7, "-", 4.0),
    "1of4": ("1 attention of 4", "#1f618d", "^", 4, "-", 1.6),
    "4of4": ("attention only", "#17202a", "o", 3, (0, (2, 2)), 1.2),
    "0of4-N64": ("no attention, N 64", "#e59866", "s", 4, "-", 1.6),
    "0of4": ("no attention, N 16", "#c0392b", "v", 5, "-", 1.6),
}
UNITS = {
    "text_recall": "tokens of key-value pairs",
    "copy": "letters to copy",
    "needle": "words of filler",
    "screen_recall": "tokens of screenshots (6 each)",
}


def panel(axes: Axes, name: str, rows: list[dict[str, Any]]) -> None:
    lengths = sorted({row["length"] for row in rows})
    for model, (label, colour, mark, size, dash, width) in LINES.items():
        found: dict[int, list[float]] = {}
        for row in rows:
            if row["model"] == model:
                found.setdefault(row["length"], []).append(row["accuracy"])
        if not found:
            continue
        at = sorted(found)
        mean = [sum(found[x]) / len(found[x]) for x in at]
        axes.plot(
            at, mean, linestyle=dash, color=colour, marker=mark, markersize=size, linewidth=width, label=label,
            clip_on=False,
        )  # fmt: skip
        axes.fill_between(at, [min(found[x]) for x in at], [max(found[x]) for x in at], color=colour, alpha=0.15, lw=0)
    axes.axhline(rows[0]["chance"], linestyle=":", color="black", linewidth=1, label="chance")
    axes.set_xscale("log", base=2)
    longest = max((row["length"] for row in rows if row["trained"]), default=None)
    if longest is not None and longest < lengths[-1]:
        axes.axvspan(longest, lengths[-1], color="black", alpha=0.05, lw=0)
        axes.text(lengths[-1], 1.06, "longer than trained", fontsize=7, color="#555", ha="right", va="center")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(x) for x in lengths])
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", color="black", alpha=0.1, linewidth=0.6)
    axes.set_title(TASKS[name].title, fontsize=9, loc="left", pad=14)
    axes.set_xlabel(UNITS[name])


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Lines are means over seeds, bands reach from the worst seed to the best."""
    style: Any = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "recall"}
    names = [name for name in TASKS if any(row["task"] == name for row in rows)]
    with matplotlib.rc_context(style):
        across = min(len(names), 2)
        down = -(-len(names) // across)
        figure = Figure(figsize=(3.7 * across, 2.7 * down + 0.5), layout="constrained", facecolor="white")
        grid = figure.subplots(down, across, squeeze=False)
        for axes, name in zip(grid.flat, names, strict=False):
            panel(axes, name, [row for row in rows if row["task"] == name])
        for axes in grid.flat[len(names) :]:
            axes.remove()
        for row_of_axes in grid:
            row_of_axes[0].set_ylabel("right answers")
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=7.5, columnspacing=1.2
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
