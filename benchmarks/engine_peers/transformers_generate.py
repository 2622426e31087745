"""transformers' `generate` behind the worker: static batches of the language model, fp32, sdpa.

transformers has no tower like the pilot's, so pictures come as embeddings from our tower, each encoded once and then
remembered, which favours this side: its users send the same pictures again and again. Of the users that wait, the one
who has waited longest and those with prompts of about that length make a batch, padded on the left; a batch runs as
long as its longest reply. transformers' clamp of the time step, which the checkpoint does not ask for, is lifted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, NemotronHConfig, NemotronHForCausalLM

from holotron.bench.replay import Answer, Request
from holotron.model.checkpoint import load
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.processing import processor_of

from worker import Pictures, Worker  # isort: skip


class Embedded(NemotronHForCausalLM):
    """`generate` takes embeddings only from models that name them here; what it then does is the same for all."""

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)


def language_of(ours: HolotronForConditionalGeneration, values: dict[str, Any]) -> NemotronHForCausalLM:
    """transformers' model with the weights of ours, its clamp of the time step lifted."""
    theirs = Embedded(NemotronHConfig(**values, attn_implementation="sdpa")).eval()
    weights = ours.language_model.state_dict()
    theirs.load_state_dict({key.replace("backbone.", "model."): value for key, value in weights.items()})
    for layer in theirs.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))
    return theirs


@dataclass(slots=True)
class Waiting:
    request: Request
    answered: asyncio.Future[Answer]


class FirstToken(LogitsProcessor):
    """Notes when the first token is about to be chosen."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.at = self.at or time.perf_counter()
        return scores


class Generate:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._pictures = Pictures()
        self._encoded: dict[str, Tensor] = {}
        self._waiting: list[Waiting] = []
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        torch.set_num_threads(self.options.threads)
        self.ours = load(self.options.model)
        self.processor = processor_of(self.ours.config)
        self.placeholder = self.ours.config.img_context_token_id
        values = json.loads((self.options.model / "config.json").read_text())["llm_config"]
        self.theirs = language_of(self.ours, values)
        return {
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "batch": self.options.batch,
            "attention": self.theirs.config._attn_implementation,
            "pictures": "embeddings of our tower, each encoded once",
        }

    async def clear(self) -> None:
        self._encoded.clear()

    async def ask(self, request: Request) -> Answer:
        waiting = Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await waiting.answered

    async def _run(self) -> None:
        await asyncio.sleep(0.002)  # users who come at the same time share a batch
        while self._waiting:
            self._waiting = [w for w in self._waiting if not w.answered.done()]  # cancelled ones
            if not self._waiting:
                return
            oldest = self._waiting[0].request.prompt_tokens
            near = sorted(self._waiting[1:], key=lambda w: abs(w.request.prompt_tokens - oldest))
            batch = [self._waiting[0], *near[: self.options.batch - 1]]
            self._waiting = [w for w in self._waiting if w not in batch]
            try:
                first = await asyncio.to_thread(self._generate, [w.request for w in batch])
            except Exception as error:
                for w in batch:
                    if not w.answered.done():
                        w.answered.set_exception(error)
                raise
            for w in batch:
                if not w.answered.done():  # the limit may have cancelled it meanwhile
                    w.answered.set_result(Answer(w.request.output_tokens, first))

    @torch.inference_mode()
    def _generate(self, requests: list[Request]) -> float:
        """When the first tokens of the batch were chosen."""
        noted = FirstToken()
        self.generate(requests, noted)
        return noted.at

    def generate(self, requests: list[Request], *processors: LogitsProcessor) -> list[list[int]]:
        rows = [self._embed(request) for request in requests]
        longest = max(len(row) for row in rows)
        embeddings = rows[0].new_zeros(len(rows), longest, rows[0].shape[1])
        mask = torch.zeros(len(rows), longest, dtype=torch.int64)
        for i, row in enumerate(rows):
            embeddings[i, longest - len(row) :] = row
            mask[i, longest - len(row) :] = 1
        count = max(request.output_tokens for request in requests)
        ids = self.theirs.generate(
            inputs_embeds=embeddings, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count,
            pad_token_id=0, eos_token_id=None, logits_processor=LogitsProcessorList(processors),
        )  # fmt: skip
        return [row[: r.output_tokens] for row, r in zip(ids.tolist(), requests, strict=True)]

    def _embed(self, request: Request) -> Tensor:
        for path in request.images:
            if path not in self._encoded:
                picture = self.processor(self._pictures.read(path))
                self._encoded[path] = self.ours.encode_images(picture.pixel_values).tokens.flatten(0, 1)
        ids = torch.tensor([request.expanded(self.placeholder)])
        pictures = [self._encoded[path] for path in request.images]
        return self.ours.embed(ids, torch.cat(pictures) if pictures else None)[0]

    async def settle(self) -> None:
        if self._running is not None:
            await self._running

    async def close(self) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    asyncio.run(Worker(Generate(parser.parse_args())).serve())


if __name__ == "__main__":
    main()
