"""Loading: folders and hub ids, whole or in shards, streamed, and refused where a tensor has no place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

from holotron.model.checkpoint import KEPT_IN_FP32, kept_in_fp32, load, on_meta, open_checkpoint, stored_tensors
from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.hub import resolve
from holotron.model.modeling import HolotronForConditionalGeneration
from tests.model.test_vision_language import reference
from tests.model.tiny import TINY, randomise, tokens


def text_checkpoint(folder: Path, shard: str = "50GB", **changes: object) -> NemotronHForCausalLM:
    model = NemotronHForCausalLM(NemotronHConfig(**{**TINY, **changes})).eval()
    randomise(model)
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


@pytest.mark.parametrize("shard", ["50GB", "40KB"])
@torch.no_grad()
def test_text_checkpoints(seed: int, tmp_path: Path, shard: str) -> None:
    """The released text layout, in one file or many, without a word about vision."""
    theirs = text_checkpoint(tmp_path, shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > (1 if shard == "40KB" else 0)
    ours = load(tmp_path)
    assert not ours.training and ours.vision_model is None
    ids = tokens(2, 40)
    assert (ours(ids).logits - theirs(ids, use_cache=False).logits).abs().max() < 1e-4
    ours.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in ours.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(seed: int, tmp_path: Path, dtype: torch.dtype) -> None:
    text_checkpoint(tmp_path)
    weights = {stored.key: stored for stored in stored_tensors(tmp_path).values()}
    assert weights["backbone.embeddings.weight"].shape == (97, 64)
    stored = load_file(tmp_path / "model.safetensors")
    model = load(tmp_path, dtype=dtype)
    for name, value in model.state_dict().items():
        wanted = torch.float32 if kept_in_fp32(name) else dtype
        assert value.dtype == wanted, name
        assert torch.equal(value, stored[name.removeprefix("language_model.")].to(wanted)), name
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])


def test_names_kept_in_fp32() -> None:
    assert kept_in_fp32("backbone.layers.3.mixer.dt_bias") and kept_in_fp32("D")
    assert kept_in_fp32("layers.1.mixer.gate.weight") and not kept_in_fp32("layers.1.mixer.propagate.weight")
    assert set(KEPT_IN_FP32) >= {"A_log", "D", "dt_bias"}


@torch.no_grad()
def test_sizes_that_only_the_weights_know(seed: int, tmp_path: Path) -> None:
    """Traps 11 and 14: prefix tokens, projector width and vocabulary of a release come from its tensors."""
    reference(prefix_tokens=10).save_pretrained(tmp_path)
    right = load(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["vision_config"]["num_registers"] += 6
    values["projector_hidden_size"] = 4096
    values["text_config"]["vocab_size"] -= 1
    (tmp_path / "config.json").write_text(json.dumps(values))
    _, _, changed = open_checkpoint(tmp_path)
    assert len(changed) == 3
    again = load(tmp_path)
    assert again.state_dict().keys() == right.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in right.state_dict().items())
    assert (again.config.projector_hidden_size, again.config.language.vocab_size) == (48, 97)
    values["text_config"]["mamba_num_heads"] *= 2  # anything else that disagrees is an error
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"mismatched: .*A_log is \(8,\) in the file and \(16,\) by the config"):
        load(tmp_path)


def test_audio_is_skipped_with_a_message(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    sound = {f"sound_encoder.encoder.layers.{i}.weight": torch.ones(2) for i in range(3)}
    save_file({**load_file(file), **sound, "sound_projection.norm.weight": torch.ones(2)}, file)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "sound_config": {"layers": 24}}))
    with caplog.at_level("INFO"):
        load(tmp_path)
    assert "audio is not supported" in caplog.text and "4 tensors skipped: audio" in caplog.text


def test_every_misfit_is_listed(seed: int, tmp_path: Path) -> None:
    text_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["backbone.layers.0.mixer.D"], weights["backbone.layers.2.norm.weight"]
    weights["backbone.norm_f.weight"] = torch.ones(65)
    save_file({**weights, "backbone.layers.0.mixer.E": torch.ones(1)}, file)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    for part in ("layers.0.mixer.D, ", "layers.2.norm.weight", "unexpected: backbone.layers.0.mixer.E", "(65,)"):
        assert part.replace("unexpected: ", "unexpected: language_model.") in str(caught.value)


def test_broken_shards(seed: int, tmp_path: Path) -> None:
    text_checkpoint(tmp_path, "40KB")
    first, *others = sorted(tmp_path.glob("*.safetensors"))
    index_file = tmp_path / "model.safetensors.index.json"
    index = index_file.read_text()
    whole = first.read_bytes()
    first.unlink()
    with pytest.raises(ConfigError, match=f"lacks 1 of {len(others) + 1} shards: {first.name}"):
        load(tmp_path)
    first.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=f"{first.name} is corrupt or cut short"):
        load(tmp_path)
    shutil.copy(others[0], first)
    with pytest.raises(ConfigError, match=f"is in both {first.name} and {others[0].name}"):
        load(tmp_path)
    first.write_bytes(whole)
    escaped = index.replace(first.name, f"../{tmp_path.name}/{first.name}")
    index_file.write_text(escaped)
    with pytest.raises(ConfigError, match="points outside the folder"):
        load(tmp_path)
    index_file.write_text(index)
    load(tmp_path)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NemotronHConfig(**TINY).to_dict()))
    torch.save({"backbone.embeddings.weight": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pytorch_model.bin is a pickle"):
        load(tmp_path)


def test_on_meta_takes_no_memory() -> None:
    sizes = {**TINY, "hidden_size": 65536, "intermediate_size": 2**20}  # 0.2 TB, were it real
    model = on_meta(HolotronConfig(llm_config=sizes))
    assert all(p.is_meta for p in model.parameters()) and sum(p.numel() for p in model.parameters()) > 5e10


PEAK = """
import sys, threading, time
from pathlib import Path
import torch
from holotron.model.checkpoint import load

def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
before, peak, running = anonymous(), [0], [True]

def watch():
    while running:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
model = load(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
running.clear()
thread.join()
print(peak[0] - before, sum(t.numel() * t.element_size() for t in model.state_dict().values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account of memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_holds_the_model_and_one_tensor(tmp_path: Path, dtype: str) -> None:
    """A file of over 100 MB, its largest tensor 12 MB: loading takes the model, a tensor, and a little for Python."""
    sizes = {**TINY, "hidden_size": 768, "intermediate_size": 4096, "hybrid_override_pattern": "M-" * 4 + "*"}
    config = HolotronConfig(llm_config=sizes)
    HolotronForConditionalGeneration(config).save_pretrained(tmp_path, max_shard_size="60MB")
    run = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path), dtype], capture_output=True, text=True, check=True)
    peak, model = map(int, run.stdout.split())
    largest = 4 * 4096 * 768
    assert model > (4 if dtype == "bfloat16" else 8) * largest
    assert peak < model + largest + 24 * 2**20, f"{peak / 2**20:.0f} MiB for a model of {model / 2**20:.0f} MiB"


def hub_cache(cache: Path, name: str, source: Path, commit: str) -> None:
    """What huggingface_hub leaves behind after a download."""
    repository = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(source, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


OFFLINE = """
import sys, logging
logging.basicConfig(level="INFO", stream=sys.stdout)
from holotron.model.checkpoint import load
from holotron.model.config import ConfigError
try:
    model = load(sys.argv[1], revision=sys.argv[2] or None)
    print("loaded", sum(p.numel() for p in model.parameters()))
except ConfigError as error:
    print("refused:", error)
"""


def test_hub_ids_come_from_the_cache_when_offline(seed: int, tmp_path: Path) -> None:
    """The real huggingface_hub in its own process, as HF_HUB_OFFLINE is read when it is imported."""
    text_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "modeling.py").write_text("raise SystemExit('remote code ran')")
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub_cache(tmp_path / "cache" / "hub", "someone/tiny", tmp_path / "model", commit)
    env = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}

    def run(name: str, revision: str = "") -> str:
        command = [sys.executable, "-c", OFFLINE, name, revision]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout

    found = run("someone/tiny")
    assert "loaded" in found and f"no revision given, using {commit}" in found
    pinned = run("someone/tiny", commit)
    assert "loaded" in pinned and "no revision given" not in pinned
    assert "refused: someone/absent is not in the local cache" in run("someone/absent")
    assert "refused: someone/tiny is not in the local cache" in run("someone/tiny", "f" * 40)


@pytest.mark.parametrize("name", ["nowhere", "./a/b", "a/b/c", "/nowhere/at/all", "a b/c"])
def test_names_that_are_neither(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a folder with config.json and weights, nor a hub id"):
        resolve(name)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file; a checkpoint is the folder"):
        resolve(tmp_path / "model.safetensors")
