"""Mixture-of-experts layers against a float64 oracle and transformers' `nemotron_h`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import NemotronHConfig, NemotronHForCausalLM

from holotron.model import moe as moe_module
from holotron.model.cache import HybridCache
from holotron.model.config import ConfigError, HolotronConfig, LanguageConfig
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.moe import MoE, grouped_linear, record_routing, update_correction_bias
from tests.model.tiny import TINY, randomise, tokens
from tests.oracles import moe as oracle

EXPERTS: dict[str, Any] = {
    "hybrid_override_pattern": "ME*E-ME",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 2.5,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"moe_latent_size": 32},
    {"n_group": 2, "topk_group": 1},
    {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "moe_latent_size": 16},
    {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    {"moe_intermediate_size": 45},  # rows that are no multiple of 16 bytes: one GEMM per expert
]


@torch.no_grad()
def shake(model: torch.nn.Module) -> None:
    """Random weights under which every expert matters, and biases that move many choices."""
    randomise(model)
    for name, parameter in model.named_parameters():
        if ".experts." in f".{name}":
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.15)


def gap(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value where that is above 1."""
    difference = (found - expected).detach().abs().max()
    return float(difference / expected.detach().abs().max().clamp_min(1))


def layer(**changes: Any) -> MoE:
    built = MoE(LanguageConfig.from_dict({**TINY, **EXPERTS, **changes}), 1).eval()
    shake(built)
    return built


def build(**changes: Any) -> HolotronForConditionalGeneration:
    model = HolotronForConditionalGeneration(HolotronConfig(llm_config={**TINY, **EXPERTS, **changes})).eval()
    shake(model)
    return model


def routing(built: MoE) -> dict[str, Any]:
    cfg = built.gate.config
    return {
        "top_k": cfg.num_experts_per_tok,
        "groups": cfg.n_group,
        "top_groups": cfg.topk_group,
        "normalise": cfg.norm_topk_prob,
        "scale": cfg.routed_scaling_factor,
    }


def routes(built: MoE, x: Tensor) -> list[oracle.Route]:
    gate = built.gate
    return [oracle.route(t, gate.weight.detach(), gate.e_score_correction_bias, **routing(built)) for t in x]


def clear_states(built: MoE, count: int) -> Tensor:
    """Random hidden states (count, hidden) whose experts no rounding can change."""
    found: list[Tensor] = []
    while len(found) < count:
        x = torch.randn(64)
        if routes(built, x[None])[0].margin > 1e-4:
            found.append(x)
    return torch.stack(found)


@torch.no_grad()
def clear_tokens(model: HolotronForConditionalGeneration, *shape: int) -> Tensor:
    """Random ids that no layer of `model` routes within rounding of another choice."""
    margins: list[float] = []
    hooks = [
        m.gate.register_forward_pre_hook(lambda _, args, m=m: margins.extend(r.margin for r in routes(m, args[0])))
        for m in model.modules()
        if isinstance(m, MoE)
    ]
    for _ in range(50):
        ids = tokens(*shape)
        margins.clear()
        model(ids)
        if min(margins) > 1e-5:
            break
    else:
        raise AssertionError("50 draws of tokens all had a tie")
    for hook in hooks:
        hook.remove()
    return ids


@pytest.mark.parametrize("changes", VARIANTS)
def test_output_and_gradients_equal_the_oracle(seed: int, changes: dict[str, Any]) -> None:
    """fp32 against float64, gradients of every weight (through the routing weights: the router's) and of the input."""
    built = layer(**changes)
    x = clear_states(built, 20)
    exact = {k: v.detach().double().requires_grad_() for k, v in built.state_dict().items()}
    exact_x = x.double().requires_grad_()
    expected, found = oracle.moe(exact, exact_x, **routing(built))
    x.requires_grad_()
    out = built(x.view(4, 5, 64), None, None).view(20, 64)
    assert expected.abs().max() > 1 and len({frozenset(r.experts) for r in found}) > 1
    assert gap(out, expected) < 1e-5
    pull = torch.randn(20, 64)
    out.backward(pull)
    expected.backward(pull.double())
    assert x.grad is not None and exact_x.grad is not None
    assert gap(x.grad, exact_x.grad) < 1e-5
    stacks = built.experts
    gradients = {
        f"{e}.{n}_proj.weight": g for n in ("up", "down") for e, g in enumerate(getattr(stacks, f"{n}_proj").grad)
    }
    for key, weight in exact.items():
        if key.endswith("bias"):
            continue
        mine = gradients[key[8:]] if key.startswith("experts.") else built.get_parameter(key).grad
        theirs = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert mine is not None and gap(mine, theirs) < 1e-5, key
    assert built.gate.weight.grad is not None and built.gate.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("changes", VARIANTS)
@torch.no_grad()
def test_logits_equal_transformers(seed: int, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Through files with one key per expert, written by transformers."""
    config = NemotronHConfig(**{**TINY, **EXPERTS, **changes})
    theirs = NemotronHForCausalLM(config).eval()
    shake(theirs)
    for block in theirs.model.layers:
        if hasattr(block.mixer, "time_step_limit"):
            block.mixer.time_step_limit = (0.0, math.inf)  # transformers clamps in prefill only
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "backbone.layers.1.mixer.experts.7.down_proj.weight" in stored
    read = NemotronHConfig.from_pretrained(tmp_path).to_dict()
    ours = HolotronForConditionalGeneration(HolotronConfig(llm_config=read)).eval()
    assert set(ours.language_model.state_dict()) == set(stored)
    ours.language_model.load_state_dict(stored)
    ids = clear_tokens(ours, 2, 40)
    if changes.get("moe_intermediate_size") == 45:
        theirs.set_experts_implementation("eager")  # its grouped path wants aligned rows
    expected = theirs(ids, use_cache=False).logits
    assert expected.abs().max() > 1
    assert (ours(ids).logits - expected).abs().max() < 1e-4
    save_file(ours.language_model.state_dict(), tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(again[key], stored[key]) for key in stored) and set(again) == set(stored)


@pytest.mark.parametrize("changes", [{}, {"n_group": 2, "topk_group": 1}])
@torch.no_grad()
def test_bias_chooses_and_does_not_weigh(seed: int, changes: dict[str, Any]) -> None:
    """A bias moves choices; where it does not, it leaves no trace in the output."""
    built = layer(norm_topk_prob=False, routed_scaling_factor=1.0, **changes)
    x = clear_states(built, 200)
    chosen, weights = built.gate(x)
    scores = torch.sigmoid(x.double() @ built.gate.weight.double().T)
    assert (weights - scores.gather(-1, chosen)).abs().max() < 1e-6
    built.gate.e_score_correction_bias.zero_()
    plain, _ = built.gate(x)
    same = (chosen.sort().values == plain.sort().values).all(-1)
    assert 0 < int(same.sum()) < 200
    without = built(x[None], None, None)[0]
    built.gate.e_score_correction_bias.copy_(torch.full((8,), 0.25))  # the same for all: no choice moves
    assert torch.equal(built(x[None], None, None)[0], without)


@torch.no_grad()
def test_groups_bar_the_best_expert(seed: int) -> None:
    """The best single expert is not chosen where its group's best two together score less."""
    built = layer(n_group=2, topk_group=1, num_experts_per_tok=2)
    built.gate.weight.zero_()
    built.gate.e_score_correction_bias.copy_(torch.tensor([0.9, 0.0, 0.0, 0.0, 0.5, 0.5, 0.1, 0.0]))
    chosen, weights = built.gate(torch.randn(3, 64))
    assert chosen.sort().values.tolist() == [[4, 5]] * 3
    assert torch.allclose(weights, torch.full((3, 2), 1.25))  # 2.5 halved: all scores are one half


@torch.no_grad()
def test_tokens_do_not_interact(seed: int) -> None:
    """Any order, any company, any split into rows: the same output for the same token."""
    built = layer()
    x = clear_states(built, 60)
    whole = built(x[None], None, None)[0]
    order = torch.randperm(60)
    assert gap(built(x[order][None], None, None)[0], whole[order]) < 1e-5
    singles = torch.cat([built(t.view(1, 1, 64), None, None)[0] for t in x])
    assert gap(singles, whole) < 1e-5
    valid = torch.rand(6, 10) < 0.5
    padded = x.view(6, 10, 64).masked_fill(~valid.unsqueeze(-1), math.nan)
    out = built(padded, valid, None)
    assert gap(out[valid], whole.view(6, 10, 64)[valid]) < 1e-5
    assert (out[~valid] == 0).all()
    nothing = built(padded, torch.zeros_like(valid), None)
    assert nothing.shape == (6, 10, 64) and (nothing == 0).all()


@torch.no_grad()
def test_decode_and_ragged_batches_equal_one_pass(seed: int) -> None:
    model = build()
    ids = clear_tokens(model, 3, 24)
    whole = model(ids).logits
    cache = HybridCache.empty(model.config.language, 3, capacity=4)
    steps = torch.cat([model(piece, cache=cache).logits for piece in ids.split([9, *[1] * 15], 1)], 1)
    assert (steps - whole).abs().max() < 1e-4
    lengths = torch.tensor([24, 7, 1])
    padded = model(ids, lengths=lengths).logits
    for row, n in enumerate(lengths.tolist()):
        assert (padded[row, :n] - whole[row, :n]).abs().max() < 1e-4


@pytest.mark.parametrize("width", [48, 45])  # grouped_mm, and one GEMM per expert
@pytest.mark.parametrize("counts", [[3, 0, 0, 5, 1], [0, 0, 9, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 4]])
def test_grouped_linear(seed: int, width: int, counts: list[int]) -> None:
    """Groups without rows included, forwards and backwards; torch's kernel and the loop are both tried."""
    rows, weight = torch.randn(sum(counts), 64, requires_grad=True), torch.randn(5, width, 64, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    assert moe_module.fits_grouped_mm(rows, weight) == (width == 48)
    out = grouped_linear(rows, weight, ends)
    expert = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))
    expected = torch.einsum("sd,sfd->sf", rows.double(), weight.double()[expert])
    assert gap(out, expected) < 1e-5
    pull = torch.randn_like(out)
    found = torch.autograd.grad(out, (rows, weight), pull)
    wanted = torch.autograd.grad(expected, (rows, weight), pull.double())
    assert all(gap(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))
    assert all((found[1][e] == 0).all() for e, n in enumerate(counts) if n == 0)


@torch.no_grad()
def test_state_dict_is_a_view_with_released_keys(seed: int) -> None:
    built = layer(moe_latent_size=32)
    saved = built.state_dict()
    others = {"gate.weight", "gate.e_score_correction_bias", "fc1_latent_proj.weight", "fc2_latent_proj.weight"}
    others |= {"shared_experts.up_proj.weight", "shared_experts.down_proj.weight"}
    assert set(saved) - others == {f"experts.{e}.{n}_proj.weight" for e in range(8) for n in ("up", "down")}
    new = {key: torch.randn_like(value) for key, value in saved.items()}
    for key, value in saved.items():
        value.copy_(new[key])
    for e in range(8):
        assert torch.equal(built.experts.up_proj[e], new[f"experts.{e}.up_proj.weight"])
        assert torch.equal(built.experts.down_proj[e], new[f"experts.{e}.down_proj.weight"])
    with torch.device("meta"):
        empty = MoE(built.gate.config, 1)
    assert {k: v.shape for k, v in empty.state_dict().items()} == {k: v.shape for k, v in saved.items()}
    assert all(v.is_meta for v in empty.state_dict().values())
    for other in (layer(moe_latent_size=32), empty):
        other.load_state_dict(new, assign=other is empty)
        x = clear_states(built, 5)
        assert torch.equal(other(x[None], None, None), built(x[None], None, None))
        assert other.experts.up_proj.requires_grad and set(dict(other.named_parameters())) >= {"experts.up_proj"}


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_names_what_does_not_fit(seed: int, assign: bool) -> None:
    built = layer()
    good = {key: value.clone() for key, value in built.state_dict().items()}
    lacking = {key: value for key, value in good.items() if key != "experts.3.up_proj.weight"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"experts\.3\.up_proj\.weight"'):
        built.load_state_dict(lacking, assign=assign)
    assert built.load_state_dict(lacking, strict=False, assign=assign).missing_keys == ["experts.3.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"experts\.8\.up_proj\.weight"'):
        built.load_state_dict({**good, "experts.8.up_proj.weight": torch.zeros(48, 64)}, assign=assign)
    with pytest.raises(RuntimeError, match=r"size mismatch for experts\.2\.down_proj\.weight: \(64, 47\)"):
        built.load_state_dict({**good, "experts.2.down_proj.weight": torch.zeros(64, 47)}, assign=assign)


@torch.no_grad()
def test_router_stays_in_fp32(seed: int) -> None:
    """Trap 8: cast, autocast or not, the same experts and weights as in fp32."""
    built = layer(moe_latent_size=32)
    x = clear_states(built, 40).bfloat16()
    before = built.gate(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        auto = built.gate(x)
        mixed = built(x.float()[None], None, None)
    plain = built(x.float()[None], None, None)
    built.to(torch.bfloat16)
    assert built.gate.weight.dtype == built.gate.e_score_correction_bias.dtype == torch.float32
    assert built.experts.up_proj.dtype == torch.bfloat16
    for found in (auto, built.gate(x)):
        assert torch.equal(found[0], before[0]) and torch.equal(found[1], before[1])
    cast = built(x[None], None, None)
    assert cast.dtype == torch.bfloat16
    for other in (cast.float(), mixed):
        assert 0 < (other - plain).abs().max() < 0.05 * plain.abs().max()


def test_recorded_routing(seed: int) -> None:
    """Counts and masses are the oracle's, without padding, and nothing is recorded outside the block."""
    built = layer()
    x = clear_states(built, 30)
    valid = torch.rand(5, 6) < 0.7
    valid[0, 0] = True
    expected, mass = [0] * 8, [0.0] * 8
    for r in routes(built, x[valid.flatten()]):
        for e, weight in zip(r.experts, r.weights, strict=True):
            expected[e] += 1
            mass[e] += float(weight) / 2.5
    model = torch.nn.ModuleDict({"a": built})
    built(x.view(5, 6, 64), None, None)
    with record_routing(model) as outer:
        with record_routing(model) as inner:
            built(x.view(5, 6, 64), valid, None)
        built(x.view(5, 6, 64), valid, None)
    built(x.view(5, 6, 64), None, None)
    assert set(inner) == {"a"} and built.loads == []
    load = inner["a"]
    assert load.counts.tolist() == expected
    assert torch.allclose(load.mass, torch.tensor(mass, dtype=torch.float64), atol=1e-5)
    assert outer["a"].counts.tolist() == [2 * n for n in expected]
    total = int(valid.sum()) * 3
    assert sum(expected) == total
    assert load.max_over_mean() == pytest.approx(max(expected) * 8 / total)
    assert load.entropy() == pytest.approx(-sum(n / total * math.log(n / total) for n in expected if n))
    assert load.idle() == sum(n == 0 for n in expected) / 8
    assert float(load.share().sum()) == pytest.approx(1) == float(load.mass_share().sum())


def test_recording_counts_a_recomputed_forward_once(seed: int) -> None:
    built = layer()
    x = clear_states(built, 12).requires_grad_()
    with record_routing(built) as found:
        checkpoint(built, x[None], None, None, use_reentrant=False).sum().backward()
    assert int(found[""].counts.sum()) == 12 * 3
    assert built.experts.up_proj.grad is not None


def test_extremes_of_load() -> None:
    """Collapse to k experts, and no token at all."""
    built = layer()
    built.gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9, 9, 0, 0, 0, 0, 0]))
    with record_routing(built) as found:
        assert found[""].entropy() == 0 and found[""].idle() == 1 and found[""].max_over_mean() == 0
        built(torch.randn(2, 9, 64), None, None)
    load = found[""]
    assert load.counts.tolist() == [18, 18, 18, 0, 0, 0, 0, 0]
    assert load.idle() == 5 / 8 and load.max_over_mean() == pytest.approx(8 / 3)
    assert load.entropy() == pytest.approx(math.log(3))


@torch.no_grad()
def test_bias_updates_balance_the_load(seed: int) -> None:
    """A router that sends most tokens to a few experts spreads them after some steps."""
    built = layer()
    built.gate.e_score_correction_bias.copy_(torch.tensor([0.6, 0.5, 0.4, 0, 0, 0, 0, 0]))
    x = torch.randn(1, 400, 64)
    loads = []
    for _ in range(80):
        with record_routing(built) as found:
            built(x, None, None)
        loads.append(found[""].max_over_mean())
        update_correction_bias(built, found, rate=0.01)
    assert loads[0] > 1.8 and loads[-1] < 1.2
    before = built.gate.e_score_correction_bias.clone()
    with record_routing(built) as found:
        pass
    update_correction_bias(built, found)
    assert torch.equal(built.gate.e_score_correction_bias, before)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"n_routed_experts": 0}, "n_routed_experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"moe_shared_expert_intermediate_size": 0}, "moe_shared_expert_intermediate_size"),
        ({"moe_latent_size": 0}, "moe_latent_size"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 8}, "n_group"),
        ({"n_group": 2, "topk_group": 3}, "topk_group"),
        ({"n_group": 4, "topk_group": 1}, "num_experts_per_tok"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"llm_config\.{name} is"):
        MoE(LanguageConfig.from_dict({**TINY, **EXPERTS, **changes}), 1)
