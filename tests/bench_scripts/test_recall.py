"""The recall suite asks what it says, scores what it says, and goes on where it was stopped."""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from holotron.model.modeling import count_parameters

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import recall  # noqa: E402
import tables  # noqa: E402
from recall_models import MODELS, build  # noqa: E402
from recall_tasks import KEYS, LABELS, LETTERS, TASKS, Batch, Task, buttons  # noqa: E402

QUICK = [sys.executable, str(BENCHMARKS / "recall.py"), "--quick", "--models", "0of4,1of4"]


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


def seen_in(picture: Tensor) -> list[tuple[int, int]]:
    """Label and colour of each cell of (3, H, W), found by comparing it with every button there is."""
    bytes_ = ((picture + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    found = []
    for y in range(0, bytes_.shape[0], 16):
        for x in range(0, bytes_.shape[1], 16):
            same = (buttons() == bytes_[y : y + 16, x : x + 16]).all((-3, -2, -1))
            [[label, colour, _]] = np.argwhere(same)
            found.append((int(label), int(colour)))
    return found


def lookup(task: Task, size: int, batch: Batch) -> list[list[int]]:
    """The answers of every row, found by reading the sequence up to the questions as a person would."""
    answers = []
    for row, ids in enumerate(batch.ids.tolist()):
        if task.name == "text_recall":
            told = dict(zip(ids[0 : 2 * size : 2], ids[1 : 2 * size : 2], strict=True))
            assert len(told) == size and set(told) <= set(range(KEYS))
            answers.append([told[key] for key in ids[2 * size + 1 :: 2]])
        elif task.name == "copy":
            assert ids[0] == LETTERS and ids[size + 1] == LETTERS + 1
            answers.append(ids[1 : size + 1])
        elif task.name == "needle":
            key, *_ = [i for i in ids[:size] if KEYS - 8 <= i < KEYS]
            assert ids[-2] == key and ids[:size].count(key) == 1
            assert sum(i >= KEYS for i in ids[:size]) == 1  # no other value to fall for
            answers.append([ids[ids.index(key) + 1]])
        else:
            assert batch.pixels is not None
            shots = [seen_in(picture) for picture in batch.pixels[row * size : (row + 1) * size]]
            told = {label: colour for shot in shots for label, colour in shot}
            assert len(told) == 4 * size
            answers.append([len(LABELS) + told[label] for label in ids[6 * size :: 2]])
    return answers


@pytest.mark.parametrize("name", TASKS)
def test_answers_stand_in_what_was_told(name: str, rng: np.random.Generator) -> None:
    task = TASKS[name]
    for size in task.tested[:4]:
        batch = task.make(rng, size, 3, bool(size % 3))
        assert int(batch.ids.max()) < task.vocabulary and batch.ids.shape == batch.labels.shape
        asked = batch.labels >= 0
        assert torch.equal(batch.labels[asked], batch.ids[asked])
        assert [row[mask].tolist() for row, mask in zip(batch.labels, asked, strict=True)] == lookup(task, size, batch)


def test_tests_ask_about_the_oldest_screenshot(rng: np.random.Generator) -> None:
    task = TASKS["screen_recall"]
    batch = task.make(rng, 4, 5, True)
    assert batch.pixels is not None and batch.seen is not None
    for row in range(5):
        oldest = {label for label, _ in seen_in(batch.pixels[4 * row])}
        assert set(batch.ids[row, 24::2].tolist()) == oldest
    assert [tuple(cell) for cell in batch.seen[:4].tolist()] == seen_in(batch.pixels[0])


def test_test_sequences_are_not_training_sequences() -> None:
    task = TASKS["copy"]
    test, train = (
        task.make(np.random.default_rng([part, 1, 0, 0]), 32, 64, False).ids for part in (recall.TEST, recall.TRAIN)
    )
    assert not {tuple(row) for row in test.tolist()} & {tuple(row) for row in train.tolist()}


@pytest.mark.parametrize("name", TASKS)
def test_scores_of_the_perfect_and_of_the_clueless(name: str, rng: np.random.Generator) -> None:
    """Reading the answers off scores 1; guessing among the possible answers scores the stated chance."""
    task = TASKS[name]
    first = {"text_recall": KEYS, "copy": 0, "needle": KEYS, "screen_recall": len(LABELS)}[name]
    size = task.trained[0]

    def perfect(batch: Batch) -> tuple[Tensor, Tensor, None]:
        answers = torch.tensor(sum(lookup(task, size, batch), []))
        asked = batch.labels[batch.labels >= 0]
        return torch.nn.functional.one_hot(answers, task.vocabulary), asked, None

    def clueless(batch: Batch) -> tuple[Tensor, Tensor, None]:
        asked = batch.labels[batch.labels >= 0]
        guesses = torch.from_numpy(rng.integers(first, first + round(1 / task.chance), len(asked)))
        return torch.nn.functional.one_hot(guesses, task.vocabulary), asked, None

    found = recall.measure(perfect, task, size, 8)  # type: ignore[arg-type]
    assert found["accuracy"] == 1 and found["low"] < 1 and found["length"] == task.length(size)
    found = recall.measure(clueless, task, size, 512)  # type: ignore[arg-type]
    spread = (task.chance * (1 - task.chance) / found["n"]) ** 0.5
    assert abs(found["accuracy"] - task.chance) < 5 * spread


def test_a_run_is_made_by_its_seed_alone() -> None:
    task, mixers = TASKS["screen_recall"], MODELS["1of4"]

    def run(seed: int) -> tuple[float, float, list[float]]:
        done = recall.train(task, mixers, seed, recall.QUICK, lambda: None)
        return done["loss_first"], done["loss_last"], [m["accuracy"] for m in done["measured"]]

    first = run(1)
    assert run(1) == first
    assert run(2) != first
    assert first[1] < first[0]  # three steps on one task do learn something


def test_models_differ_in_mixers_and_little_else() -> None:
    counts = {}
    for name, mixers in MODELS.items():
        language = build(TASKS["copy"], mixers, 64).config.language
        assert (language.kv_bytes_per_token() == 0) == ("*" not in mixers.pattern)
        assert (language.state_bytes() == 0) == ("M" not in mixers.pattern)
        counts[name] = count_parameters(build(TASKS["copy"], mixers, 64))
    plain = [count for name, count in counts.items() if "N64" not in name]
    assert max(plain) < 1.15 * min(plain)


def test_a_run_of_another_recipe_is_not_kept(tmp_path: Path) -> None:
    task = TASKS["copy"]
    file, mark = tmp_path / "run.json", recall.fingerprint(task, recall.QUICK)
    assert recall.kept(file, mark) is None
    file.write_text(json.dumps({"task": "copy", "recipe": mark}))
    assert recall.kept(file, mark) == {"task": "copy", "recipe": mark}
    assert recall.kept(file, recall.fingerprint(task, recall.RECIPES["copy"])) is None


def test_names_are_checked() -> None:
    assert recall.names(TASKS)("copy, needle") == ["copy", "needle"]
    for wrong in ("copi", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="known: text_recall, copy"):
            recall.names(TASKS)(wrong)


def test_quick_runs_are_stored_drawn_and_kept(tmp_path: Path) -> None:
    command = [*QUICK, "--folder", str(tmp_path), "--json"]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    stored = json.loads((tmp_path / "recall.json").read_text())
    assert stored["figures"] == figures
    accuracies = [value for name, value in figures.items() if name.endswith("_accuracy")]
    assert len(accuracies) == 4 * 2 * 2 + 4 and all(0 <= value <= 1 for value in accuracies)
    assert "text_recall_1of4_8_accuracy" in figures and figures["screen_recall_chance_accuracy"] == 0.125
    assert (tmp_path / "recall.svg").read_text().startswith("<?xml")
    table = tables.by_length(tmp_path / "recall.json", "en")
    assert table.startswith("| task | length | ") and "associative recall, text" in table
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*_0.json")}
    assert len(before) == 8
    asked = argparse.Namespace(
        seeds=1, tasks=list(TASKS), models=["0of4", "1of4"], quick=True, longer=1, folder=tmp_path
    )
    assert len(recall.run_all(asked, Console(quiet=True))) == 8
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*_0.json")} == before


def test_ctrl_c_leaves_whole_runs_and_no_result(tmp_path: Path) -> None:
    command = [*QUICK, "--folder", str(tmp_path), "--tasks", "copy", "--seeds", "1000"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as running:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("copy_*.json")) and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130 and "the same command goes on from there" in " ".join(said.split())
    runs = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert 1 <= len(runs) < 2000 and all(len(run["measured"]) == 2 for run in runs)
