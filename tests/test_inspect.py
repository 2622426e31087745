"""`holotron inspect` and `holotron make-tiny` through the real command line: presets, folders, damage, wording."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from holotron.cli import main
from holotron.model.presets import PRESETS
from holotron.model.tiny_checkpoints import FAMILIES

PILOT = Path(__file__).resolve().parents[1] / "weights" / "pilot"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small checkpoint of each layout, made on the command line."""
    folder = tmp_path_factory.mktemp("tiny")
    seed = str(secrets.randbelow(1000))
    for family in ("nemotron-h", "vl-v2", "omni", "holo2"):
        assert main(["make-tiny", family, str(folder / family), "--seed", seed]) == 0
    return {family: folder / family for family in ("nemotron-h", "vl-v2", "omni", "holo2")}


def inspect_json(capfd: Capture, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["inspect", *arguments, "--json"]) == code
    values: dict[str, Any] = json.loads(capfd.readouterr().out)
    return values


def inspect_text(capfd: Capture, monkeypatch: pytest.MonkeyPatch, columns: int, *arguments: str, code: int = 0) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    capfd.readouterr()
    assert main(["inspect", *arguments]) == code
    return capfd.readouterr().out


def error(capfd: Capture, *arguments: str) -> str:
    capfd.readouterr()
    assert main([*arguments]) == 1
    said = capfd.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return said.err.strip().splitlines()[-1]


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


@pytest.mark.parametrize(
    ("name", "kv", "state", "layers"),
    [
        ("holotron-12b", 24_576, 148_865_024, 62),
        ("nemotron-nano-9b-v2", 16_384, 143_548_416, 56),
        ("nemotron-3-nano-30b-a3b", 6_144, 49_082_368, 52),
        ("holo2-8b", 147_456, 0, 72),
    ],
)
def test_presets_in_json(name: str, kv: int, state: int, layers: int, capfd: Capture) -> None:
    values = inspect_json(capfd, name)
    assert (values["kv_bytes_per_token"], values["state_bytes_per_sequence"]) == (kv, state)
    assert len(values["layers"]) == layers == sum(values["layer_counts"].values())
    assert values["parameters"] == sum(values["parameters_by_part"].values())
    assert values["weight_bytes_bf16"] == 2 * values["parameters"]
    assert values["unverified"] and values["keys"] is None


def test_screenshots_and_break_even_in_json(capfd: Capture) -> None:
    ours = inspect_json(capfd, "holotron-12b")
    assert (ours["tokens_1280x720"], ours["tokens_1920x1080"]) == (768, 2304)
    assert ours["baseline"]["name"] == "holo2-8b"
    assert (ours["baseline"]["break_even_tokens"], ours["baseline"]["break_even_tokens_16bit"]) == (1212, 615)
    text_only = inspect_json(capfd, "nemotron-nano-9b-v2", "--baseline", "none")
    assert text_only["tokens_1280x720"] is None and text_only["baseline"] is None and text_only["screens"] == []
    other = inspect_json(capfd, "nemotron-3-nano-30b-a3b", "--baseline", "holotron-12b")
    assert other["baseline"]["break_even_tokens"] == 0
    assert inspect_json(capfd, "holo2-8b")["baseline"] is None


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_prints(name: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 120):
        text = inspect_text(capfd, monkeypatch, columns, name)
        assert "\x1b" not in text  # a file or pipe gets no colours
        assert max(map(len, text.splitlines())) <= columns
    strip = "".join(re.findall(r"^ *\d+ ([-*ME]+) *$", text, re.MULTILINE))
    assert strip == inspect_json(capfd, name)["layers"]
    assert PRESETS[name].source.split("/")[1] in text


def test_the_strip_wraps(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    text = inspect_text(capfd, monkeypatch, 40, "nemotron-3-super-120b-a12b")
    rows = re.findall(r"^ *(\d+) ([-*ME]+) *$", text, re.MULTILINE)
    assert [int(start) for start, _ in rows] == [0, 30, 60]
    assert "40 Mamba-2" in text and "8 attention" in text


def test_colours_on_a_terminal(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in inspect_text(capfd, monkeypatch, 100, "holotron-12b")


def test_what_the_text_says(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(inspect_text(capfd, monkeypatch, 100, "holotron-12b").split())
    for piece in (
        "26.4 GB", "148,865,024 B", "75,464,704 B", "from 1,212 tokens on (615 with a 16-bit state, 1.6 screenshots",
        "6,057 tokens of its own KV cache", "1920x1080 4x2+1 2,304 1.07, 0.95 2,040", "13.18 B",
        "16 prefix tokens", "NVIDIA Open Model License",
    ):  # fmt: skip
        assert piece in text


def test_the_shipped_pilot(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    values = inspect_json(capfd, str(PILOT))
    stored = load_file(PILOT / "model.safetensors")
    assert values["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert values["layers"] == json.loads((PILOT / "config.json").read_text())["llm_config"]["hybrid_override_pattern"]
    assert values["keys"]["fits"] and values["contract"] == "holotron3"
    assert values["chat_template"] == "chat_template.jinja"
    assert values["files"]["bytes"]["model.safetensors"] == (PILOT / "model.safetensors").stat().st_size
    assert values["files"]["tensor_bytes"]["BF16"] + values["files"]["tensor_bytes"]["F32"] == sum(
        tensor.nbytes for tensor in stored.values()
    )
    assert values["unverified"] == ["the values of the weights: only the headers of the files were read"]
    text = inspect_text(capfd, monkeypatch, 80, str(PILOT))
    assert "all fit the config" in text and "holotron3" in text and "grounding head" in text


@pytest.mark.parametrize("family", ["nemotron-h", "vl-v2", "omni", "holo2"])
def test_released_layouts(family: str, tiny: dict[str, Path], capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    values = inspect_json(capfd, str(tiny[family]))
    assert values["keys"]["fits"] and values["contract"] is None
    assert any("agent.json" in doubt for doubt in values["unverified"])
    assert (values["tokens_1280x720"] is None) == (family == "nemotron-h")
    skipped = values["keys"]["skipped"]
    assert ("audio" in skipped) == (family == "omni")
    text = inspect_text(capfd, monkeypatch, 80, str(tiny[family]))
    assert str(tiny[family]) in text.replace("\n", "")


def test_only_headers_are_read(tiny: dict[str, Path], tmp_path: Path, capfd: Capture) -> None:
    """Weights that no loader would accept change nothing."""
    folder = copy_of(tiny["vl-v2"], tmp_path)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file(
        {key: torch.full_like(t, 7) if t.dtype == torch.long else t * float("nan") for key, t in tensors.items()}, file
    )
    assert inspect_json(capfd, str(folder))["keys"]["fits"]


def test_keys_that_do_not_fit_are_listed(
    tiny: dict[str, Path], tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(tiny["vl-v2"], tmp_path)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    gone, bent = "language_model.backbone.layers.0.mixer.D", "language_model.backbone.norm_f.weight"
    del tensors[gone]
    tensors[bent] = tensors[bent][:-1].clone()
    tensors["language_model.backbone.embedding.weight"] = torch.zeros(3)
    save_file(tensors, file)
    keys = inspect_json(capfd, str(folder), code=1)["keys"]
    assert keys["missing"] == [gone] and keys["unexpected"] == ["language_model.backbone.embedding.weight"]
    (mismatch,) = keys["mismatched"]
    assert bent in mismatch and "in the file" in mismatch
    text = inspect_text(capfd, monkeypatch, 120, str(folder), code=1)
    assert gone in text and "1 missing" in text and "all fit" not in text


def test_what_the_weights_correct_is_said(tiny: dict[str, Path], tmp_path: Path, capfd: Capture) -> None:
    folder = copy_of(tiny["vl-v2"], tmp_path)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    token = "vision_model.radio_model.model.patch_generator.cls_token.token"
    before = len(tensors[token])
    tensors[token] = torch.zeros(before + 3, tensors[token].shape[1])
    save_file(tensors, file)
    values = inspect_json(capfd, str(folder))
    assert values["keys"]["fits"]
    assert f"prefix tokens {before} -> {before + 3}: the weights' value, not the config's" in values["unverified"]
    width = tensors[token].shape[1]
    assert values["parameters"] - inspect_json(capfd, str(tiny["vl-v2"]))["parameters"] == 3 * width


def test_doubts_about_tokenizer_template_and_statistics(tiny: dict[str, Path], tmp_path: Path, capfd: Capture) -> None:
    folder = copy_of(tiny["vl-v2"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    right = config["img_context_token_id"]
    config |= {"img_context_token_id": right + 1, "norm_mean": None, "norm_std": None}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("chat_template.jinja", "preprocessor_config.json"):
        (folder / name).unlink()
    doubts = inspect_json(capfd, str(folder))["unverified"]
    assert any(f"img_context_token_id {right + 1}: the tokenizer gives <image> the id {right}" in d for d in doubts)
    assert any(doubt.startswith("the chat template") for doubt in doubts)
    assert any(doubt.startswith("norm_mean, norm_std") for doubt in doubts)
    (folder / "tokenizer.json").unlink()
    assert any("no tokenizer.json" in doubt for doubt in inspect_json(capfd, str(folder))["unverified"])


def test_a_tokenizer_larger_than_the_vocabulary(tiny: dict[str, Path], tmp_path: Path, capfd: Capture) -> None:
    folder = copy_of(tiny["nemotron-h"], tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 10**6, "content": "<far>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert any("ids up to 1000000" in doubt for doubt in inspect_json(capfd, str(folder))["unverified"])


def test_damaged_folders(tiny: dict[str, Path], tmp_path: Path, capfd: Capture) -> None:
    folder = copy_of(tiny["nemotron-h"], tmp_path)
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert str(file) in error(capfd, "inspect", str(folder))
    file.unlink()
    assert "no model.safetensors" in error(capfd, "inspect", str(folder))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "describes no model of this family" in error(capfd, "inspect", str(folder))
    (folder / "config.json").write_text('{"hybrid_override_pattern": "M", "hidden_size": "wide"}')
    assert "llm_config has no vocab_size" in error(capfd, "inspect", str(folder))
    (folder / "config.json").unlink()
    assert "has no config.json" in error(capfd, "inspect", str(folder))


def test_names_that_are_nothing(tmp_path: Path, capfd: Capture) -> None:
    said = error(capfd, "inspect", "holotron-13b")
    assert all(name in said for name in PRESETS)
    assert "presets" in error(capfd, "inspect", "holotron-12b", "--baseline", "holo3")
    assert "only goes with a hub id" in error(capfd, "inspect", "holotron-12b", "--revision", "main")
    assert str(tmp_path / "no") in error(capfd, "inspect", str(tmp_path / "no"))


def test_a_hub_id_offline(
    tiny: dict[str, Path], tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the cache alone: config and tokenizer are there, weights are not."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--acme--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(tiny["vl-v2"], cached / "snapshots" / commit, ignore=shutil.ignore_patterns("*.safetensors"))
    # what the environment variables of these names set, but those are read only once, at import
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for revision in ([], ["--revision", commit]):
        values = inspect_json(capfd, "acme/small", *revision)
        assert values["kind"] == "hub" and values["source"] == f"acme/small @ {commit}"
        assert values["keys"] is None and any("not downloaded" in doubt for doubt in values["unverified"])
    said = error(capfd, "inspect", "acme/large")
    assert "acme/large is not in the local cache" in said and "give a folder" in said


def test_make_tiny_is_reproducible_and_careful(tmp_path: Path, capfd: Capture) -> None:
    folders = [str(tmp_path / name) for name in ("one", "two", "three")]
    for folder, seed in zip(folders, ("5", "5", "6"), strict=True):
        assert main(["make-tiny", "nemotron-h", folder, "--seed", seed, "--dtype", "bfloat16"]) == 0
    assert capfd.readouterr().out.split() == folders
    one, two, three = ((Path(folder) / "model.safetensors").read_bytes() for folder in folders)
    assert one == two != three
    assert "not empty" in error(capfd, "make-tiny", "nemotron-h", folders[0])
    assert main(["make-tiny", "nemotron-h", folders[0], "--seed", "6", "--dtype", "bfloat16", "--overwrite"]) == 0
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == three
    assert "families: " in error(capfd, "make-tiny", "llama", str(tmp_path / "four"))
    assert "dtypes: " in error(capfd, "make-tiny", "nemotron-h", str(tmp_path / "four"), "--dtype", "int4")


@pytest.mark.parametrize(("command", "names"), [("inspect", list(PRESETS)), ("make-tiny", list(FAMILIES))])
def test_help_lists_what_may_be_given(command: str, names: list[str], capfd: Capture) -> None:
    assert main([command, "--help"]) == 0
    text = capfd.readouterr().out
    assert all(f"{name}:" in text for name in names)
