"""Records come out of a real browser, go on where a killed run stopped, and carry the oracle's labels."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from holotron.data.collect import FIRST_SEED, MAX_STEPS, Job, collect, done_seeds
from holotron.tasks.miniwob import EASY20
from holotron.tasks.random_policy import RandomPolicy

pytestmark = pytest.mark.browser


def gather(folder: Path, *jobs: Job, **options: Any) -> dict[str, list[dict[str, Any]]]:
    asyncio.run(collect(list(jobs), folder, **options))
    return {
        path.name.rsplit("-", 1)[0]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    }


def test_characters_and_boxes_are_where_the_pixels_are(tmp_path: Path) -> None:
    for record in gather(tmp_path, Job("practice", FIRST_SEED, 3))["practice"]:
        image = Image.open(io.BytesIO(base64.b64decode(record["png"]))).convert("L")
        assert image.size == (record["width"], record["height"])
        inked = 0
        for _, x, y, w, h in record["chars"]:
            low, high = image.crop(
                (int(x - w / 2), int(y - h / 2), int(x + w / 2) + 1, int(y + h / 2) + 1)
            ).getextrema()
            inked += low < high
        assert inked >= 0.95 * len(record["chars"]) > 0


def test_a_killed_run_goes_on_and_nothing_is_done_twice(tmp_path: Path) -> None:
    whole = gather(tmp_path / "a", Job("click-option", FIRST_SEED, 4))["click-option"]
    first = gather(tmp_path / "b", Job("click-option", FIRST_SEED, 2))["click-option"]
    path = tmp_path / "b" / f"click-option-{FIRST_SEED}.jsonl"
    with path.open("a") as file:
        file.write('{"task": "click-option", "seed": 1')  # killed while writing
    again = gather(tmp_path / "b", Job("click-option", FIRST_SEED, 4))["click-option"]
    assert again[: len(first)] == first
    assert again == whole  # the same seeds give the same records
    assert done_seeds(path) == FIRST_SEED + 4


def test_an_actor_acts_and_the_oracle_labels(tmp_path: Path) -> None:
    job = Job("click-checkboxes", FIRST_SEED, 2)
    records = gather(tmp_path, job, actor=RandomPolicy(1))["click-checkboxes"]
    thoughts = {past["step"]["thought"] for record in records for past in record["history"]}
    assert thoughts and all("anywhere" in thought or "word" in thought for thought in thoughts)
    assert all(record["step"]["tool_call"]["element"] for record in records if "element" in record["step"]["tool_call"])
    assert max(len(record["history"]) for record in records) <= MAX_STEPS


def test_training_seeds_are_not_evaluation_seeds() -> None:
    assert FIRST_SEED > 100_000 and len(EASY20) == 20
