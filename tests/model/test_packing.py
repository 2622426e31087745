"""Several documents in one row: nothing crosses a border, in any layer, at any chunk size, forwards or backwards."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor

from holotron.model.cache import HybridCache
from holotron.model.layers import MIXERS
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.ssd import ssd_chunked, ssd_step
from tests.model.tiny import TINY, build, tokens

CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # fp32 rounding of logits around 10
documents = st.lists(st.integers(1, 40), min_size=1, max_size=6)
patterns = st.text("M*-", min_size=1, max_size=4).map(lambda kinds: kinds + "M")


def pack(docs: list[Tensor], padding: int = 0) -> tuple[Tensor, Tensor]:
    """One row (1, T) of token ids and segment ids; ids may skip numbers; the padding is noise."""
    ids = torch.cat([*docs, tokens(padding)])
    numbers = torch.cumsum(torch.randint(1, 4, (len(docs),)), 0)
    segments = torch.cat([torch.full_like(doc, int(n)) for doc, n in zip(docs, numbers, strict=True)])
    return ids[None], torch.cat([segments, torch.full((padding,), -1)])[None]


def long_memory(model: HolotronForConditionalGeneration) -> HolotronForConditionalGeneration:
    """States that a leak would find full: slow decay, large steps."""
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.data.uniform_(-6, 0)
        elif name.endswith("dt_bias"):
            p.data.uniform_(-3, 1)
    return model


@settings(max_examples=25, deadline=None)
@given(documents, patterns, st.integers(0, 9), st.integers(0, 2**31))
def test_packed_equals_separate(sizes: list[int], pattern: str, padding: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = long_memory(build(hybrid_override_pattern=pattern))
    docs = [tokens(n) for n in sizes]
    ids, segments = pack(docs, padding)
    with torch.no_grad():
        packed = model(ids, segment_ids=segments).logits[0, : sum(sizes)]
        alone = torch.cat([model(doc[None]).logits[0] for doc in docs])
    torch.testing.assert_close(packed, alone, **CLOSE)


@settings(max_examples=40, deadline=None)
@given(documents, st.sampled_from([1, 2, 5, 16, 64]), st.booleans(), st.integers(0, 2**31))
def test_scan_equals_steps_at_any_chunk(sizes: list[int], chunk: int, strong: bool, seed: int) -> None:
    """Any number of borders in a chunk, any number of chunks in a document; the first document continues a state."""
    torch.manual_seed(seed)
    length = sum(sizes)
    segments = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None]
    x, dt = torch.randn(1, length, 4, 3), torch.rand(1, length, 4)
    a, d = -torch.rand(4) * (100 if strong else 0.1), torch.randn(4)
    b, c = torch.randn(2, 1, length, 2, 5)
    first = torch.randn(1, 4, 3, 5)
    found, last = ssd_chunked(x, dt, a, b, c, d, chunk, first, segments)
    state, start = first, 0
    for size in sizes:
        for t in range(start, start + size):
            y, state = ssd_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], d, state)
            torch.testing.assert_close(found[:, t], y, **CLOSE)
        start += size
        state = state if start == length else torch.zeros_like(state)
    torch.testing.assert_close(last, state, **CLOSE)


@pytest.mark.parametrize("pattern", ["M", "*", "M-M*-M-"])
@torch.no_grad()
def test_first_document_does_not_move_the_second(seed: int, pattern: str) -> None:
    """The border lies inside a chunk; the test sees a leak, as the same rows without borders show."""
    model = long_memory(build(hybrid_override_pattern=pattern))
    second = tokens(30)
    rows = [pack([tokens(n), second]) for n in (23, 23)]
    isolated = [model(ids, segment_ids=segments).logits[0, 23:] for ids, segments in rows]
    assert (isolated[0] - isolated[1]).abs().max() <= 1e-5
    leaking = [model(ids).logits[0, 23:] for ids, _ in rows]
    assert (leaking[0] - leaking[1]).abs().max() > 0.1


def test_batch_of_packed_rows_and_gradients(seed: int) -> None:
    """Rows with different borders and padding; loss and every parameter's gradient as from separate documents."""
    model = long_memory(build(hybrid_override_pattern="M-M*-M-"))
    layout = [[5, 1, 1, 30], [40], [2, 17, 3]]
    docs = [[tokens(n) for n in sizes] for sizes in layout]
    packed = [pack(row, 40 - sum(map(len, row))) for row in docs]
    ids, segments = (torch.cat(part) for part in zip(*packed, strict=True))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100).masked_fill(segments < 0, -100)
    count = int((labels[:, 1:] != -100).logical_and(segments[:, 1:] == segments[:, :-1]).sum())

    model(ids, segment_ids=segments, labels=labels).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for row, sizes in enumerate(layout):
        start = 0
        for size in sizes:
            piece = slice(start, start + size)
            wanted = labels[row, piece][1:]
            if (wanted != -100).any():
                logits = model(ids[row : row + 1, piece]).logits[0, :-1]
                (torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / count).backward()
            start += size
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert (found[name] - p.grad).abs().max() <= 1e-4 * p.grad.abs().max() + 1e-7, name


def test_other_documents_get_no_gradient(seed: int) -> None:
    model = long_memory(build(hybrid_override_pattern="MM*M"))
    embeddings = torch.randn(1, 45, 64, requires_grad=True)
    segments = torch.tensor([[0] * 19 + [1] * 7 + [2] * 19])
    hidden = model.language_model(embeddings, segment_ids=segments)
    hidden[:, 19:26].square().sum().backward()
    assert embeddings.grad is not None
    size = embeddings.grad[0].abs().amax(-1)
    assert size[19:26].min() > 0
    assert torch.cat([size[:19], size[26:]]).max() <= 1e-6 * size.max()


@torch.no_grad()
def test_lengths_mark_the_padding_too(seed: int) -> None:
    """Where `lengths` says what is padding, the ids there do not matter."""
    model = long_memory(build())
    ids, segments = pack([tokens(9), tokens(14)], 6)
    lengths = torch.tensor([23])
    expected = model(ids, segment_ids=segments).logits[:, :23]
    for filler in (-1, 0, 99):
        found = model(ids, lengths=lengths, segment_ids=segments.masked_fill(segments < 0, filler)).logits[:, :23]
        torch.testing.assert_close(found, expected, **CLOSE)


def test_labels_do_not_cross_borders(seed: int) -> None:
    """The last token of a document learns nothing from the first of the next, nor from padding."""
    model = build()
    ids, segments = pack([tokens(6), tokens(5)], 3)
    labels = torch.full_like(ids, -100)
    labels[0, 6] = ids[0, 6]  # first token of document 2
    labels[0, 11] = 5  # padding
    labels[0, 3] = ids[0, 3]
    packed = model(ids, segment_ids=segments, labels=labels).loss
    alone = torch.nn.functional.cross_entropy(model(ids[:, :6]).logits[0, 2:3], ids[0, 3:4])
    torch.testing.assert_close(packed, alone, **CLOSE)


REFUSED = [
    ([[0, 0, 1, 0]], None, "row 0 fall from 1 to 0 at position 3"),
    ([[0, -1, -1, 1]], None, "row 0: a document after padding at 3"),
    ([[0, 0, 1]], None, r"shape \(1, 3\), the tokens \(1, 4\)"),
    ([[0, 0, -1, -1]], [4], "-1 .*lengths"),
    ([[0.0, 0.0, 1.0, 1.0]], None, "integers"),
]


@pytest.mark.parametrize(("segments", "lengths", "message"), REFUSED)
@torch.no_grad()
def test_what_cannot_be_isolated_raises(segments: list[list[float]], lengths: list[int] | None, message: str) -> None:
    model = build()
    counted = None if lengths is None else torch.tensor(lengths)
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 4), lengths=counted, segment_ids=torch.tensor(segments))


@torch.no_grad()
def test_no_cache_with_segments() -> None:
    model = build()
    cache = HybridCache.empty(model.config.language, 1)
    with pytest.raises(ValueError, match="cache"):
        model(tokens(1, 4), cache=cache, segment_ids=torch.tensor([[0, 0, 1, 1]]))
    assert cache.lengths.tolist() == [0]


@torch.no_grad()
def test_forward_refuses_what_it_would_ignore() -> None:
    model = build()
    ids = tokens(1, 4)
    for position_ids, word in ((torch.tensor([[0, 1, 0, 1]]), "restart"), (torch.arange(4)[None], "no position")):
        with pytest.raises(TypeError, match=f"(?s){word}.*segment_ids"):
            model(ids, position_ids=position_ids)
    with pytest.raises(TypeError, match="lengths.*segment_ids"):
        model(ids, attention_mask=torch.ones(1, 4))
    with pytest.raises(TypeError, match=re.escape("'sequence_ids'")):
        model(ids, sequence_ids=torch.zeros(1, 4))
    with pytest.raises(TypeError, match="output_attentions"):
        model(ids, output_attentions=True)
    assert model(ids, attention_mask=None, position_ids=None, use_cache=False).logits.shape == (
        1,
        4,
        TINY["vocab_size"],
    )


def test_peft_wrapper_passes_segments(seed: int) -> None:
    """Through peft's wrapper, with the arguments that its causal-LM kind adds of its own accord."""
    model = long_memory(build())
    ids, segments = pack([tokens(6), tokens(9)])
    expected = model(ids, segment_ids=segments, labels=ids)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    added = dict.fromkeys(("attention_mask", "inputs_embeds", "output_attentions", "return_dict"))
    found = wrapped(input_ids=ids, segment_ids=segments, labels=ids, **added)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_every_mixer_knows_segments(seed: int) -> None:
    """Alone, each kind of layer keeps document 2 from document 1."""
    segments = torch.tensor([[0] * 10 + [1] * 11])
    config = build().config.language
    for kind in ("M", "*", "-"):
        mixer = MIXERS[kind](config, 0)
        u = torch.randn(1, 21, 64)
        changed = torch.cat([torch.randn(1, 10, 64), u[:, 10:]], 1)
        found = [mixer(x, None, None, segments)[:, 10:] for x in (u, changed)]
        assert (found[0] - found[1]).abs().max() <= 1e-5
