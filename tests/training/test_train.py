"""Training learns, resumes exactly after kill -9, and refuses what it cannot do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.training.pilot.losses import Weights
from holotron.training.pilot.train import Recipe, TrainingError, learning_rate, train

TINY = Recipe(steps=24, images=4, questions=2, hidden=64, channels=8, warmup=5, decay=0.5)
SCRIPT = """
import sys
from pathlib import Path
from tests.training.test_train import TINY
from holotron.training.pilot.train import train
train(TINY, [Path(p) for p in sys.argv[2:]], Path(sys.argv[1]), save_every=4)
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["state"]["step"] == TINY.steps
    found: dict[str, torch.Tensor] = saved["learner"]
    return found


def test_resumes_exactly_after_kill_9(records: list[Path], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "killed"), *map(str, records)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(2):  # killed twice, then left alone
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        before = time.time()
        while process.poll() is None and time.time() - before < 120:
            path = tmp_path / "killed" / "checkpoint.pt"
            if path.exists() and path.stat().st_mtime > before:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.02)
        process.wait()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    train(TINY, records, tmp_path / "straight", save_every=1000)
    torch.set_num_threads(threads)
    one, other = weights(tmp_path / "killed"), weights(tmp_path / "straight")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_learns_and_the_export_loads(records: list[Path], tmp_path: Path) -> None:
    recipe = replace(TINY, steps=60, lr=4e-3, weights=Weights(bins=0.1))
    train(recipe, records, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.35 * rows[0]["loss"]
    model = HolotronForConditionalGeneration.from_pretrained(tmp_path / "model")
    assert model.language_model.backbone.layers[0].mixer.A_log.dtype == torch.float32
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "agent.json",
    }  # fmt: skip


def test_other_records_under_a_checkpoint_are_refused(records: list[Path], tmp_path: Path) -> None:
    train(replace(TINY, steps=1), records, tmp_path)
    with pytest.raises(TrainingError, match="other records"):
        train(TINY, records[1:], tmp_path)


def test_no_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="collect some first"):
        train(TINY, [], tmp_path)


def test_a_loss_that_is_not_finite_stops_training(records: list[Path], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="batch"):
        train(replace(TINY, steps=40, lr=1e30, warmup=1), records, tmp_path)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    recipe = Recipe(steps=100, warmup=10, decay=0.2, lr=1.0)
    rates = [learning_rate(recipe, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[50] == 1.0
    assert rates[90] == pytest.approx(0.5)
    assert rates[100] == 0.0
