"""One picture of a run: short filmstrips with the clicks drawn, goal and verdict beside them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from holotron.agent.records import StepRecord
from holotron.agent.trajectory import write_atomically
from holotron.report.episodes import VERDICTS, Recorded, read_recorded, short_name
from holotron.report.frames import open_screenshot
from holotron.report.marker import Marker, Point, marker_of
from holotron.report.readable import percent_text, tool_call_text
from holotron.report.success import success_of

WIDTH = 1200  # in units; a unit is SCALE pixels, so that text stays sharp on dense screens
SCALE = 2
MARGIN, GAP, PAD = 24, 16, 12
FRAME = 172  # width of one screenshot
COLUMNS = 6  # frames in a row of cards
MOST_FRAMES = 3  # of one episode
EPISODES = 6
TEXT_HEIGHT = 54  # above a filmstrip: verdict, task, goal
CAPTION_HEIGHT = 14  # below each frame
GROUND, CARD, INK, SOFT, LINE = "#f3f5f7", "#ffffff", "#1c2127", "#59636e", "#d9dde2"
MARK = (224, 0, 122)
VERDICT_COLOURS = {"success": ("#1a7f4b", "#e3f4ea"), "failure": ("#b3372c", "#fbe6e3")}
OTHER_COLOURS = ("#7a5a00", "#fbf0cf")


@dataclass(frozen=True, slots=True)
class Strip:
    """The frames of an episode that are shown: each step with where the mouse was before it."""

    recorded: Recorded
    frames: tuple[tuple[StepRecord, Point | None], ...]

    @property
    def width(self) -> int:
        return 2 * PAD + len(self.frames) * FRAME + (len(self.frames) - 1) * PAD


def write_picture(run_dir: Path, out_png: Path, episodes: Sequence[tuple[str, int]] | None = None) -> Path:
    """Write the picture of a run, 2400 pixels wide for a place 1200 wide, and return `out_png`.

    `episodes` names (task, seed) pairs; by default a mix with the run's own share of failures. Raises
    ValueError if there is nothing to show or an episode is not in the run, TrajectoryError if `run_dir` is no
    run folder.
    """
    info, recorded, _ = read_recorded(run_dir)
    strips = [_strip(one) for one in (_named(recorded, episodes) if episodes else choose(recorded))]
    if not strips:
        raise ValueError(f"{run_dir} holds no episode with a step that could be shown")
    total = success_of(recorded).total
    title = f"{short_name(info.model)}: {total.score.successes} of {total.n} episodes done"
    if total.n:
        title += f" ({percent_text(total.score.rate)}, 95 % interval {total.interval})"
    buffer = io.BytesIO()
    _draw(title, list(_rows(strips))).save(buffer, "PNG", optimize=True)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out_png, buffer.getvalue())
    return out_png


def choose(recorded: Sequence[Recorded], count: int = EPISODES) -> list[Recorded]:
    """Up to `count` scored episodes of different tasks, failures in proportion but never left out."""
    scored = [one for one in recorded if one.outcome in ("success", "failure") and one.episode.steps]
    failed = [one for one in scored if one.outcome == "failure"]
    quota = max(1, round(count * len(failed) / len(scored))) if failed else 0
    chosen = _spread(failed, quota, set())
    tasks = {one.task for one in chosen}
    return _spread([one for one in scored if one.outcome == "success"], count - len(chosen), tasks) + chosen


def _spread(recorded: Iterable[Recorded], count: int, taken: set[str]) -> list[Recorded]:
    """Those that show best in a strip first, one per task."""
    chosen: list[Recorded] = []
    for one in sorted(recorded, key=lambda one: (abs(len(one.episode.steps) - 3), one.task, one.seed)):
        if len(chosen) < count and one.task not in taken:
            chosen.append(one)
            taken = taken | {one.task}
    return chosen


def _named(recorded: Sequence[Recorded], episodes: Sequence[tuple[str, int]]) -> list[Recorded]:
    by_name = {(one.task, one.seed): one for one in recorded if one.episode.steps}
    missing = [f"{task} seed {seed}" for task, seed in episodes if (task, seed) not in by_name]
    if missing:
        raise ValueError(f"no steps in this run for {', '.join(missing)}")
    return [by_name[name] for name in episodes]


def _strip(one: Recorded) -> Strip:
    cursor: Point | None = None
    frames = []
    for step in one.episode.steps:
        frames.append((step, cursor))
        cursor = step.point or cursor
    if len(frames) > MOST_FRAMES:  # how it began and how it ended
        frames = frames[: MOST_FRAMES // 2] + frames[-(MOST_FRAMES - MOST_FRAMES // 2) :]
    return Strip(one, tuple(frames))


def _rows(strips: Sequence[Strip]) -> Iterator[list[Strip]]:
    """First fit, longest first, into rows of COLUMNS frames; rows of successes on top."""
    rows: list[list[Strip]] = []
    for strip in sorted(strips, key=lambda strip: -len(strip.frames)):
        for row in rows:
            if sum(len(other.frames) for other in row) + len(strip.frames) <= COLUMNS:
                row.append(strip)
                break
        else:
            rows.append([strip])
    yield from sorted(rows, key=lambda row: any(strip.recorded.outcome != "success" for strip in row))


def _draw(title: str, rows: Sequence[Sequence[Strip]]) -> Image.Image:
    heights = [TEXT_HEIGHT + CAPTION_HEIGHT + 2 * PAD + max(map(_frame_height, row)) for row in rows]
    height = MARGIN + 40 + sum(heights) + GAP * (len(rows) - 1) + MARGIN
    image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), GROUND)
    canvas = Canvas(image)
    canvas.text((MARGIN, MARGIN - 4), title, 20, INK, bold=True, width=WIDTH - 2 * MARGIN)
    y = MARGIN + 40
    for row, row_height in zip(rows, heights, strict=True):
        # What a row leaves over goes between its cards and their edges, so that all rows end flush.
        spare = WIDTH - 2 * MARGIN - sum(strip.width for strip in row) - GAP * (len(row) - 1)
        x = MARGIN
        for strip in row:
            width = strip.width + spare // len(row)
            _card(canvas, strip, x, y, width, row_height)
            x += width + GAP
        y += row_height + GAP
    return image


def _frame_height(strip: Strip) -> int:
    return max(round(FRAME * step.height / max(step.width, 1)) for step, _ in strip.frames)


def _card(canvas: Canvas, strip: Strip, x: int, y: int, width: int, height: int) -> None:
    one = strip.recorded
    canvas.box((x, y, x + width, y + height), CARD, LINE, 8)
    ink, ground = VERDICT_COLOURS.get(one.outcome, OTHER_COLOURS)
    chip = canvas.length(VERDICTS[one.outcome], 12, bold=True) + 16
    canvas.box((x + PAD, y + PAD, x + PAD + chip, y + PAD + 20), ground, ground, 10)
    canvas.text((x + PAD + 8, y + PAD + 2), VERDICTS[one.outcome], 12, ink, bold=True)
    left = x + PAD + chip + 8
    canvas.text((left, y + PAD + 1), one.task, 13, SOFT, width=x + width - PAD - left)
    canvas.text((x + PAD, y + PAD + 27), one.goal, 14, INK, width=width - 2 * PAD)
    left = x + (width - strip.width) // 2 + PAD
    for step, cursor in strip.frames:
        _frame(canvas, one, step, cursor, left, y + PAD + TEXT_HEIGHT)
        left += FRAME + PAD


def _frame(canvas: Canvas, one: Recorded, step: StepRecord, cursor: Point | None, x: float, y: float) -> None:
    height = round(FRAME * step.height / max(step.width, 1))
    shot, problem = open_screenshot(one.episode.folder / Path(step.screenshot).name)
    call = step.step.tool_call.model_dump() if step.step else {}
    if shot is None:
        canvas.text((x + PAD, y + PAD), problem, 12, SOFT, width=FRAME - 2 * PAD)
    else:
        shot = shot.resize((FRAME * SCALE, height * SCALE), Image.Resampling.LANCZOS)
        marker = marker_of(call, step.point, cursor, step.css_width)
        if marker:
            shot = _marked(shot, marker, shot.width / step.css_width, shot.height / step.css_height)
        canvas.image.paste(shot, (round(x * SCALE), round(y * SCALE)))
    canvas.outline((x, y, x + FRAME, y + height), LINE)
    caption = tool_call_text(call, places=False) if call else "no usable action"
    canvas.text((x, y + height + 6), f"{step.index + 1}. {caption}", 12, SOFT, width=FRAME)


def _marked(shot: Image.Image, marker: Marker, sx: float, sy: float) -> Image.Image:
    """Pillow draws without antialiasing, so the marker is drawn on a larger copy."""
    over = 2
    large = shot.resize((shot.width * over, shot.height * over))
    draw = ImageDraw.Draw(large)

    def at(point: Point) -> Point:
        return point[0] * sx * over, point[1] * sy * over

    r = marker.radius * sx * over
    (x, y), near, far = at(marker.point), 0.35 * r, 1.5 * r
    for colour, stroke in (((255, 255, 255), round(r * 0.44)), (MARK, round(r * 0.22))):
        for ring in (r, 0.6 * r) if marker.double else (r,):
            edge = ring + stroke / 2
            draw.ellipse((x - edge, y - edge, x + edge, y + edge), outline=colour, width=stroke)
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            start, end = (x + dx * near, y + dy * near), (x + dx * far, y + dy * far)
            draw.line((start, end), fill=colour, width=stroke)
        if marker.arrow and marker.barbs:
            tail, tip = map(at, marker.arrow)
            draw.line((tail, tip), fill=colour, width=stroke)
            draw.line((at(marker.barbs[0]), tip, at(marker.barbs[1])), fill=colour, width=stroke, joint="curve")
    return large.resize(shot.size, Image.Resampling.LANCZOS)


class Canvas:
    """Draws in units of SCALE pixels with the fonts that matplotlib carries, so no system font is needed."""

    def __init__(self, image: Image.Image) -> None:
        self.image = image
        self._draw = ImageDraw.Draw(image)
        self._fonts: dict[tuple[int, bool], ImageFont.FreeTypeFont] = {}

    def box(self, edges: tuple[float, float, float, float], fill: str, line: str, radius: float) -> None:
        scaled = [edge * SCALE for edge in edges]
        self._draw.rounded_rectangle(scaled, radius * SCALE, fill=fill, outline=line, width=SCALE)

    def outline(self, edges: tuple[float, float, float, float], line: str) -> None:
        self._draw.rectangle([round(edge * SCALE) for edge in edges], outline=line, width=SCALE)

    def length(self, text: str, size: int, bold: bool = False) -> float:
        return self._font(size, bold).getlength(text) / SCALE

    def text(self, at: Point, text: str, size: int, ink: str, bold: bool = False, width: float | None = None) -> None:
        """One line; what does not fit into `width` ends in an ellipsis."""
        line = " ".join(text.split())
        if width is not None and self.length(line, size, bold) > width:
            while line and self.length(line + "…", size, bold) > width:
                line = line[:-1]
            line = line.rstrip() + "…"
        place = (at[0] * SCALE, at[1] * SCALE)
        self._draw.text(place, line, fill=ink, font=self._font(size, bold))

    def _font(self, size: int, bold: bool) -> ImageFont.FreeTypeFont:
        if (size, bold) not in self._fonts:
            name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
            path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name
            self._fonts[size, bold] = ImageFont.truetype(str(path), size * SCALE)
        return self._fonts[size, bold]
