"""holotron's own engine behind the worker. `--no-reuse` keeps no prefix; `--grammar` lets the contract's schema and
the end of text act in place of a forced length."""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import torch

from holotron.bench.replay import Answer, Request
from holotron.contract.contract import get_contract
from holotron.engine import LLM, AsyncLLM, SamplingParams, StructuredOutputs

from worker import Pictures, Worker  # isort: skip


class Native:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._pictures = Pictures()
        self._engine: AsyncLLM | None = None
        schema = get_contract("holotron3").schema()
        self._grammar = StructuredOutputs(json=schema) if options.grammar else None

    async def start(self) -> dict[str, Any]:
        torch.set_num_threads(self.options.threads)
        await self.clear()
        return {"torch": torch.__version__, "threads": torch.get_num_threads()}

    async def clear(self) -> None:
        await self.close()
        gc.collect()
        o = self.options
        kept = 0 if o.no_reuse else o.snapshot_mib * 2**20
        self._engine = AsyncLLM(LLM(o.model, max_batch=o.max_batch, threads=o.threads, snapshot_bytes=kept))

    async def ask(self, request: Request) -> Answer:
        assert self._engine is not None
        prompt = {
            "prompt_token_ids": request.token_ids,
            "multi_modal_data": {"image": [self._pictures.read(path) for path in request.images]},
        }
        forced = {"ignore_eos": True, "max_tokens": request.output_tokens, "use_grounding_head": False}
        params = SamplingParams(structured_outputs=self._grammar, max_tokens=256) if self._grammar else None
        output = await self._engine.generate(prompt, params or SamplingParams(**forced))
        metrics = output.metrics
        if self._grammar is None and metrics.output_tokens != request.output_tokens:
            raise RuntimeError(f"{metrics.output_tokens} tokens came back, not {request.output_tokens}")
        if metrics.prompt_tokens != request.prompt_tokens:
            raise RuntimeError(f"the prompt became {metrics.prompt_tokens} tokens, not {request.prompt_tokens}")
        first = time.perf_counter() - metrics.decode_s
        tiles = metrics.tiles_requested, metrics.tiles_encoded
        return Answer(metrics.output_tokens, first, metrics.cached_tokens, *tiles)

    async def settle(self) -> None:
        while self._engine is not None and self._engine.llm.has_unfinished:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        self._engine = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--snapshot-mib", type=int, default=512)
    parser.add_argument("--no-reuse", action="store_true")
    parser.add_argument("--grammar", action="store_true")
    asyncio.run(Worker(Native(parser.parse_args())).serve())


if __name__ == "__main__":
    main()
