"""Attention pictures: a screenshot with what a model looks at laid over it.

Every token's mass lies evenly over the box of pixels it saw, and masses that lie over each other, a tile's and the
thumbnail's, are added. Colour is that density divided by its mean over the picture: 1 is where attention would be if
it were even. Colours start to show at 1, so that a faint picture is one without a clear place.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from holotron.agent.trajectory import write_atomically
from holotron.model.attention_map import AttentionMap, cell_boxes, spread
from holotron.report.plots import STYLE

DPI = 200
RASTER = 1200  # pixels of the longer side that a screenshot is drawn with, where it has as many
LISTED = 5
COLOURS = "YlOrRd"
OPACITY = 0.85
INK, SOFT, MARK = "#1c2127", "#59636e", "#e0007a"
# of the bar below a panel, in the order in which shares are given
SHARE_COLOURS = ("#3b8ac4", "#8fc1e3", "#b9a3d9", "#d9dde2")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """One picture: `mass` (n,) float on `boxes` (n, 4), x0, y0, x1, y1 in pixels of the screenshot.

    `shares` says where all of the attention went, by name, and sums to 1; it may be empty. `point` is a place to mark.
    """

    title: str
    boxes: Tensor
    mass: Tensor
    shares: Mapping[str, float] = field(default_factory=dict)
    point: tuple[float, float] | None = None

    def strongest(self, count: int = LISTED) -> list[int]:
        """The boxes with the most mass, most first, those without any left out."""
        best = self.mass.topk(min(count, len(self.mass))).indices.tolist()
        return [token for token in best if self.mass[token] > 0]


def attention_panel(
    seen: AttentionMap, layers: Sequence[int], title: str, image: int = -1, point: tuple[float, float] | None = None
) -> Panel:
    """What these layers, mean over them and their heads, attend to on one picture. Raises ValueError for layers."""
    return Panel(title, seen.images[image].token_boxes(), seen.heat(image, layers), shares(seen, layers, image), point)


def pointer_panel(seen: AttentionMap, cells: int, title: str, point: tuple[float, float] | None = None) -> Panel:
    """Where the grounding head, `cells` per side of an image token, would click. Raises ValueError without one."""
    if seen.pointer is None:
        raise ValueError("this model has no grounding head, so there is no pointer to draw")
    return Panel(title, cell_boxes(seen.images[-1], cells), seen.pointer, {}, point)


def shares(seen: AttentionMap, layers: Sequence[int], image: int = -1) -> dict[str, float]:
    """Attention on the picture (tiles and thumbnail apart, where there are both), on other pictures, on text."""
    shown, heat = seen.images[image], seen.heat(image, layers)
    across, down = shown.tokens_per_tile
    cut = len(heat) - across * down if shown.thumbnail else len(heat)
    found = {"tiles" if shown.thumbnail else "picture": float(heat[:cut].sum())}
    if shown.thumbnail:
        found["thumbnail"] = float(heat[cut:].sum())
    text = seen.text_mass(layers)
    if len(seen.images) > 1:
        found["other pictures"] = max(1 - text - sum(found.values()), 0.0)
    return found | {"text": text}


def write_attention(out_png: Path, screenshot: Image.Image, panels: Sequence[Panel], title: str, below: str) -> Path:
    """Draw the panels, all of the same screenshot, into one PNG and return `out_png`.

    `title` is the task in full, `below` one line on what is shown. Raises ValueError without a panel.
    """
    if not panels:
        raise ValueError("there is no panel to draw")
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a task may be in any script
        figure = _draw(screenshot.convert("RGB"), panels, title, below)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, facecolor="white")
    out_png.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out_png, buffer.getvalue())
    return out_png


class _Sheet:
    """A figure whose places are inches from the top left."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height))

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        bottom = 1 - (y + height) / self.height
        return self.figure.add_axes((x / self.width, bottom, width / self.width, height / self.height))

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        self.figure.text(x / self.width, 1 - y / self.height, text, va="top", **style)


def _draw(screenshot: Image.Image, panels: Sequence[Panel], title: str, below: str) -> Figure:
    """Panels in rows, as near to a square as their shape allows."""
    margin, gap, bar, legend, foot = 0.25, 0.3, 0.72, 0.3, 0.85
    aspect = screenshot.width / screenshot.height
    most = 6.4 if len(panels) == 1 else 3.6
    width = most * min(1, 0.9 * aspect)
    height = width / aspect
    block = max(width + bar, 3.5)
    columns = _columns(len(panels), block, legend + height + foot)
    rows = math.ceil(len(panels) / columns)
    sheet_width = 2 * margin + columns * block + (columns - 1) * gap
    lines = textwrap.wrap(" ".join(title.split()), int(sheet_width * 10)) or [""]
    if len(lines) > 3:
        lines = [*lines[:2], lines[2][:-1] + "…"]
    under = textwrap.wrap(below, int(sheet_width * 14))
    head = margin + 0.22 * len(lines) + 0.16 * len(under) + 0.14
    sheet = _Sheet(sheet_width, head + rows * (legend + height + foot) + (rows - 1) * 0.1)
    sheet.text(margin, margin, "\n".join(lines), size=12, weight="bold", color=INK, linespacing=1.15)
    sheet.text(margin, margin + 0.22 * len(lines) + 0.02, "\n".join(under), size=8.5, color=SOFT)
    for number, panel in enumerate(panels):
        x = margin + number % columns * (block + gap)
        y = head + number // columns * (legend + height + foot + 0.1)
        sheet.text(x, y + 0.06, panel.title, size=10, color=INK)
        _panel(sheet, panel, screenshot, x, y + legend, width, height, block)
    return sheet.figure


def _columns(count: int, width: float, height: float) -> int:
    """How many panels of this size stand side by side, so that the sheet is landscape and has few holes."""

    def badness(columns: int) -> float:
        rows = math.ceil(count / columns)
        return abs(math.log(columns * width / (rows * height) / 1.4)) + 0.3 * (columns * rows - count)

    return min(range(1, count + 1), key=badness)


def _panel(
    sheet: _Sheet, panel: Panel, shot: Image.Image, x: float, y: float, width: float, height: float, block: float
) -> None:
    axes = sheet.axes(x, y, width, height)
    raster = _raster_size(shot)
    heat = spread(panel.boxes, panel.mass, shot.size, raster).numpy()
    relative = heat / heat.mean() if heat.any() else heat
    norm = LogNorm(1, max(float(relative.max()), 2.0))
    grey = np.asarray(shot.resize(raster, _filter(shot, raster)).convert("L"), dtype=np.float64) / 255
    strength = np.asarray(norm(np.maximum(relative, 1)))
    axes.imshow(_overlay(grey, strength), extent=(0, shot.width, shot.height, 0), aspect="auto")
    axes.set_axis_off()
    axes.add_patch(Rectangle((0, 0), shot.width, shot.height, fill=False, ec="#9aa3ad", lw=0.8, clip_on=False))
    best = panel.strongest()
    best = [token for token in best if panel.mass[token] > 0.05 * panel.mass[best[0]]]
    for place, token in enumerate(best, 1):
        _outline(axes, panel.boxes[token].tolist(), place, width / shot.width, shot.width)
    if panel.point is not None:
        for colour, thick in (("white", 4.0), (MARK, 2.0)):
            axes.plot(*panel.point, marker="+", ms=16, mew=thick, color=colour, ls="none")
    axes.set_xlim(0, shot.width)
    axes.set_ylim(shot.height, 0)
    shown = ListedColormap(_overlay(np.ones(256), np.linspace(0, 1, 256)))
    _colour_bar(sheet, ScalarMappable(norm, shown), x + width + 0.1, y, height)
    of = float(panel.mass.sum())
    listed = "  ".join(f"{place}: {_percent(float(panel.mass[token]) / of)}" for place, token in enumerate(best, 1))
    wide = max(width, block - 0.7)
    if panel.shares:
        _share_bar(sheet, panel.shares, x, y + height + 0.12, wide)
        sheet.text(x, y + height + 0.5, f"of the picture's part   {listed}", size=7.5, color=SOFT)
    else:
        sheet.text(x, y + height + 0.12, f"likeliest cells   {listed}", size=7.5, color=SOFT)


def _raster_size(shot: Image.Image) -> tuple[int, int]:
    """Small screenshots grow by a whole factor, so that their pixels stay square and sharp."""
    longer = max(shot.size)
    if longer <= RASTER:
        factor = max(RASTER // longer, 1)
        return shot.width * factor, shot.height * factor
    return tuple(max(round(side * RASTER / longer), 1) for side in shot.size)  # type: ignore[return-value]


def _filter(shot: Image.Image, raster: tuple[int, int]) -> Image.Resampling:
    return Image.Resampling.NEAREST if raster[0] >= shot.width else Image.Resampling.LANCZOS


def _overlay(grey: Array, strength: Array) -> Array:
    """RGB (..., 3) of a pale grey screenshot, colour over it the more the hotter; both given (...,) in 0..1.

    Dark text stays dark under the colour, and a dark page takes it on all the same.
    """
    strength = strength.clip(0, 1)
    alpha = (OPACITY * np.sqrt(strength))[..., None]
    tint = matplotlib.colormaps[COLOURS](0.9 * strength)[..., :3]
    light = grey[..., None]
    mixed: Array = (1 - alpha) * (0.35 + 0.65 * light) + alpha * tint * (0.5 + 0.5 * light)
    return mixed


def _outline(axes: Axes, box: Sequence[float], place: int, inches: float, width: int) -> None:
    """A box and its number: inside where it is large enough on the sheet, else beside it, but on the picture."""
    x0, y0, x1, y1 = box
    for colour, thick in (("white", 2.2), (INK, 0.9)):
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec=colour, lw=thick, clip_on=False))
    roomy, right = (x1 - x0) * inches > 0.3, x1 > 0.96 * width
    at, align = (x0, "left") if roomy else (x0, "right") if right else (x1, "left")
    axes.annotate(
        str(place), (at, y0), (-2.5 if align == "right" else 2.5, -2), textcoords="offset points", size=7,
        weight="bold", color=INK, ha=align, va="top",
        bbox={"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85},
    )  # fmt: skip


def _colour_bar(sheet: _Sheet, scale: ScalarMappable, x: float, y: float, height: float) -> None:
    axes = sheet.axes(x, y, 0.11, height)
    bar = sheet.figure.colorbar(scale, cax=axes)
    high = float(scale.get_clim()[1] or 2)
    ticks: list[float] = [v for v in (1, 1.5, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if v <= high]
    if high > 1.15 * ticks[-1]:
        ticks.append(high)
    bar.set_ticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
    bar.minorticks_off()
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=7, length=2, color=SOFT, labelcolor=SOFT)
    axes.set_ylabel("times the mean over the picture", size=7, color=SOFT)


def _share_bar(sheet: _Sheet, parts: Mapping[str, float], x: float, y: float, width: float) -> None:
    """One stacked bar of all attention, its legend below."""
    axes = sheet.axes(x, y, width, 0.1)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    left = 0.0
    colours = dict(zip(parts, SHARE_COLOURS[: len(parts) - 1] + SHARE_COLOURS[-1:], strict=True))
    for name, part in parts.items():
        axes.barh(0, part, left=left, color=colours[name], height=1)
        left += part
    offset = 0.0
    for name, part in parts.items():
        label = f"{name} {_percent(part)}"
        sheet.text(x + offset, y + 0.16, "■", size=8, color=colours[name])
        sheet.text(x + offset + 0.13, y + 0.16, label, size=7.5, color=INK)
        offset += 0.28 + 0.068 * len(label)


def _percent(part: float) -> str:
    value = 100 * part
    if value >= 10 or value == 0:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 0.1 else f"{value:.1g} %" if value >= 1e-3 else "<0.001 %"
