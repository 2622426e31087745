"""Our own client against our own server, with the shipped pilot: the same steps as in one process."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from holotron.contract.contract import get_contract
from holotron.contract.conversation import Conversation, Screenshot, Turn
from holotron.contract.policy import PolicyError
from holotron.engine import LLM, AsyncLLM, SamplingParams
from holotron.serving.http_policy import HttpPolicy
from holotron.serving.policy import EnginePolicy
from tests.engine.tiny import picture
from tests.serving.running import Running, data_uri, serving

PILOT = Path(__file__).resolve().parents[2] / "weights" / "pilot"
pytestmark = pytest.mark.skipif(not (PILOT / "model.safetensors").is_file(), reason="no pilot here")


@pytest.fixture(scope="module")
def pilot() -> Iterator[Running]:
    with serving(LLM(PILOT, max_batch=8), api_key="a key", names=("pilot",)) as running:
        yield running


def conversation(seed: int) -> Conversation:
    png = base64.b64decode(data_uri(picture(160, 160, seed)).partition(",")[2])
    return Conversation("Click the button.", [Turn(Screenshot(png, 160, 160, 160, 160))])


@pytest.mark.parametrize("structured_outputs", [False, True])
async def test_steps_over_http_are_those_of_the_engine(pilot: Running, structured_outputs: bool) -> None:
    contract = get_contract("holotron3", images_kept=1)
    policy = HttpPolicy(
        pilot.url,
        None,
        contract,
        "a key",
        structured_outputs=structured_outputs,
        extra={"temperature": 0, "max_tokens": 192},
    )
    assert await policy.check() == "pilot"
    conversations = [conversation(seed) for seed in range(4)]
    decisions = await asyncio.gather(*(policy.decide(c) for c in conversations))
    await policy.close()
    engine = AsyncLLM(LLM(PILOT, max_batch=8))
    local = EnginePolicy(engine, contract, sampling=SamplingParams(max_tokens=192))
    expected = await asyncio.gather(*(local.decide(c) for c in conversations))
    await local.close()
    assert [d.step for d in decisions] == [d.step for d in expected]
    assert all(d.attempts == 1 for d in decisions)
    usage = decisions[0].usage
    assert usage.image_tokens == expected[0].usage.image_tokens > 0
    assert usage.prompt_tokens == expected[0].usage.prompt_tokens
    again = HttpPolicy(pilot.url, "pilot", contract, "a key", extra={"temperature": 0})
    repeated = await again.decide(conversations[0])
    await again.close()
    assert repeated.step == decisions[0].step and repeated.usage.cached_tokens > 0


async def test_a_wrong_key_and_a_wrong_model_are_said(pilot: Running) -> None:
    contract = get_contract("holotron3", images_kept=1)
    for key, model, word in (("other", "pilot", "refuses the key"), ("a key", "huge", "no model 'huge'")):
        policy = HttpPolicy(pilot.url, model, contract, key, attempts=1)
        with pytest.raises(PolicyError, match=word):
            await policy.decide(conversation(0))
        await policy.close()
