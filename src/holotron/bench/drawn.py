"""Traces without a browser, seeded: drawn screens that change as a page under an agent does. For quick runs."""

from __future__ import annotations

import io
import random
from pathlib import Path

from PIL import Image, ImageDraw

from holotron.bench.traces import TraceFolder, TraceTurn, TraceWriter, think_time
from holotron.contract.step import Click, Scroll, Step, ToolCall, Write

WORDS = "north river lamp paper green stone cloud seven market window letter garden silver morning bridge".split()


def draw_traces(
    folder: Path, *, traces: int = 4, turns: int = 6, viewport: tuple[int, int] = (160, 160), seed: int = 0
) -> TraceFolder:
    """`traces` sessions of `turns` steps: clicks and typing change a corner of the screen, scrolling changes it all."""
    writer = TraceWriter(folder, "drawn", seed, viewport)
    for number in range(traces):
        rng = random.Random(f"{seed}-{number}")
        page = _page(rng, viewport)
        made: list[TraceTurn] = []
        for _ in range(turns):
            call = _call(rng)
            made.append(
                writer.turn(_png(page), Step(thought="I click the target.", tool_call=call), think_s=think_time(rng))
            )
            _change(page, call, rng)
        writer.add(f"drawn-{number:04d}", f'Find "{rng.choice(WORDS)}" and press the button.', made)
    return writer.close()


def _page(rng: random.Random, viewport: tuple[int, int]) -> Image.Image:
    page = Image.new("RGB", viewport, "white")
    draw = ImageDraw.Draw(page)
    for y in range(4, viewport[1], 24):
        draw.text((4, y), " ".join(rng.choice(WORDS) for _ in range(1 + viewport[0] // 60)), fill="black")
    return page


def _call(rng: random.Random) -> ToolCall:
    kind = rng.random()
    x, y = rng.randrange(1001), rng.randrange(1001)
    if kind < 0.6:
        return Click(element=rng.choice(WORDS), x=x, y=y)
    if kind < 0.9:
        return Write(content=" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4))))
    return Scroll(element="page", x=500, y=500, direction="down", scroll_size=2)


def _change(page: Image.Image, call: ToolCall, rng: random.Random) -> None:
    if isinstance(call, Scroll):
        page.paste(_page(rng, page.size))
        return
    left, top = rng.randrange(page.width), rng.randrange(page.height)
    ImageDraw.Draw(page).rectangle((left, top, left + 12, top + 8), fill=rng.choice(["red", "blue", "gray"]))


def _png(page: Image.Image) -> bytes:
    file = io.BytesIO()
    page.save(file, "PNG")
    return file.getvalue()
