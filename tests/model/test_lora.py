"""LoRA adapters: where they sit, that each of them works, and that they survive merging and the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from holotron.model.config import HolotronConfig
from holotron.model.lora import METADATA, TARGETS, add_lora, load_lora, lora_coverage, save_lora
from holotron.model.modeling import HolotronForConditionalGeneration
from tests.model.tiny import TINY, build, tokens

EXPERTS = {
    "hybrid_override_pattern": "ME*-",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}


def filled(model: PeftModel) -> PeftModel:
    """peft's second factor starts at zero; give it values that show in the logits."""
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            p.data.normal_(std=0.05)
    return model


def seeing(seed: int) -> HolotronForConditionalGeneration:
    """With a vision tower and a projector."""
    vision = {"tower": "conv", "channels": [8, 16, 16], "blocks": [1, 1]}
    config = HolotronConfig(
        llm_config=TINY, vision_config=vision, patch_size=8, vit_hidden_size=16, projector_hidden_size=32
    )
    torch.manual_seed(seed)
    return HolotronForConditionalGeneration(config)


def adapted_modules(model: PeftModel) -> set[str]:
    return {name.split(".lora_")[0] for name, _ in model.get_base_model().named_parameters() if ".lora_" in name}


def test_defaults_adapt_every_layer_of_the_language_model_alone(seed: int) -> None:
    model = add_lora(seeing(seed), rank=4)
    layers = "language_model.backbone.layers"
    expected = {
        f"{layers}.{i}.mixer.{name}"
        for i, kind in enumerate(TINY["hybrid_override_pattern"])
        for name in {"M": TARGETS[6:], "*": TARGETS[:4], "-": TARGETS[4:6]}[kind]
    }
    assert adapted_modules(model) == expected
    assert lora_coverage(model) == {"mamba": (3, 3), "mlp": (3, 3), "attention": (1, 1)}
    for name, p in model.named_parameters():
        assert p.requires_grad == (".lora_" in name), name


def test_patterns_reach_other_parts_only_when_asked(seed: int) -> None:
    some = add_lora(seeing(seed), targets=["q_proj", r"mlp1\.\d", r"language_model\.lm_head"])
    assert adapted_modules(some) == {
        "language_model.backbone.layers.3.mixer.q_proj",
        "language_model.lm_head",
        "mlp1.1",
        "mlp1.3",
    }
    everything = add_lora(
        seeing(seed), targets=[r"language_model\.backbone\.layers\.[01]\..*"]
    )  # skips what is no linear
    assert {name.split(".", 3)[3] for name in adapted_modules(everything)} == {
        f"{i}.mixer.{name}" for i, name in ((0, "in_proj"), (0, "out_proj"), (1, "up_proj"), (1, "down_proj"))
    }
    assert lora_coverage(some) == {"mamba": (0, 3), "mlp": (0, 3), "attention": (1, 1)}


@pytest.mark.parametrize("target", ["gate_proj", "conv1d", "mlp1", "lm_head", "proj", r"vision_model\..*", "A_log"])
def test_targets_that_match_nothing(target: str) -> None:
    """The first is what public recipes for this family name; the message lists what there is."""
    with pytest.raises(ValueError) as caught:
        add_lora(build(), targets=["q_proj", target])
    message = str(caught.value)
    assert repr(target) in message
    assert "down_proj, in_proj, k_proj, o_proj, out_proj, q_proj, up_proj, v_proj" in message
    assert "language_model.lm_head" in message


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="neither a name nor a regular expression"):
        add_lora(build(), targets=["(q_proj"])
    with pytest.raises(ValueError, match="at least one target"):
        add_lora(build(), targets=[])
    with pytest.raises(ValueError, match="rank"):
        add_lora(build(), rank=0)


def test_every_adapter_gets_a_gradient_and_nothing_else_does(seed: int) -> None:
    """Also out_proj's, which fused kernels would pass by; and with segments, through the wrapper."""
    model = filled(add_lora(build(), rank=2)).train()
    ids = tokens(2, 20)
    segments = torch.tensor([[0] * 9 + [1] * 11] * 2)
    model(ids, labels=ids, segment_ids=segments).loss.backward()
    for name, p in model.named_parameters():
        if ".lora_" in name:
            assert p.grad is not None and p.grad.abs().max() > 0, name
        else:
            assert p.grad is None, name


@torch.no_grad()
def test_scale_merge_and_removal(seed: int) -> None:
    """Fresh adapters change nothing; filled ones add alpha / rank B A; merged equals unmerged; disabled equals base."""
    base = build()
    ids = tokens(2, 30)
    plain = base(ids).logits
    weight = base.language_model.backbone.layers[0].mixer.out_proj.weight.clone()
    model = add_lora(base, rank=4, alpha=8.0).eval()
    assert torch.equal(model(ids).logits, plain)
    filled(model)
    changed = model(ids).logits
    assert (changed - plain).abs().max() > 0.01
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, plain)
    layer: Any = model.get_base_model().language_model.backbone.layers[0].mixer.out_proj
    delta = 8.0 / 4 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    merged: Any = model.merge_and_unload()
    assert isinstance(merged, HolotronForConditionalGeneration)
    assert (merged(ids).logits - changed).abs().max() < 1e-4
    torch.testing.assert_close(merged.language_model.backbone.layers[0].mixer.out_proj.weight, weight + delta)
    assert merged.state_dict().keys() == build().state_dict().keys()


@torch.no_grad()
def test_save_and_reload(seed: int, tmp_path: Path) -> None:
    base = build()
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    model = filled(add_lora(base, rank=4)).eval()
    ids = tokens(1, 25)
    expected = model(ids).logits
    save_lora(model, tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    stored = json.loads((tmp_path / METADATA).read_text())
    assert stored["adapts_mamba_out_proj"] is True and "out_proj" in stored["note"]
    assert stored["layers"]["mamba"] == {"adapted": 3, "of": 3}
    assert set(stored["modules"]) == adapted_modules(model)

    fresh = build()
    fresh.load_state_dict(weights)
    reloaded = load_lora(fresh, tmp_path).eval()
    torch.testing.assert_close(reloaded(ids).logits, expected)
    assert not any(p.requires_grad for p in reloaded.parameters())
    again = build()
    again.load_state_dict(weights)
    trainable = load_lora(again, tmp_path, trainable=True)
    assert {n for n, p in trainable.named_parameters() if p.requires_grad} == {
        n for n, _ in trainable.named_parameters() if ".lora_" in n
    }


def test_adapter_of_another_model(tmp_path: Path) -> None:
    save_lora(add_lora(build(), targets=["in_proj"]), tmp_path)
    stored = json.loads((tmp_path / METADATA).read_text())
    assert stored["adapts_mamba_out_proj"] is False and "note" not in stored
    with pytest.raises(ValueError, match="layers.0.mixer.in_proj"):
        load_lora(build(hybrid_override_pattern="*-M*"), tmp_path)


def test_routed_experts_are_named_as_left_out(seed: int, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="routed experts"):
        model = add_lora(build(**EXPERTS))
    assert lora_coverage(model)["moe"] == (1, 1)  # its shared expert
    moe = {name for name in adapted_modules(model) if ".layers.1." in name}
    assert {name.split(".mixer.")[1] for name in moe} == {"shared_experts.up_proj", "shared_experts.down_proj"}
    save_lora(model, tmp_path)
    assert json.loads((tmp_path / METADATA).read_text())["routed_experts_adapted"] is False


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_with_gradient_checkpointing(seed: int) -> None:
    """Frozen embeddings must not cut the recomputed layers off from their adapters."""
    model = filled(add_lora(build(), rank=2)).train()
    ids = tokens(1, 20)
    gradients = []
    for reentrant in (None, False, True):
        if reentrant is not None:
            arguments = {"use_reentrant": reentrant}
            model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for found in gradients[1:]:
        assert found.keys() == gradients[0].keys()
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(found[name], gradient)
