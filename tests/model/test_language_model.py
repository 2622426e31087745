"""The hybrid language model against transformers' `nemotron_h`, and its numeric traps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import NemotronHConfig, NemotronHForCausalLM

from holotron.model.cache import HybridCache
from holotron.model.config import HolotronConfig
from holotron.model.modeling import HolotronForConditionalGeneration
from tests.model.tiny import TINY, build, randomise, tokens


def pieces(model: HolotronForConditionalGeneration, ids: Tensor, sizes: list[int]) -> tuple[Tensor, HybridCache]:
    """Logits of `ids` fed in pieces through one cache that has to grow on the way."""
    cache = HybridCache.empty(model.config.language, len(ids), capacity=4)
    found = [model(piece, cache=cache).logits for piece in ids.split(sizes, dim=1)]
    return torch.cat(found, 1), cache


@pytest.mark.parametrize("changes", [{}, {"hybrid_override_pattern": "MM*M-*-"}, {"n_groups": 4, "chunk_size": 7}])
@torch.no_grad()
def test_logits_equal_transformers(seed: int, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Through the released text layout (`backbone.*`, `lm_head.weight`) and transformers' own config file."""
    theirs = NemotronHForCausalLM(NemotronHConfig(**{**TINY, **changes})).eval()
    randomise(theirs)
    for layer in theirs.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))  # trap 1
    theirs.save_pretrained(tmp_path)
    config = NemotronHConfig.from_pretrained(tmp_path).to_dict()
    ours = HolotronForConditionalGeneration(HolotronConfig(llm_config=config)).eval()
    ours.language_model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    ids = tokens(2, 50)
    expected = theirs(ids, use_cache=False).logits
    assert expected.abs().max() > 1
    assert (ours(ids).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("sizes", [[1] * 50, [7, 26, 17], [16, 16, 16, 2], [49, 1], [1, 49], [2, 1, 1, 46]])
@torch.no_grad()
def test_pieces_equal_one_pass(seed: int, sizes: list[int]) -> None:
    """Trap 3: decode and split prefill carry convolution, SSM state and keys as one pass does."""
    model = build()
    ids = tokens(2, 50)
    whole = model(ids).logits
    found, cache = pieces(model, ids, sizes)
    assert whole.abs().max() > 1
    assert (found - whole).abs().max() < 1e-4
    assert cache.lengths.tolist() == [50, 50]


@torch.no_grad()
def test_chunk_size_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 2. On a CPU the chunk is what is fastest there, whatever the config says."""
    model = build()
    ids = tokens(2, 50)
    logits = []
    for chunk in (1, 7, 16, 50, 128):
        monkeypatch.setattr("holotron.model.ssd.cpu_chunk", lambda size, chunk=chunk: chunk)
        logits.append(model(ids).logits)
    for found in logits[1:]:
        assert (found - logits[0]).abs().max() < 1e-4


@torch.no_grad()
def test_ragged_batch_equals_singles(seed: int) -> None:
    """Trap 3: whatever fills the padding, prompt and later logits of a row are those of the row alone."""
    model = build()
    prompts = [tokens(n) for n in (5, 33, 1, 50)]
    rest = tokens(4, 6)
    batch = tokens(4, 50)
    for row, prompt in enumerate(prompts):
        batch[row, : len(prompt)] = prompt
    lengths = torch.tensor([len(p) for p in prompts])
    cache = HybridCache.empty(model.config.language, 4)
    padded = model(batch, lengths=lengths, cache=cache).logits
    later = torch.cat([model(rest[:, t : t + 1], cache=cache).logits for t in range(6)], 1)
    uncached = model(batch, lengths=lengths).logits
    for row, prompt in enumerate(prompts):
        alone = model(torch.cat([prompt, rest[row]])[None]).logits[0]
        n = len(prompt)
        assert (padded[row, :n] - alone[:n]).abs().max() < 1e-4
        assert (uncached[row, :n] - alone[:n]).abs().max() < 1e-4
        assert (later[row] - alone[n:]).abs().max() < 1e-4
    assert cache.lengths.tolist() == [n + 6 for n in lengths.tolist()]


@torch.no_grad()
def test_ragged_pieces(seed: int) -> None:
    """Rows may receive different numbers of tokens in every call, none included, one at a time or many."""
    model = build()
    ids = tokens(3, 40)
    cache = HybridCache.empty(model.config.language, 3, capacity=4)
    done = [0, 0, 0]
    found: list[list[Tensor]] = [[], [], []]
    for counts in ([3, 0, 9], [1, 1, 0], [0, 20, 2], [17, 1, 1], [1, 0, 1], [2, 2, 2]):
        batch = tokens(3, max(counts))
        for row, count in enumerate(counts):
            batch[row, :count] = ids[row, done[row] : done[row] + count]
        logits = model(batch, lengths=torch.tensor(counts), cache=cache).logits
        for row, count in enumerate(counts):
            found[row].append(logits[row, :count])
            done[row] += count
    assert cache.lengths.tolist() == done
    for row in range(3):
        alone = model(ids[row : row + 1, : done[row]]).logits[0]
        assert (torch.cat(found[row]) - alone).abs().max() < 1e-4


@torch.no_grad()
def test_forks_share_nothing(seed: int) -> None:
    """Trap 24: two continuations of one prompt, and a third batch member moved in, each as if alone."""
    model = build()
    prompt, other = tokens(1, 20), tokens(1, 11)
    ends = tokens(3, 5)
    _, trunk = pieces(model, prompt, [20])
    _, side = pieces(model, other, [11])
    before = model(ends[:1, :1], cache=trunk.select([0])).logits
    forked = HybridCache.concatenate([trunk.select([0, 0]), side])
    found = torch.cat([model(ends[:, t : t + 1], cache=forked).logits for t in range(5)], 1)
    for row, start in enumerate((prompt, prompt, other)):
        alone = model(torch.cat([start, ends[row : row + 1]], 1)).logits[0, start.shape[1] :]
        assert (found[row] - alone).abs().max() < 1e-4
    assert torch.equal(model(ends[:1, :1], cache=trunk.select([0])).logits, before)
    assert trunk.lengths.tolist() == [20] and side.lengths.tolist() == [11]
    # stores of the copy are its own
    copy = trunk.select([0])
    for mine, theirs in zip(
        (copy.conv, copy.ssm, copy.keys, copy.values),
        (trunk.conv, trunk.ssm, trunk.keys, trunk.values),
        strict=True,
    ):
        for i in mine:
            assert mine[i].data_ptr() != theirs[i].data_ptr()


def test_width_comes_from_heads(tmp_path: Path) -> None:
    """Trap 5: like Nano-9B-v2, heads x head size is not expand x hidden."""
    sizes = {**TINY, "hidden_size": 56, "mamba_num_heads": 8, "mamba_head_dim": 16, "expand": 2}
    theirs = NemotronHForCausalLM(NemotronHConfig(**sizes))
    theirs.save_pretrained(tmp_path)
    ours = HolotronForConditionalGeneration(HolotronConfig(llm_config=sizes))
    ours.language_model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert ours.language_model.backbone.layers[0].mixer.out_proj.weight.shape == (56, 128)


@torch.no_grad()
def test_bfloat16_keeps_fp32_state(seed: int) -> None:
    """Traps 7 and 8: activations may be 16 bit, the SSM state is not."""
    model = build().to(torch.bfloat16)
    cache = HybridCache.empty(model.config.language, 2, dtype=torch.bfloat16)
    for ids in (tokens(2, 9), tokens(2, 1)):
        assert model(ids, cache=cache).logits.dtype == torch.bfloat16
        assert {state.dtype for state in cache.ssm.values()} == {torch.float32}
        assert {state.dtype for state in cache.conv.values()} == {torch.bfloat16}


@torch.no_grad()
def test_attention_knows_no_positions(seed: int) -> None:
    """Trap 9: alone it cannot tell the order of earlier tokens, whatever RoPE keys say; with Mamba it can."""
    ids = tokens(1, 12)
    order = torch.cat([torch.randperm(11), torch.tensor([11])])
    while (ids[:, order] == ids).all():
        order = torch.cat([torch.randperm(11), torch.tensor([11])])
    blind = build(hybrid_override_pattern="*-", rope_theta=10000, partial_rotary_factor=1.0)
    seeing = build(hybrid_override_pattern="M*-")
    for model, same in ((blind, True), (seeing, False)):
        gap = (model(ids).logits[0, -1] - model(ids[:, order]).logits[0, -1]).abs().max()
        assert (gap < 1e-5) == same


@torch.no_grad()
def test_state_is_constant_and_counted(seed: int) -> None:
    model = build()
    config = model.config.language
    cache = HybridCache.empty(config, 2)
    for step in range(20):
        model(tokens(2, 1), cache=cache)
        assert cache.state_bytes() == config.state_bytes()
        assert cache.kv_bytes(1) == (step + 1) * config.kv_bytes_per_token()
    # 3 Mamba layers: 8 x 16 x 16 SSM and 3 columns of 128 + 2 x 2 x 16 channels, 4 bytes each
    assert config.state_bytes() == 3 * 4 * (8 * 16 * 16 + 3 * 192)


def test_loss_without_logits(seed: int) -> None:
    """The same loss and gradients, whether unlabelled tokens are scored or not; packed documents included."""
    model = build()
    ids = tokens(3, 30)
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.7, -100)
    segments = torch.arange(30).expand(3, -1) // 11
    found = []
    for whole in (True, False):
        model.zero_grad()
        out = model(ids, labels=labels, segment_ids=segments, return_logits=whole)
        out.loss.backward()
        assert (out.logits is not None) == whole
        found.append((out.loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (loss, gradients), (other, others) = found
    assert loss > 0 and abs(loss - other) < 1e-5 * loss
    for first, second in zip(gradients, others, strict=True):
        assert (first - second).abs().max() <= 1e-5 * first.abs().max().clamp(min=1e-3)
