"""The report's plots, as SVG markup to be placed inside HTML.

Ink is `currentColor` and the ground transparent, so that one drawing serves light and dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from holotron.report.readable import binary_unit, seconds_text

INK = "#010203"  # stands for currentColor until the SVG is written
BLUE, ORANGE, GREY = "#3b8ac4", "#d9822b", "#8a8f98"
STYLE: Any = {  # matplotlib types its keys as a long Literal
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "text.parse_math": False,  # a task named $x$ is a name, not a formula
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A success rate with its interval, all as fractions."""

    label: str
    rate: float
    low: float
    high: float


def success_bars(bars: Sequence[Bar]) -> str:
    """Horizontal bars with whiskers, first bar on top."""
    height = 0.55 + 0.21 * max(len(bars), 1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, height), layout="constrained")
        axes = figure.subplots()
        places = range(len(bars))
        rates = [bar.rate for bar in bars]
        whiskers = [[b.rate - b.low for b in bars], [b.high - b.rate for b in bars]]
        axes.barh(places, rates, height=0.62, color=BLUE, alpha=0.75)
        axes.errorbar(rates, places, xerr=whiskers, fmt="none", ecolor=INK, elinewidth=0.9, capsize=2)
        axes.set_yticks(list(places), [bar.label for bar in bars])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, 1.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        _rule(axes, "x")
        return _svg(figure, "success")


def latency_histogram(seconds: Sequence[float]) -> str:
    """Distribution of the time a step took, with the median and the 95th percentile named."""
    ordered = sorted(seconds)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.4), layout="constrained")
        axes = figure.subplots()
        axes.hist(ordered, bins=min(40, max(8, len(ordered) // 4)), color=BLUE, alpha=0.75)
        for share, colour, name in ((0.5, ORANGE, "median"), (0.95, GREY, "95th percentile")):
            value = quantile(ordered, share)
            axes.axvline(value, color=colour, linewidth=1.6, label=f"{name} {seconds_text(value)}")
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds per step")
        axes.set_ylabel("steps")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.legend(frameon=False)
        _rule(axes, "y")
        return _svg(figure, "latency")


def memory_by_step(state: Sequence[tuple[int, float]], kv: Sequence[tuple[int, float]]) -> str:
    """Mean state and KV bytes of a session against the step number (counted from 1)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.4), layout="constrained")
        axes = figure.subplots()
        unit, name_of_unit = binary_unit(max(size for _, size in (*state, *kv)))
        for series, colour, name in ((state, BLUE, "state (SSM + conv)"), (kv, ORANGE, "KV cache")):
            if series:
                steps = [step for step, _ in series]
                axes.plot(
                    steps,
                    [size / unit for _, size in series],
                    color=colour,
                    marker="o",
                    markersize=3,
                    linewidth=1.4,
                    label=name,
                )
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_ylabel(name_of_unit)
        axes.set_xlabel("step")
        axes.legend(frameon=False)
        _rule(axes, "y")
        return _svg(figure, "memory")


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; `ordered` ascending and not empty."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    value = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    return min(value, ordered[above])  # rounding may overshoot


def _rule(axes: Axes, axis: str) -> None:
    axes.grid(axis=axis, color=GREY, alpha=0.3, linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would reach the whole page
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return _own_ids(text, name).replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def _own_ids(text: str, name: str) -> str:
    """Several plots share a page: drop the ids nobody refers to and prefix the others."""
    used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", text))
    wanted = {first or second for first, second in used}
    text = re.sub(
        r' id="([^"]+)"',
        lambda match: f' id="{name}-{match[1]}"' if match[1] in wanted else "",
        text,
    )
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    return re.sub(r'href="#', f'href="#{name}-', text)
