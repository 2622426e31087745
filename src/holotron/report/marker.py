"""Where a step pointed, as geometry that both the HTML report and the picture draw.

All coordinates are CSS pixels of the viewport the screenshot was taken of, origin top left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot
from typing import Any

Point = tuple[float, float]
ARROWS = {"up": (0.0, -1.0), "down": (0.0, 1.0), "left": (-1.0, 0.0), "right": (1.0, 0.0)}


@dataclass(frozen=True, slots=True)
class Marker:
    """A ring and cross at `point`; lines from tail to tip with the two barbs of an arrow head.

    `radius` is CSS pixels, a fixed share of the viewport, so that it looks the same at every scale.
    """

    point: Point
    radius: float
    arrow: tuple[Point, Point] | None = None
    barbs: tuple[Point, Point] | None = None
    double: bool = False


def marker_of(call: Mapping[str, Any], point: Point | None, cursor: Point | None, css_width: float) -> Marker | None:
    """The marker of a tool call, None if it points nowhere. `cursor`: where the mouse was left."""
    if point is None:
        return None
    name = call.get("tool_name")
    radius = max(css_width, 1.0) * 0.042
    tail, tip = None, point
    if name == "drag_to":
        tail = cursor
    elif name == "scroll" and call.get("direction") in ARROWS:
        dx, dy = ARROWS[str(call["direction"])]
        tail, tip = point, (point[0] + dx * 3 * radius, point[1] + dy * 3 * radius)
    if tail is None or hypot(tip[0] - tail[0], tip[1] - tail[1]) < radius:
        return Marker(point, radius, double=name == "double_click")
    return Marker(point, radius, (tail, tip), _barbs(tail, tip, radius))


def _barbs(tail: Point, tip: Point, size: float) -> tuple[Point, Point]:
    length = hypot(tip[0] - tail[0], tip[1] - tail[1])
    ux, uy = (tip[0] - tail[0]) / length, (tip[1] - tail[1]) / length
    back = (tip[0] - ux * size, tip[1] - uy * size)
    half = size * 0.6
    return (back[0] - uy * half, back[1] + ux * half), (back[0] + uy * half, back[1] - ux * half)
