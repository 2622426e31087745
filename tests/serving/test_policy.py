from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holotron.contract.contract import get_contract
from holotron.contract.conversation import Conversation, Screenshot, Turn
from holotron.contract.policy import ContractError, PolicyError
from holotron.contract.step import Answer, Click, Step
from holotron.engine import LLM, AsyncLLM, RequestOutput, SamplingParams
from holotron.serving.policy import EnginePolicy, load_policy
from tests.engine.tiny import picture, tiny_model, tiny_tokenizer

torch.set_num_threads(1)

# random weights leave a string when a hot sampler happens on a quote, long before this many tokens
HOT = SamplingParams(temperature=20.0, seed=1, max_tokens=6000)


class RecordingLLM(AsyncLLM):
    """The engine, remembering how it was asked."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.asked: list[tuple[Any, SamplingParams | None]] = []

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> RequestOutput:
        self.asked.append((messages, params))
        return await super().chat(messages, params, chat_template_kwargs)


def screenshot(width: int = 48, height: int = 32, seed: int = 0) -> Screenshot:
    buffer = io.BytesIO()
    picture(width, height, seed).save(buffer, "PNG")
    return Screenshot(buffer.getvalue(), width, height, width, height)


def conversation(answer_now: bool = False) -> Conversation:
    before = Turn(screenshot(seed=1), step=Step(thought="x", tool_call=Click(element="a", x=1, y=2)), result="ok")
    return Conversation("do it", [before, Turn(screenshot())], answer_now=answer_now)


@pytest.fixture
async def llm() -> AsyncIterator[RecordingLLM]:
    tokenizer = tiny_tokenizer()
    engine = RecordingLLM(LLM(tiny_model(tokenizer), tokenizer))
    yield engine
    await engine.close()


async def test_a_decision_is_a_step_with_what_it_cost(llm: RecordingLLM) -> None:
    policy = EnginePolicy(llm, get_contract("holotron3", images_kept=1), sampling=HOT)
    decision = await policy.decide(conversation(answer_now=True))
    assert isinstance(decision.step.tool_call, Answer)
    assert get_contract("holotron3").parse(decision.raw_text) == decision.step
    usage = decision.usage
    assert usage.image_tokens == 6  # one of two screenshots was kept
    assert usage.prompt_tokens > 6 and usage.output_tokens > 10
    assert usage.state_bytes == llm.llm.model.config.language.state_bytes()
    assert usage.kv_bytes > 0 < usage.prefill_s and 0 < usage.decode_s <= decision.seconds
    assert decision.extra["forced_tokens"] > 0
    json.dumps(decision.extra)


async def test_many_conversations_are_decided_at_once(llm: RecordingLLM) -> None:
    policy = EnginePolicy(llm, get_contract("holotron3"), sampling=HOT)
    decisions = await asyncio.gather(*(policy.decide(conversation(answer_now=True)) for _ in range(4)))
    assert {d.raw_text for d in decisions} == {decisions[0].raw_text}  # one seed, one text, whatever the batch


@pytest.mark.parametrize(
    ("temperature", "then"), [(0.0, [0.0, 0.4, 0.4]), (0.45, [0.45, 0.4, 0.4]), (0.8, [0.8, 0.7, 0.7])]
)
async def test_cut_replies_are_asked_for_again_and_never_parsed(
    temperature: float, then: list[float], llm: RecordingLLM
) -> None:
    policy = EnginePolicy(
        llm, get_contract("holotron3"), sampling=SamplingParams(temperature=temperature, max_tokens=3)
    )
    with pytest.raises(ContractError, match="cut off after 3 tokens") as caught:
        await policy.decide(conversation())
    assert caught.value.attempts == 3
    assert caught.value.usage is not None and caught.value.usage.output_tokens == 9
    assert caught.value.raw_text
    assert [params.temperature for _, params in llm.asked if params] == pytest.approx(then)
    assert [messages for messages, _ in llm.asked] == [llm.asked[0][0]] * 3
    seeds = [params.seed for _, params in llm.asked[1:] if params]
    assert seeds[0] != seeds[1]


async def test_an_engine_that_cannot_serve_is_not_the_models_fault() -> None:
    tokenizer = tiny_tokenizer()
    engine = AsyncLLM(LLM(tiny_model(tokenizer), tokenizer, max_model_len=16))
    policy = EnginePolicy(engine, get_contract("holotron3"))
    with pytest.raises(PolicyError, match="must stay within 16"):
        await policy.decide(conversation())
    await policy.close()
    with pytest.raises(PolicyError, match="closed"):
        await EnginePolicy(engine, get_contract("holotron3")).decide(conversation())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


async def test_a_checkpoint_says_how_it_wants_to_be_asked(folder: Path) -> None:
    settings = {"contract": "holotron3", "images_kept": 1, "viewport": [160, 120], "max_tokens": 77}
    (folder / "agent.json").write_text(json.dumps(settings))
    policy = load_policy(folder)
    assert (policy.contract.name, policy.contract.images_kept) == ("holotron3", 1)
    assert (policy.viewport, policy.sampling.max_tokens, policy.sampling.temperature) == ((160, 120), 77, 0.0)
    await policy.close()
    policy = load_policy(folder, images_kept=2, sampling=HOT)
    assert policy.contract.images_kept == 2
    decision = await policy.decide(conversation(answer_now=True))
    assert decision.usage.image_tokens >= 12
    await policy.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "unreadable"),
        ('{"images_kept": 0}', "images_kept"),
        ('{"temprature": 1}', "temprature"),
        ("[]", "agent"),
    ],
)
async def test_a_bad_agent_file_is_named(text: str, message: str, folder: Path) -> None:
    (folder / "agent.json").write_text(text)
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy(folder)
    assert "agent.json" in str(caught.value)


async def test_missing_weights_and_unknown_contracts(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown contract 'nonsense'"):
        load_policy(folder, contract_name="nonsense")
    (folder / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match="has no model.safetensors"):
        load_policy(folder)


def test_thinking_is_refused_until_it_works(llm: RecordingLLM) -> None:
    with pytest.raises(ValueError, match="thinking"):
        EnginePolicy(llm, get_contract("holotron3"), thinking=True)
