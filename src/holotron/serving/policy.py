"""The in-process policy: a contract in front of the engine, behind the `Policy` seam."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holotron.contract.contract import Contract, get_contract
from holotron.contract.conversation import Conversation
from holotron.contract.policy import ContractError, Decision, PolicyError, Usage
from holotron.engine import LLM, AsyncLLM, EngineError, ModelLoadError, SamplingParams, StructuredOutputs
from holotron.engine.outputs import RequestMetrics, RequestOutput

AGENT_FILE = "agent.json"
# a retry of a greedy request would repeat the mistake, so it samples at the contract's floor
_RETRY = {"attempts": 3, "timeout_s": 120.0, "temperature_step": 0.1, "temperature_floor": 0.4}

Side = Annotated[int, Field(ge=1, le=16384)]


class AgentSettings(BaseModel):
    """What a checkpoint was trained to be asked, in `agent.json` beside its weights. Sizes are CSS pixels."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    contract: str = "holotron3"
    images_kept: Annotated[int, Field(ge=1)] | None = None
    viewport: tuple[Side, Side] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 256

    @classmethod
    def read(cls, folder: Path) -> AgentSettings:
        """The folder's settings, or the defaults where it has none. Raises PolicyError."""
        file = folder / AGENT_FILE
        try:
            return cls.model_validate(json.loads(file.read_text("utf-8")))
        except FileNotFoundError:
            return cls()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise PolicyError(f"{file}: {where}: {first['msg']}") from error
        except (OSError, ValueError) as error:
            raise PolicyError(f"{file} is unreadable: {error}") from error


class EnginePolicy:
    """Implements `Policy` over an engine of ours; many conversations may be decided at once.

    `sampling` None is greedy with the contract's max_tokens. A reply that is cut short or breaks the contract
    is asked for again, the same messages at another temperature, as often as the contract allows.
    """

    name = "engine"

    def __init__(
        self,
        llm: AsyncLLM,
        contract: Contract,
        *,
        sampling: SamplingParams | None = None,
        thinking: bool = False,
        viewport: tuple[int, int] | None = None,
    ) -> None:
        if thinking:
            raise ValueError("the in-process engine constrains replies from their first token: no thinking yet")
        self.llm = llm
        self.contract = contract
        self.viewport = viewport
        self.sampling = sampling or SamplingParams(max_tokens=contract.request_defaults["max_tokens"])
        self._retry = {**_RETRY, **contract.request_defaults.get("retry", {})}

    async def decide(self, conversation: Conversation) -> Decision:
        """Raises ContractError after the contract's last attempt, PolicyError if the engine fails."""
        start = time.perf_counter()
        messages = self.contract.messages(conversation)
        grammar = StructuredOutputs(json=self.contract.schema(conversation.answer_now))
        usage, text, failure = Usage(), "", ContractError("no attempt was allowed")
        attempts = int(self._retry["attempts"])
        for attempt in range(attempts):
            output = await self._ask(messages, self._params(attempt, grammar))
            reply = output.outputs[0]
            usage, text = add_usage(usage, output.metrics), reply.text
            try:
                if reply.finish_reason != "stop":
                    cut = f"reply: cut off after {len(reply.token_ids)} tokens ({reply.finish_reason})"
                    raise ContractError(f"{cut}; raise max_tokens")
                step = self.contract.parse(text)
            except ContractError as error:
                failure = error
                continue
            return Decision(
                step=step,
                usage=usage,
                seconds=time.perf_counter() - start,
                attempts=attempt + 1,
                raw_text=text,
                extra=_extra(output),
            )
        raise ContractError(str(failure), raw_text=text, attempts=attempts, usage=usage) from failure

    async def close(self) -> None:
        await self.llm.close()

    def _params(self, attempt: int, grammar: StructuredOutputs) -> SamplingParams:
        base = replace(self.sampling, structured_outputs=grammar)
        if attempt == 0:
            return base
        temperature = max(self._retry["temperature_floor"], base.temperature - self._retry["temperature_step"])
        # each attempt has a seed of its own, so that a run can be repeated and a retry differs
        return replace(base, temperature=temperature, seed=(base.seed or 0) + attempt)

    async def _ask(self, messages: list[dict[str, Any]], params: SamplingParams) -> RequestOutput:
        limit = self._retry["timeout_s"]
        try:
            return await asyncio.wait_for(self.llm.chat(messages, params, {"enable_thinking": False}), timeout=limit)
        except TimeoutError as error:
            raise PolicyError(f"the engine gave no reply within {limit:g} s") from error
        except (EngineError, ValueError) as error:
            raise PolicyError(f"the engine could not decide: {error}") from error


def add_usage(usage: Usage, metrics: RequestMetrics) -> Usage:
    """Sums over attempts; sizes are those of the last."""
    return Usage(
        prompt_tokens=usage.prompt_tokens + metrics.prompt_tokens,
        cached_tokens=usage.cached_tokens + metrics.cached_tokens,
        output_tokens=usage.output_tokens + metrics.output_tokens,
        image_tokens=usage.image_tokens + metrics.image_tokens,
        prefill_s=usage.prefill_s + metrics.encode_s + metrics.prefill_s,
        decode_s=usage.decode_s + metrics.decode_s,
        state_bytes=metrics.state_bytes,
        kv_bytes=metrics.kv_bytes,
    )


def load_policy(
    path: str | Path,
    contract_name: str | None = None,
    images_kept: int | None = None,
    *,
    max_batch: int = 32,
    threads: int | None = None,
    sampling: SamplingParams | None = None,
) -> EnginePolicy:
    """The policy of a checkpoint folder, asked as its `agent.json` says unless the arguments say otherwise.

    Raises PolicyError for a folder that cannot be served, ValueError for an unknown contract.
    """
    folder = Path(path)
    try:
        llm = LLM(folder, max_batch=max_batch, threads=threads)
    except ModelLoadError as error:
        raise PolicyError(str(error)) from error
    settings = AgentSettings.read(folder)
    contract = get_contract(contract_name or settings.contract, images_kept=images_kept or settings.images_kept)
    return EnginePolicy(
        AsyncLLM(llm),
        contract,
        sampling=sampling or SamplingParams(max_tokens=settings.max_tokens),
        viewport=settings.viewport,
    )


def _extra(output: RequestOutput) -> dict[str, Any]:
    """What only this engine knows; plain values, since it goes into the trajectory."""
    metrics = output.metrics
    return {
        "queue_s": metrics.queue_s,
        "encode_s": metrics.encode_s,
        "first_token_s": metrics.first_token_s,
        "forced_tokens": metrics.forced_tokens,
        "logprob": output.outputs[0].cumulative_logprob,
        "pointed": [[p.x, p.y, p.probability] for p in output.outputs[0].grounding],
    }
