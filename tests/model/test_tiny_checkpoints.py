"""Tiny checkpoints: the released layout, the same bytes from a seed, and the same logits in transformers and here."""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, NemotronHForCausalLM, Qwen3VLForConditionalGeneration
from transformers import RadioConfig as ReferenceRadioConfig
from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3, NemotronH_Omni_Reasoning_V3_Config

from holotron.model.chat import load_tokenizer
from holotron.model.checkpoint import load
from holotron.model.config import ConfigError
from holotron.model.processing import processor_of
from holotron.model.special_ids import read_special_ids
from holotron.model.tiny_checkpoints import FAMILIES, make_tiny

TEXT = ["nemotron-h", "nemotron-h-moe", "nemotron-h-latent"]
VISION = ["vl-v2", "omni", "omni-dense"]
RELEASED = ["nemotron-h", "nemotron-h-moe", "nemotron-h-latent", "vl-v2", "omni"]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def stored(folder: Path) -> dict[str, Tensor]:
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as shard:
            weights |= {key: shard.get_tensor(key) for key in shard.keys()}
    return weights


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def lift_clamp(language: Any) -> None:
    """Trap 1: transformers clamps the time step in prefill though the config has no limit."""
    for layer in language.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))


def check_loading(info: dict[str, Any]) -> None:
    """transformers took every tensor it has a place for; what a release lacks or has beyond that is named here."""
    lacking = {key for key in info["missing_keys"] if ".layer_scale" not in key and "video_patch_projection" not in key}
    beyond = {key for key in info["unexpected_keys"] if ".input_conditioner." not in key}
    assert not lacking and not beyond and not info["mismatched_keys"]


def reference(folder: Path) -> Any:
    """The model in transformers, from the same files."""
    values = config_of(folder)
    if values["model_type"] == "nemotron_h":
        model, info = NemotronHForCausalLM.from_pretrained(folder, output_loading_info=True)
        check_loading(info)
        lift_clamp(model)
        return model.eval()
    if (
        values["model_type"] == "NemotronH_Nano_VL_V2"
    ):  # transformers has no class of that name, but one that computes it
        vision, args = values["vision_config"], values["vision_config"].pop("args")
        summaries = [i for i, teacher in enumerate(args["teachers"]) if teacher["use_summary"]]
        values["vision_config"] = ReferenceRadioConfig(
            **vision, num_cls_tokens=4, num_registers=12, summary_idxs=summaries, video_temporal_patch_size=2
        )
        config = NemotronH_Omni_Reasoning_V3_Config(**{k: v for k, v in values.items() if k != "model_type"})
        model, info = NemotronH_Omni_Reasoning_V3.from_pretrained(folder, config=config, output_loading_info=True)
    else:
        model, info = NemotronH_Omni_Reasoning_V3.from_pretrained(folder, output_loading_info=True)
    check_loading(info)
    lift_clamp(model.language_model)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_bytes(family: str, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    first = digest(make_tiny(family, tmp_path / "a", seed=3))
    torch.manual_seed(secrets.randbelow(2**31))
    assert digest(make_tiny(family, tmp_path / "b", seed=3)) == first
    other = digest(make_tiny(family, tmp_path / "c", seed=4))
    weights = {name for name in first if name.endswith(".safetensors")}
    assert {name for name in first if first[name] != other[name]} == weights
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) < 3e6
    torch.random.set_rng_state(before)
    make_tiny(family, tmp_path / "d")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("family", TEXT)
@torch.no_grad()
def test_text_logits_equal_transformers(family: str, seed: int, tmp_path: Path) -> None:
    """T is not a multiple of the chunk size, and larger than it."""
    folder = make_tiny(family, tmp_path / "c", seed=seed)
    theirs, ours = reference(folder), load(folder)
    ids = torch.randint(0, theirs.config.vocab_size, (2, 45))
    expected = theirs(input_ids=ids, use_cache=False).logits
    assert expected.std() > 0.5
    assert (ours(ids).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", VISION)
@torch.no_grad()
def test_image_logits_equal_transformers(family: str, seed: int, tmp_path: Path) -> None:
    """Tiles are images of their own for transformers; Omni takes any grid of an even number of patches a side."""
    folder = make_tiny(family, tmp_path / "c", seed=seed)
    theirs, ours = reference(folder), load(folder)
    image = theirs.config.image_token_id
    assert image == ours.config.img_context_token_id
    height, width = (96, 160) if family == "omni" else (64, 64)
    pixels = torch.randn(2, 3, height, width)
    rows, columns = height // 16, width // 16
    grid = torch.tensor([[rows, columns]] * 2)
    patches = pixels.view(2, 3, rows, 16, columns, 16).permute(0, 2, 4, 1, 3, 5).reshape(2 * rows * columns, -1)
    text = [torch.randint(200, 280, (n,)) for n in (3, 20, 5)]
    block = torch.full((rows * columns // 4,), image)
    ids = torch.cat([text[0], block, text[1], block, text[2]])[None]
    expected = theirs(input_ids=ids, pixel_values=patches, image_grid_hw=grid, use_cache=False).logits
    assert expected.std() > 0.5
    assert (ours(ids, pixel_values=pixels).logits - expected).abs().max() < 1e-4
    assert (ours(ids, pixel_values=pixels.flip(0)).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("family", "tokens"), [("vl-v2", 12), ("omni", 15), ("omni-dense", 15)])
@torch.no_grad()
def test_pictures_become_tokens(family: str, tokens: int, tmp_path: Path) -> None:
    """160 x 80 pixels: two tiles and a thumbnail of 2 x 2 tokens each, or 10 x 6 patches, even on each side."""
    model = load(make_tiny(family, tmp_path / "c"))
    processor = processor_of(model.config)
    assert processor is not None
    picture = torch.randint(0, 256, (80, 160, 3), dtype=torch.uint8).numpy()
    image = processor(picture)
    assert image.num_tokens == processor.num_tokens(160, 80)
    assert model.encode_images(image.pixel_values).tokens.flatten(0, 1).shape[0] == image.num_tokens == tokens


def test_a_named_tower(tmp_path: Path) -> None:
    """Readers must know vit_small by its name, as they know the released vit_huge; no size is written out."""
    folder = make_tiny("vl-v2", tmp_path / "c", tower="vit_small", dtype="bfloat16")
    vision = config_of(folder)["vision_config"]
    assert "hidden_size" not in vision and vision["args"]["model"] == "vit_small_patch16_224"
    tower: Any = load(folder, dtype=torch.bfloat16).vision_model
    blocks = tower.radio_model.model.blocks
    assert len(blocks) == 12 and blocks[0].attn.qkv.weight.shape == (3 * 384, 384)


@torch.no_grad()
def test_attention_baseline_runs_in_transformers(seed: int, tmp_path: Path) -> None:
    folder = make_tiny("holo2", tmp_path / "c", seed=seed)
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    patches = torch.randn(16, 3 * 2 * 16 * 16)
    ids = torch.randint(0, 256, (1, 20))
    start, end, image = (config_of(folder)[f"{n}_token_id"] for n in ("vision_start", "vision_end", "image"))
    ids[0, 4:10] = torch.tensor([start, image, image, image, image, end])
    kinds = (ids == image).int()
    run = {"input_ids": ids, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": kinds}
    first, second = (model.eval()(pixel_values=p, **run).logits for p in (patches, patches.flip(0)))
    assert first.isfinite().all() and first.std() > 0.5
    assert (first - second).abs().max() > 1e-2


@pytest.mark.parametrize("family", RELEASED)
def test_keys_and_shapes_are_the_released_ones(family: str, tmp_path: Path) -> None:
    """Architecture notes 1.2 and 2.2, spelled out here a second time."""
    folder = make_tiny(family, tmp_path / "c")
    values, weights = config_of(folder), stored(folder)
    vision = "vision_config" in values
    start = "language_model." if vision else ""
    llm = values["llm_config"] if vision else values
    wanted = language_shapes(llm, start)
    if vision:
        wanted |= vision_shapes(values, llm["hidden_size"])
    found = {key: tuple(value.shape) for key, value in weights.items()}
    extra = set(found) - set(wanted)
    assert set(wanted) <= set(found)
    assert {key: found[key] for key in wanted} == wanted
    allowed = {"nemotron-h-latent": "mtp.", "omni": "sound_"}.get(family)
    assert all(allowed and key.startswith(allowed) for key in extra), sorted(extra)
    assert bool(extra) == bool(allowed)
    if family == "omni":
        assert {key.split(".")[0] for key in extra} == {"sound_encoder", "sound_projection"}


def language_shapes(llm: dict[str, Any], start: str) -> dict[str, tuple[int, ...]]:
    d, v = llm["hidden_size"], llm["vocab_size"]
    heads, state = llm["mamba_num_heads"], 2 * llm["n_groups"] * llm["ssm_state_size"]
    width = heads * llm["mamba_head_dim"]
    q, kv = (llm[name] * llm["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    inner = llm.get("moe_latent_size") or d
    ffn, shared = llm.get("moe_intermediate_size", 0), llm.get("moe_shared_expert_intermediate_size", 0)
    experts = llm.get("n_routed_experts", 0)
    kinds: dict[str, dict[str, tuple[int, ...]]] = {
        "M": {
            "in_proj.weight": (2 * width + state + heads, d), "conv1d.weight": (width + state, 1, 4),
            "conv1d.bias": (width + state,), "A_log": (heads,), "D": (heads,), "dt_bias": (heads,),
            "norm.weight": (width,), "out_proj.weight": (d, width),
        },
        "-": {"up_proj.weight": (llm["intermediate_size"], d), "down_proj.weight": (d, llm["intermediate_size"])},
        "*": {"q_proj.weight": (q, d), "k_proj.weight": (kv, d), "v_proj.weight": (kv, d), "o_proj.weight": (d, q)},
        "E": {
            "gate.weight": (experts, d), "gate.e_score_correction_bias": (experts,),
            "shared_experts.up_proj.weight": (shared, d), "shared_experts.down_proj.weight": (d, shared),
            **{f"experts.{e}.up_proj.weight": (ffn, inner) for e in range(experts)},
            **{f"experts.{e}.down_proj.weight": (inner, ffn) for e in range(experts)},
        },
    }  # fmt: skip
    if inner != d:
        kinds["E"] |= {"fc1_latent_proj.weight": (inner, d), "fc2_latent_proj.weight": (d, inner)}
    top = {"embeddings.weight": (v, d), "norm_f.weight": (d,)}
    for i, kind in enumerate(llm["hybrid_override_pattern"]):
        top[f"layers.{i}.norm.weight"] = (d,)
        top |= {f"layers.{i}.mixer.{name}": shape for name, shape in kinds[kind].items()}
    return {f"{start}backbone.{name}": shape for name, shape in top.items()} | {f"{start}lm_head.weight": (v, d)}


def vision_shapes(values: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    width, projector = values["vit_hidden_size"], values["projector_hidden_size"]
    args, patch = values["vision_config"]["args"], values["patch_size"]
    side = args["cpe_max_size"] // patch
    radio = "vision_model.radio_model"
    shapes = {
        "mlp1.0.weight": (4 * width,), "mlp1.1.weight": (projector, 4 * width), "mlp1.3.weight": (hidden, projector),
        f"{radio}.input_conditioner.norm_mean": (3, 1, 1), f"{radio}.input_conditioner.norm_std": (3, 1, 1),
        f"{radio}.summary_idxs": (sum(teacher["use_summary"] for teacher in args["teachers"]),),
        f"{radio}.model.patch_generator.embedder.weight": (width, 3 * patch**2),
        f"{radio}.model.patch_generator.pos_embed": (1, side**2, width),
        f"{radio}.model.patch_generator.cls_token.token": (args["register_multiple"], width),
    }  # fmt: skip
    if "sound_config" in values:
        shapes[f"{radio}.model.patch_generator.video_embedder.weight"] = (width, 6 * patch**2)
    for i in range(values["vision_config"]["num_hidden_layers"]):
        sizes = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        sizes |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
        for name, shape in sizes.items():
            shapes |= {f"{radio}.model.blocks.{i}.{name}.weight": shape}
            shapes |= {f"{radio}.model.blocks.{i}.{name}.bias": shape[:1]}
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            shapes[f"{radio}.model.blocks.{i}.{name}"] = (width,)
    return shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_show_mistakes(family: str, tmp_path: Path) -> None:
    """Nothing is left at a default that would hide a tensor being skipped, doubled or swapped."""
    for name, value in stored(make_tiny(family, tmp_path / "c")).items():
        last = name.rsplit(".", 1)[-1]
        if not value.is_floating_point() or last in ("norm_mean", "norm_std", "window"):
            continue
        if last == "lambda1":
            assert (value == 1).all(), name
        elif last == "dt_bias":
            assert -9 <= value.min() and value.max() <= -1, name
        else:
            assert value.std() > 0.02 and value.abs().max() < 6, name


@pytest.mark.parametrize("family", ["nemotron-h-moe", "omni"])
def test_dtype_and_shards(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "c", dtype="bfloat16")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    weights = stored(folder)
    assert set(index) == set(weights) and len(set(index.values())) > 1
    for name, value in weights.items():
        full = name.endswith(("A_log", ".D", "dt_bias", "correction_bias"))
        assert value.dtype == (torch.float32 if full else torch.bfloat16) or not value.is_floating_point(), name
    values = config_of(folder)
    assert values["torch_dtype"] == values.get("llm_config", values)["torch_dtype"] == "bfloat16"
    whole = make_tiny(family, tmp_path / "whole", max_shard_size=10**9)
    assert [f.name for f in whole.glob("*.safetensors")] == ["model.safetensors"]
    for name, value in stored(whole).items():
        assert torch.equal(value.to(weights[name].dtype), weights[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "c")
    words = AutoTokenizer.from_pretrained(folder)
    values = config_of(folder)
    llm = values.get("llm_config") or values.get("text_config") or values
    rows = llm["vocab_size"]
    assert len(words) == rows if family in TEXT else len(words) <= rows
    if family == "vl-v2":
        assert len(words) < rows  # as released: more rows than tokens
    text = "Clic en «Guardar»\n\nthe thing </img> 日本 🙂"
    assert words.decode(words.encode(text), skip_special_tokens=False) == text
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert words.eos_token_id in stops and words.eos_token_id == llm["eos_token_id"]
    ids = {
        "nemotron-h": {"<s>": 1, "<SPECIAL_10>": 10, "<SPECIAL_11>": 11, "<SPECIAL_12>": 12},
        "nemotron-h-moe": {"<s>": 1, "<|im_start|>": 10, "<|im_end|>": 11, "<think>": 12},
        "omni": {"<image>": 18, "<so_embedding>": 27, "<|im_end|>": 11},
        "vl-v2": {"<SPECIAL_12>": 12, "<image>": values.get("img_context_token_id")},
        "holo2": {"<|image_pad|>": values.get("image_token_id"), "<|im_end|>": llm["eos_token_id"]},
    }
    for token, number in ids.get(family, {}).items():
        assert words.encode(f"x{token}y", add_special_tokens=False)[1] == number, token
    if family != "holo2":
        special = read_special_ids(folder, load_tokenizer(folder))  # raises where files contradict each other
        assert special.stop == set(stops) and (special.image is None) == (family in TEXT)


@pytest.mark.parametrize("family", FAMILIES)
def test_chat_template_speaks_the_vocabulary(family: str, tmp_path: Path) -> None:
    """Every marker of a turn, and a picture, is one special token."""
    folder = make_tiny(family, tmp_path / "c")
    words = AutoTokenizer.from_pretrained(folder)
    assert (folder / "chat_template.jinja").is_file()
    picture = [{"type": "image"}] if family not in TEXT else []
    messages = [{"role": "user", "content": [*picture, {"type": "text", "text": "zz"}]}]
    ids = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    special = [words.convert_ids_to_tokens(i) for i in ids if i in words.added_tokens_decoder]
    v2 = family in ("nemotron-h", "vl-v2")
    start, end = ("<SPECIAL_11>", []) if v2 else ("<|im_start|>", ["<|im_end|>"])
    image = {"holo2": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]}.get(family, ["<image>"] * len(picture))
    opening = ["<s>", "<SPECIAL_10>"] if v2 else [start, *end]
    thought = [] if v2 else ["<think>"]  # plain text in the vocabulary of v2
    assert special == [*opening, start, *image, *end, start, *thought]
    tail = words.decode(ids).rsplit("Assistant\n" if v2 else "assistant\n", 1)[1]
    assert tail == ("<think></think>" if family == "vl-v2" else "<think>\n")


def test_no_family_no_dtype_no_tower(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gpt' is unknown; families: nemotron-h, .*holo2"):
        make_tiny("gpt", tmp_path / "c")
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        make_tiny("nemotron-h", tmp_path / "c", dtype="int8")
    with pytest.raises(ConfigError, match="tower 'huge' is unknown; towers: tiny, vit_small"):
        make_tiny("vl-v2", tmp_path / "c", tower="huge")
    with pytest.raises(ConfigError, match="'nemotron-h' has no RADIO tower"):
        make_tiny("nemotron-h", tmp_path / "c", tower="vit_small")
    assert not list(tmp_path.iterdir())


def test_nothing_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "c"
    make_tiny("nemotron-h", folder)
    before = digest(folder)
    with pytest.raises(ConfigError, match="is not empty"):
        make_tiny("holo2", folder)
    assert digest(folder) == before
    make_tiny("holo2", folder, overwrite=True)
    assert config_of(folder)["model_type"] == "qwen3_vl" and "preprocessor_config.json" not in before
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="something other than a checkpoint"):
        make_tiny("holo2", mine, overwrite=True)
    assert [file.name for file in mine.iterdir()] == ["letter.txt"]
    with pytest.raises(ConfigError, match="no folder"):
        make_tiny("holo2", mine / "letter.txt", overwrite=True)
    make_tiny("holo2", tmp_path / "deep" / "empty")
    assert sorted(file.name for file in (tmp_path / "deep").iterdir()) == ["c", "empty"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("nemotron-h", tmp_path / "c")
    before = digest(folder)

    def full(path: Path, content: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("holotron.model.tiny_checkpoints._write_json", full)
    for out in (folder, tmp_path / "new"):
        with pytest.raises(OSError, match="no space left"):
            make_tiny("nemotron-h", out, overwrite=True)
    assert digest(folder) == before
    assert [file.name for file in tmp_path.iterdir()] == ["c"]
