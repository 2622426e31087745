"""`holotron look` through the command line: what it prints and draws, and what it refuses."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from holotron import look as looking
from holotron.cli import main
from holotron.contract.conversation import Conversation, Screenshot, Turn
from holotron.demo import find_pilot
from holotron.engine import SamplingParams, StructuredOutputs
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.tiny_checkpoints import make_tiny
from holotron.serving.policy import load_policy
from holotron.training.pilot.preset import pilot_config, write_agent_file
from holotron.training.pilot.vocabulary import build_pilot_tokenizer

TASK = "Press Ok"
PILOT = find_pilot()
needs_pilot = pytest.mark.skipif(not (PILOT / "model.safetensors").is_file(), reason="weights/pilot is not here")


def checkpoint(folder: Path, **language: Any) -> Path:
    tokenizer = build_pilot_tokenizer()
    config = pilot_config(tokenizer, hidden=32, channels=4)
    config.llm_config = {**(config.llm_config or {}), **language}
    HolotronForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_agent_file(folder)
    return folder


@pytest.fixture(scope="module")
def pilot_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return checkpoint(tmp_path_factory.mktemp("pilot"))


@pytest.fixture
def shot(tmp_path: Path) -> Path:
    path = tmp_path / "shot.png"
    image = Image.new("RGB", (160, 160), "white")
    image.paste("grey", (40, 60, 100, 80))
    image.save(path)
    return path


def said(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("family", ["vl-v2", "omni"])
def test_tiny_released_checkpoints(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, picture = make_tiny(family, tmp_path / family), tmp_path / "wide.jpg"
    Image.effect_noise((320, 180), 90).convert("RGB").save(picture)
    out = tmp_path / "seen" / "a.png"
    command = ["look", str(picture), TASK, "--model", str(folder), "--layer", "all", "--out", str(out), "--json"]
    assert main(command) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["picture"] == str(out) and (found["width"], found["height"]) == (320, 180)
    (panel,) = found["panels"]
    assert panel["layers"] == [3] and sum(panel["shares"].values()) == pytest.approx(1, abs=1e-5)
    assert list(panel["shares"]) == (["tiles", "thumbnail", "text"] if family == "vl-v2" else ["picture", "text"])
    on_picture = 1 - panel["shares"]["text"]
    heads = panel["picture_by_head"][0]
    assert len(heads) == 4 and sum(heads) / 4 == pytest.approx(on_picture, abs=1e-5)
    x0, y0, x1, y1 = panel["strongest"][0]["box"]
    assert 0 <= x0 < x1 <= 320 and 0 <= y0 < y1 <= 180
    assert "an agent would be refused" in found["notes"][0]  # the tiny context is shorter than the contract's prompt
    with Image.open(out) as drawn:
        assert drawn.format == "PNG" and drawn.width > 600


def test_a_person_reads_shares_and_the_path(
    pilot_like: Path, shot: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["look", str(shot), TASK, "--model", str(pilot_like)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("layer ") and "% on picture" in lines[0] and lines[-1] == "shot-attention.png"
    assert (tmp_path / "shot-attention.png").is_file()


@pytest.mark.parametrize("family", ["pilot", "omni"])
def test_the_prompt_is_the_one_the_policy_sends(
    family: str, pilot_like: Path, shot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Omni's template would think if it were not told otherwise."""
    folder = pilot_like
    if family == "omni":
        folder = make_tiny(family, tmp_path / family)
        config = (folder / "config.json").read_text()
        assert '"max_position_embeddings": 4096' in config
        (folder / "config.json").write_text(config.replace('embeddings": 4096', 'embeddings": 65536'))
    seen: dict[str, Any] = {}
    mapped = looking.attention_map

    def spy(model: Any, ids: list[int], images: Any) -> Any:
        seen["ids"] = ids
        return mapped(model, ids, images)

    monkeypatch.setattr(looking, "attention_map", spy)
    found = looking.look(shot, TASK, folder)
    policy = load_policy(folder, sampling=SamplingParams(max_tokens=1))
    messages = policy.contract.messages(Conversation(TASK, [Turn(found.screenshot)]))
    grammar = StructuredOutputs(json=policy.contract.schema())

    async def ask() -> Any:
        try:
            return await policy._ask(messages, policy._params(0, grammar))
        finally:
            await policy.close()

    assert asyncio.run(ask()).prompt_token_ids == seen["ids"]
    assert found.tokens == len(seen["ids"])


def test_layers_are_chosen(pilot_like: Path, shot: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def panels(layer: str) -> list[list[int]]:
        command = ["look", str(shot), TASK, "--model", str(pilot_like), "--layer", layer, "--json"]
        assert main([*command, "--out", str(tmp_path / "a.png")]) == 0
        return [panel["layers"] for panel in json.loads(capfd.readouterr().out)["panels"]]

    (every,) = panels("mean")
    assert len(every) > 1
    assert panels("all") == [[layer] for layer in every]
    assert panels("last") == [[every[-1]]] and panels(str(every[0])) == [[every[0]]]
    for wrong in ("0", "-1", "first"):
        assert main(["look", str(shot), TASK, "--model", str(pilot_like), f"--layer={wrong}"]) == 1
        assert str(every[0]) in said(capfd)


@needs_pilot
def test_the_pilot_is_seen_pointing(shot: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The likeliest cell of the picture is the one that the policy clicks."""
    image = Image.open(shot)
    image.paste("lightgrey", (20, 100, 90, 130))
    image.save(shot)
    command = ["look", str(shot), "Click on the button.", "--at", "point", "--json", "--out", str(tmp_path / "a.png")]
    assert main(command) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["step"]["tool_call"]["tool_name"] == "click" and found["notes"] == []
    x, y = found["point"]
    x0, y0, x1, y1 = found["pointer"][0]["box"]
    assert x0 - 0.5 <= x <= x1 + 0.5 and y0 - 0.5 <= y <= y1 + 0.5

    async def decide() -> Any:
        policy = load_policy(PILOT)
        try:
            return await policy.decide(Conversation("Click on the button.", [Turn(read(shot))]))
        finally:
            await policy.close()

    decision = asyncio.run(decide())
    assert decision.step.model_dump(mode="json") == found["step"]
    assert found["pointer"][0]["mass"] == pytest.approx(decision.extra["pointed"][0][2], rel=1e-3)


def read(path: Path) -> Screenshot:
    return looking.read_screenshot(path)[0]


def test_a_model_that_points_nowhere(pilot_like: Path, shot: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Random weights write no click before they run out of room."""
    assert main(["look", str(shot), TASK, "--model", str(pilot_like), "--at", "point"]) == 1
    assert "--at prompt" in said(capfd)
    assert main(["look", str(shot), TASK, "--model", str(pilot_like), "--at", "end"]) == 1
    assert "prompt, point" in said(capfd)


def test_a_screenshot_of_another_size_is_noted(pilot_like: Path, tmp_path: Path) -> None:
    Image.new("RGB", (320, 200), "white").save(tmp_path / "a.png")
    (note,) = looking.look(tmp_path / "a.png", TASK, pilot_like).notes
    assert "160 x 160" in note and "320 x 200" in note


def test_pictures_of_any_kind_become_what_a_browser_gives(tmp_path: Path) -> None:
    image = Image.new("RGBA", (30, 20), (255, 0, 0, 0))
    exif = image.getexif()
    exif[274] = 6  # turned by a quarter
    image.save(tmp_path / "a.png", exif=exif)
    screenshot, shown = looking.read_screenshot(tmp_path / "a.png")
    assert (screenshot.width, screenshot.height) == shown.size == (20, 30)
    with Image.open(io.BytesIO(screenshot.png)) as again:
        assert again.size == (20, 30) and again.getpixel((3, 3)) == (255, 255, 255)


def test_what_cannot_be_looked_at(
    pilot_like: Path, shot: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = make_tiny("nemotron-h", tmp_path / "text")
    blind = checkpoint(tmp_path / "blind", hybrid_override_pattern="M-M-")
    broken = tmp_path / "broken.png"
    broken.write_bytes(shot.read_bytes()[:60])
    notes = tmp_path / "notes.txt"
    notes.write_text("no picture")
    good = str(pilot_like)
    for picture, model, words in [
        (shot, str(text), "no vision tower"),
        (shot, str(blind), "'M-M-' has no attention layer"),
        (shot, str(tmp_path / "nothing"), "no checkpoint folder"),
        (shot, "http://127.0.0.1:9/v1", "no checkpoint folder"),
        (broken, good, "broken.png"),
        (notes, good, "notes.txt"),
        (tmp_path / "gone.png", good, "gone.png"),
        (tmp_path, good, str(tmp_path)),
    ]:
        assert main(["look", str(picture), TASK, "--model", model, "--out", str(tmp_path / "a.png")]) == 1
        line = said(capfd)
        assert words in line and "defect" not in line
    assert not (tmp_path / "a.png").exists()
