from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from transformers import PreTrainedTokenizerFast

from holotron.engine import LLM, AsyncLLM, EngineError, RequestOutput, SamplingParams, StructuredOutputs
from holotron.model.modeling import HolotronForConditionalGeneration
from tests.engine.tiny import picture


class WatchedLLM(LLM):
    """The engine, counting what ran side by side, and failing on request."""

    most = 0
    prefills = 0
    failing = False

    def step(self) -> list[RequestOutput]:
        if self.failing:
            raise RuntimeError("the roof fell in")
        self.prefills += bool(self.waiting)
        outputs = super().step()
        self.most = max(self.most, len(self.running))
        return outputs


@pytest.fixture
async def engine(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> AsyncIterator[AsyncLLM]:
    served = AsyncLLM(WatchedLLM(model, tokenizer, max_batch=8), gather_s=0.1)
    yield served
    await served.close()


def watched(engine: AsyncLLM) -> WatchedLLM:
    assert isinstance(engine.llm, WatchedLLM)
    return engine.llm


LONG = SamplingParams(max_tokens=10**6, ignore_eos=True)


async def test_concurrent_callers_share_a_batch_and_get_their_own_answers(engine: AsyncLLM, llm: LLM) -> None:
    prompts = [f"worker {i}" for i in range(8)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = await asyncio.gather(*(engine.generate(p, params) for p in prompts))
    expected = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert watched(engine).most >= 4
    assert watched(engine).prefills <= 4


async def test_chat(engine: AsyncLLM, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=5)
    assert (await engine.chat(messages, params)).outputs[0].token_ids == (
        llm.chat(messages, params)[0].outputs[0].token_ids
    )


async def test_cancelling_frees_the_slot(engine: AsyncLLM) -> None:
    llm = watched(engine)
    tasks = [asyncio.create_task(engine.generate("endless", LONG)) for _ in range(8)]
    async with asyncio.timeout(20):
        while len(llm.running) < 8:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))
        after = await engine.generate("next", SamplingParams(max_tokens=3, ignore_eos=True))
    assert after.metrics.output_tokens == 3
    async with asyncio.timeout(20):
        while llm.has_unfinished:
            await asyncio.sleep(0.01)
    llm.check_integrity()


async def test_a_failing_step_fails_the_pending_and_not_the_later(engine: AsyncLLM) -> None:
    llm = watched(engine)
    tasks = [asyncio.create_task(engine.generate("endless", LONG)) for _ in range(3)]
    async with asyncio.timeout(20):
        while len(llm.running) < 3:
            await asyncio.sleep(0.01)
        llm.failing = True
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, EngineError) and "the roof fell in" in str(e) for e in errors)
        llm.failing = False
        assert (await engine.generate("again", SamplingParams(max_tokens=2))).metrics.output_tokens <= 2


async def test_bad_requests_fail_alone(engine: AsyncLLM) -> None:
    good = engine.generate("fine", SamplingParams(max_tokens=8, ignore_eos=True))
    bad = engine.generate({"prompt": "none", "multi_modal_data": {"image": [picture(16, 16)]}})
    refused = engine.generate("x", SamplingParams(structured_outputs=StructuredOutputs(json={"not": {}})))
    first, second, third = await asyncio.gather(good, bad, refused, return_exceptions=True)
    assert isinstance(first, RequestOutput) and first.metrics.output_tokens == 8
    assert isinstance(second, ValueError) and isinstance(third, ValueError)


async def test_closing_fails_what_is_pending_and_what_comes_later(
    model: HolotronForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = AsyncLLM(LLM(model, tokenizer))
    task = asyncio.create_task(engine.generate("endless", LONG))
    async with asyncio.timeout(20):
        while not engine.llm.running:
            await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate("late")
        await engine.close()  # twice does no harm


async def test_a_leak_is_reported_when_the_engine_falls_idle(engine: AsyncLLM) -> None:
    llm = watched(engine)
    task = asyncio.create_task(engine.generate("endless", LONG))
    async with asyncio.timeout(20):
        while not llm.running:
            await asyncio.sleep(0.01)
        llm.running.clear()  # what a bug of ours would do
        with pytest.raises(EngineError, match="slot leaked|does not match|failed"):
            await task
        assert (await engine.generate("again", SamplingParams(max_tokens=2))).metrics.output_tokens <= 2
