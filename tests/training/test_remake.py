"""One command from seeds to a checkpoint folder, by stages, and bad recipes named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from holotron.cli import main
from holotron.training.pilot.remake import RECIPE, read_stages, used_records
from holotron.training.pilot.train import TrainingError

SIZE = {"images": 2, "questions": 2, "hidden": 64, "channels": 8, "warmup": 1}
TINY = {
    "stages": [
        {"name": "one", "collect": {"seeds": 1}, "train": {"steps": 50, "stop": 2, **SIZE}},
        {"name": "read", "train": {**SIZE, "steps": 2, "images": 0, "reading": 4}},
        {"name": "two", "collect": {"first": 1000500, "practice": 3}, "train": {"steps": 3, **SIZE}},
    ]
}


@pytest.mark.browser
def test_one_command_makes_a_checkpoint_and_a_second_run_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(TINY))
    command = ["train", "pilot", "--out", str(tmp_path / "out"), "--recipe", str(recipe)]
    assert main(command) == 0
    model = tmp_path / "out" / "two" / "model"
    assert capfd.readouterr().out.strip().endswith(str(model))
    weights = (model / "model.safetensors").read_bytes()
    state = torch.load(tmp_path / "out" / "two" / "checkpoint.pt", weights_only=True)["state"]
    assert state["before"]["before"]["recipe"]["stop"] == 2  # the stages went one after another
    assert main(command) == 0
    assert (model / "model.safetensors").read_bytes() == weights


def test_a_stage_sees_the_records_of_all_stages_so_far(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(TINY))
    one, read, two = (len(used_records(tmp_path, stage, recipe)) for stage in read_stages(recipe))
    assert (one, read, two) == (20, 20, 21)


def test_the_shipped_recipe_is_sound() -> None:
    stages = read_stages(RECIPE)
    assert [stage.name for stage in stages][-1] == "histories"
    seeds = [job.first + job.count for stage in stages if stage.collect for job in stage.collect.jobs()]
    assert max(seeds) < 3_000_000  # where held-out screenshots begin


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no recipe"),
        ("stages: [{name: a, train: {stpes: 3}}]", "stpes"),
        ("stages: [{name: A b, train: {}}]", "name"),
        ("stages: [{name: a, train: {}, collect: {first: 5}}]", "first"),
        ("stages: []", "no stages"),
    ],
)
def test_bad_recipes_are_named(text: str, message: str, tmp_path: Path) -> None:
    from holotron.training.pilot.remake import remake

    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(TrainingError, match=message):
        remake(tmp_path / "out", path)
