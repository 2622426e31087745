"""Reused prefixes, shared tiles, tight memory and turns: none of it changes a token."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from holotron.engine import LLM, EngineError, SamplingParams, StructuredOutputs
from holotron.engine.sequence import Sequence
from holotron.engine.speculate import Lookup
from holotron.model.modeling import HolotronForConditionalGeneration
from tests.engine.tiny import picture, tiny_model, tiny_tokenizer

PLACE = "<img><image></img>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> HolotronForConditionalGeneration:
    return tiny_model(tokenizer)


def prompt(text: str, *pictures: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


def texts(seed: int, count: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    letters = "abcdefghij klmnop"
    draw = torch.randint(len(letters), (count, 60), generator=generator)
    return ["".join(letters[i] for i in row[: 20 + 2 * (n % 20)]) for n, row in enumerate(draw.tolist())]


def histories(seed: int, agents: int, turns: int, window: int | None) -> list[list[dict[str, Any]]]:
    """Prompts of agents that resend their history with one more picture a turn; some pictures are the same."""
    system = "You are an agent that looks at screens and acts on them. "
    found = []
    for agent in range(agents):
        words = texts(seed + agent, turns)
        prompts = []
        for turn in range(turns):
            body, pictures = system + f"Task {agent % 2}: {words[0]}\n", []
            for step in range(turn + 1):
                kept = window is None or step > turn - window
                body += (PLACE if kept else "[gone]") + words[step] + "\n"
                if kept:
                    pictures.append(picture(48 + 16 * (step % 2), 32, seed=seed + step // 2))
            prompts.append(prompt(body, *pictures))
        found.append(prompts)
    return found


def replies(llm: LLM, prompts: list[dict[str, Any]], tokens: int = 6) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("budget", [2**26, 120_000])
def test_cached_equals_uncached(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, window: int | None, budget: int
) -> None:
    """Greedy replies over random histories with branches, with room for all snapshots and with evictions."""
    seed = secrets.randbelow(2**20)
    print("seed", seed)
    plain = LLM(model, tokenizer, snapshot_bytes=0, vision_bytes=0)
    reusing = LLM(model, tokenizer, snapshot_bytes=budget, page_tokens=16)
    for turn, prompts in enumerate(zip(*histories(seed, 3, 5, window), strict=True)):
        expected = replies(plain, list(prompts))
        outputs = reusing.generate(list(prompts), SamplingParams(max_tokens=6, ignore_eos=True))
        assert [o.outputs[0].token_ids for o in outputs] == expected
        reusing.check_integrity()
        if turn and budget > 10**6:
            assert all(o.metrics.cached_tokens > 0 for o in outputs)
    assert plain.stats()["prefix_hits"] == 0
    tree = reusing.prefixes.stats
    assert tree.hits > 0 and (tree.evictions > 0) == (budget < 10**6)
    assert 0 < reusing.stats()["tiles_encoded"] < plain.stats()["tiles_encoded"] + (window == 1)


def test_append_only_computes_little(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    """With the reply in the history, a turn costs its own tokens."""
    llm = LLM(model, tokenizer)
    body, pictures, spent = "A system prompt of some length, the same for all. ", [], []
    for turn in range(6):
        body += PLACE + f"turn {turn} "
        pictures.append(picture(48, 32, seed=turn))
        output = llm.generate(prompt(body, *pictures), SamplingParams(max_tokens=8, ignore_eos=True))[0]
        body += output.outputs[0].text
        spent.append(output.metrics.prompt_tokens - output.metrics.cached_tokens)
    # a reply of random tokens may read back as other tokens, and then costs that turn more
    assert sorted(spent[1:])[2] < 40 < spent[0]


def test_a_repeated_prompt_points_to_the_same_place(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The grounding head works from a snapshot as from the picture itself."""
    request = prompt("find the button " + PLACE + " now", picture(64, 48))
    schema = SamplingParams(max_tokens=24)
    llm = LLM(model, tokenizer)
    first = llm.prepare(request, schema)
    llm.add_request(first)
    while llm.has_unfinished:
        llm.step()
    again = llm.prepare(request, schema)
    llm.add_request(again)
    llm.step()
    assert again.metrics.cached_tokens > again.spans[-1][1] - 1
    assert again.pointer is not None and again.metrics.tiles_requested == 0
    while llm.has_unfinished:
        llm.step()
    assert again.output == first.output
    assert [p.probability for p in again.grounding] == pytest.approx([p.probability for p in first.grounding])


def test_tight_memory_preempts_and_loses_nothing(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    requests = [prompt(text + PLACE, picture(32, 32, seed=i)) for i, text in enumerate(texts(7, 6))]
    expected = replies(LLM(model, tokenizer), requests, 40)
    per_page = 16 * model.config.language.kv_bytes_per_token()
    tight = LLM(model, tokenizer, page_tokens=16, kv_bytes=14 * per_page, snapshot_bytes=0)
    assert replies(tight, requests, 40) == expected
    assert tight.scheduler.preemptions > 0
    tight.check_integrity()


def test_small_steps_cut_prompts(model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """Prompts in pieces, mixed with sequences that answer already."""
    requests = [prompt(text * 3 + PLACE + text, picture(64, 32, seed=i)) for i, text in enumerate(texts(11, 5))]
    expected = replies(LLM(model, tokenizer, snapshot_bytes=0), requests, 12)
    cut = LLM(model, tokenizer, step_tokens=24)
    assert replies(cut, requests, 12) == expected


def test_what_does_not_fit_is_refused(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    per_page = 16 * model.config.language.kv_bytes_per_token()
    llm = LLM(model, tokenizer, page_tokens=16, kv_bytes=2 * per_page)
    with pytest.raises(ValueError, match="must stay within 32"):
        llm.generate("a word " * 20)


def finished(llm: LLM, sequences: list[Sequence]) -> list[str]:
    """Request ids in the order in which they end."""
    order = []
    for sequence in sequences:
        llm.add_request(sequence)
    while llm.has_unfinished:
        order += [output.request_id for output in llm.step()]
    return order


def test_turns_and_priorities(model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """One user's flood does not hold up another; a smaller number goes before all."""
    llm = LLM(model, tokenizer, max_batch=1, snapshot_bytes=0)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    flood = [llm.prepare(text, params) for text in texts(3, 5)]
    for sequence in flood:
        sequence.user = "loud"
    quiet, urgent = llm.prepare("a quiet one", params), llm.prepare("an urgent one", params)
    quiet.user, urgent.user, urgent.priority = "quiet", "loud", -1
    order = finished(llm, [*flood, quiet, urgent])
    assert order[0] == urgent.request_id
    assert order.index(quiet.request_id) <= 2
    assert sorted(order) == sorted(s.request_id for s in (*flood, quiet, urgent))


def test_the_same_prompt_is_read_once(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Several samples of one prompt share its prefill, and each is what it would be alone."""
    request = prompt("choose a word for this picture " + PLACE + " please", picture(48, 48))
    several = [SamplingParams(temperature=1.0, seed=seed, max_tokens=6, ignore_eos=True) for seed in range(4)]
    alone = [LLM(model, tokenizer).generate(request, params)[0].outputs[0].token_ids for params in several]
    llm = LLM(model, tokenizer)
    outputs = llm.generate([request] * 4, several)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert len({tuple(ids) for ids in alone}) > 1
    prompt_tokens = outputs[0].metrics.prompt_tokens
    assert sorted(o.metrics.cached_tokens for o in outputs) == [0, *[prompt_tokens - 1] * 3]


def test_drafts_change_nothing(model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """Greedy replies are the same with and without guessing ahead; right guesses save steps, wrong ones are undone."""
    requests = [prompt(text + PLACE + text + text, picture(32, 32, seed=i)) for i, text in enumerate(texts(5, 8))]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain = LLM(model, tokenizer, lookup_drafts=False).generate(requests, params)
    llm = LLM(model, tokenizer)
    drafted = llm.generate(requests, params)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    guessed = sum(o.metrics.draft_tokens for o in drafted)
    right = sum(o.metrics.accepted_tokens for o in drafted)
    assert 0 < right < guessed and sum(o.metrics.draft_tokens for o in plain) == 0
    llm.check_integrity()
    schema = StructuredOutputs(json={"type": "object", "properties": {"a": {"enum": ["xxxxxxxx", "y"]}}})
    constrained = SamplingParams(max_tokens=40, structured_outputs=schema)
    again = [engine.generate(requests, constrained) for engine in (llm, LLM(model, tokenizer, lookup_drafts=False))]
    assert [o.outputs[0].text for o in again[0]] == [o.outputs[0].text for o in again[1]]


def test_lookup_drafts_what_followed() -> None:
    lookup = Lookup(frozenset({9}))
    assert lookup.draft([1, 2, 3, 4, 5, 6, 1, 2, 3], 5) == [4, 5, 6, 1, 2]
    assert lookup.draft([1, 2, 3, 4, 5, 6, 1, 2, 3, 7], 5) == []
    assert lookup.draft([1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 1, 2, 3], 3) == [7, 1, 2]
    assert Lookup(frozenset({9})).draft([1, 2, 3, 4, 9, 6, 1, 2, 3], 5) == [4]
    assert Lookup(frozenset()).draft([1, 2], 5) == []


def test_snapshots_in_16_bits(model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """Half the bytes, nearly the same continuation; what runs is not rounded."""
    request, params = prompt("a prompt of some length for this " + PLACE, picture(48, 48)), SamplingParams(logprobs=16)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        llm = LLM(model, tokenizer, snapshot_dtype=dtype)
        first, second = (llm.generate(request, params)[0] for _ in range(2))
        assert second.metrics.cached_tokens > 20
        assert {t.dtype for kept in llm.prefixes.payloads() for t in kept.state.ssm.values()} == {dtype}
        assert {t.dtype for t in llm.pool.ssm.values()} == {torch.float32}
        found[dtype] = (llm.prefixes.stats.bytes / llm.prefixes.stats.snapshots, first, second)
    exact, rounded = found[torch.float32], found[torch.bfloat16]
    assert rounded[0] < 0.8 * exact[0]
    assert rounded[1].outputs[0].token_ids == exact[1].outputs[0].token_ids  # nothing was reused yet
    token = exact[2].outputs[0].token_ids[0]
    near = [out.outputs[0].logprobs[0][token] for out in (exact[2], rounded[2])]
    assert abs(near[0] - near[1]) < 0.2


def test_reset_mends_what_leaked(model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    llm = LLM(model, tokenizer)
    expected = replies(llm, [prompt("some words to begin with")])
    llm.add_request("others")
    llm.step()
    llm.running.clear()  # what a bug of ours would do
    with pytest.raises(EngineError, match="slot leaked"):
        llm.check_integrity()
    llm.reset()
    llm.check_integrity()
    assert not llm.has_unfinished and llm.stats()["snapshots"] == 0
    assert replies(llm, [prompt("some words to begin with")]) == expected


def test_without_attention_there_is_no_page_to_pay(tokenizer: PreTrainedTokenizerFast) -> None:
    """Any length fits, and snapshots work all the same."""
    bare = tiny_model(tokenizer, hybrid_override_pattern="M-M-")
    llm = LLM(bare, tokenizer, max_model_len=2**40, kv_bytes=0)
    request = prompt("some words before " + PLACE + " and some after", picture(32, 32))
    first, second = (llm.generate(request, SamplingParams(max_tokens=6, ignore_eos=True))[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.metrics.cached_tokens > 0 == second.metrics.kv_bytes
    llm.check_integrity()
