"""Run folders written by the package's own writer, with drawn pages in place of a browser's."""

from __future__ import annotations

import hashlib
import io
import random
from pathlib import Path
from typing import Any
from zlib import crc32

from PIL import Image, ImageDraw

from holotron.agent.records import EpisodeResult, RunInfo, Status, StepRecord
from holotron.agent.trajectory import TrajectoryWriter, episode_folder, write_run
from holotron.contract.conversation import Screenshot
from holotron.contract.step import Answer, Click, DragTo, Scroll, Step, ToolCall, Write

START = 1_780_000_000.0
STARTED_AT = "2026-05-28T20:26:40+00:00"  # START in ISO 8601


def run_info(jobs: list[tuple[str, int]], **changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "model": "pilot",
        "policy": "pilot in process",
        "contract": "holotron3",
        "prompt_hash": hashlib.sha256(b"prompt").hexdigest(),
        "started_at": STARTED_AT,
        "browser": "Chromium 156.0",
        "workers": 4,
        "settings": {"date": "2026-01-01", "max_steps": 10},
        "limits": {"max_steps": 10, "max_seconds": 120.0},
        "jobs": jobs,
        "versions": {"holotron": "0.1.0"},
    }
    return RunInfo(**(fields | changes))


def page(width: int, height: int, seed: int, noise: bool = False) -> Screenshot:
    """A page with a few buttons; `noise` makes it as hard to compress as a photograph."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), "white")
    if noise:
        image = Image.frombytes("RGB", (width, height), rng.randbytes(width * height * 3))
    draw = ImageDraw.Draw(image)
    for index in range(6):
        x, y = rng.randrange(width * 3 // 4), rng.randrange(height * 9 // 10)
        draw.rectangle((x, y, x + width // 4, y + height // 12), outline="black", fill=(200, 210, 230))
        draw.text((x + 3, y + 1), rng.choice(["Ok", "Cancel", "Submit", "no", "previous"]) + str(index), "black")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Screenshot(buffer.getvalue(), width, height, float(width), float(height))


CALLS: tuple[tuple[ToolCall, tuple[float, float] | None], ...] = (
    (Click(element="Ok button", x=250, y=500), (40.0, 105.0)),
    (Write(content="Karrie", press_enter=True), None),
    (DragTo(element="the slider", x=800, y=900), (128.0, 189.0)),
    (Scroll(element="the list", x=500, y=300, direction="down", scroll_size=3), (80.0, 63.0)),
    (Click(element="Submit", x=906, y=143, button="right"), (145.0, 30.0)),
)


def write_step(writer: TrajectoryWriter, index: int, shot: Screenshot, **changes: Any) -> StepRecord:
    name, digest = writer.screenshot(index, shot)
    call, point = CALLS[index % len(CALLS)]
    fields: dict[str, Any] = {
        "index": index,
        "goal": "Click on the “Ok” button.",
        "screenshot": name,
        "width": shot.width,
        "height": shot.height,
        "css_width": shot.css_width,
        "css_height": shot.css_height,
        "sha256": digest,
        "contract": "holotron3",
        "step": Step(thought=f"The target of step {index + 1} is in view.", tool_call=call),
        "point": point,
        "outcome": "done",
        "prompt_tokens": 300 + 90 * index,
        "cached_tokens": 200 if index else 0,
        "output_tokens": 20,
        "image_tokens": 64 * min(index + 1, 3),
        "state_bytes": 98304,
        "kv_bytes": 20480 * (index + 1),
        "screenshot_s": 0.02,
        "decide_s": 0.2 + 0.01 * index,
        "act_s": 0.06,
        "at": START + 2.0 + index,
    }
    record = StepRecord(**(fields | changes))
    writer.step(record)
    return record


def write_episode(
    run_dir: Path,
    task: str,
    seed: int,
    steps: int = 3,
    status: Status | None = "success",
    size: tuple[int, int] = (160, 210),
    noise: bool = False,
    **result: Any,
) -> TrajectoryWriter:
    """An episode of `steps` steps that ended with `status`, or did not end (None)."""
    writer = TrajectoryWriter(episode_folder(run_dir, task, seed))
    writer.begin()
    for index in range(steps):
        write_step(writer, index, page(*size, seed=crc32(f"{task}-{seed}-{index}".encode()), noise=noise))
    if status is not None:
        success = {"success": True, "done": None, "infra_error": None}.get(status, False)
        fields: dict[str, Any] = {
            "task": task,
            "seed": seed,
            "goal": "Click on the “Ok” button.",
            "status": status,
            "success": success,
            "reward": 1.0 if success else -1.0,
            "steps": steps,
            "seconds": 1.0 * steps,
            "ended_at": START + 2.0 + steps,
        }
        writer.finish(EpisodeResult(**(fields | result)))
    return writer


def small_run(run_dir: Path) -> Path:
    """One episode of each kind there is."""
    hostile = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    jobs = [("click-test", 0), ("click-test", 1), ("click-test", 2), ("enter-text", 0), ("enter-text", 1)]
    jobs += [("drag-box", 0), ("web", 0)]
    write_run(run_dir, run_info(jobs))
    write_episode(run_dir, "click-test", 0, steps=1)
    write_episode(run_dir, "click-test", 1, steps=5, status="step_limit")
    write_episode(run_dir, "click-test", 2, steps=2, status="infra_error", error="the browser went away")
    write_episode(run_dir, "enter-text", 0, steps=3, status="success", reward=0.4)
    writer = write_episode(run_dir, "enter-text", 1, steps=1, status=None)
    write_step(
        writer, 1, page(160, 210, 7), step=None, point=None, error=True, raw_text=f'{{"thought": {hostile}',
        outcome=f"no JSON object: {hostile}",
    )  # fmt: skip
    writer = write_episode(run_dir, "drag-box", 0, steps=0, status=None)
    step = Step(note=hostile, thought=hostile, tool_call=Click(element=hostile, x=500, y=500))
    write_step(writer, 0, page(160, 210, 8), goal=hostile, step=step, observation=hostile, point=(80.0, 105.0))
    writer.finish(EpisodeResult(task="drag-box", seed=0, goal=hostile, status="failure", success=False, steps=1))
    writer = write_episode(run_dir, "web", 0, steps=2, status=None, size=(1280, 800))
    answer = Step(thought="All is seen.", tool_call=Answer(content="42"))
    write_step(writer, 2, page(1280, 800, 9), step=answer, point=None)
    writer.finish(EpisodeResult(task="web", seed=0, goal="Read on.", status="done", steps=3, answer="42"))
    return run_dir
