"""vLLM's CPU backend behind the worker, run by the Python of an environment that holds vLLM.

With our plugin installed there it serves the checkpoint itself, pictures included. With `--text-only` it serves the
checkpoint's language model alone, and every place of a picture is an ordinary token: as many tokens, no work for
pictures at all, which favours this side. Prefix caching is off: on, vLLM 0.32 crashes on a CPU with this architecture.
Encoded pictures are remembered, as vLLM does by itself. Time to the first token is that of the first piece that comes.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import os
import time
from pathlib import Path
from typing import Any

from holotron.bench.replay import Answer, Request

from worker import Pictures, Worker  # isort: skip


class Vllm:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._pictures = Pictures()
        self._numbers = itertools.count()
        self._engine: Any = None

    async def start(self) -> dict[str, Any]:
        import torch
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        pictures = {"image": self.options.images, "video": 0, "audio": 0}
        arguments = AsyncEngineArgs(
            model=str(self.options.model),
            dtype="float32",
            enable_prefix_caching=False,
            max_model_len=self.options.max_model_len,
            max_num_seqs=self.options.max_batch,
            max_num_batched_tokens=self.options.step_tokens,
            enforce_eager=self.options.eager,
            skip_tokenizer_init=self.options.text_only,
            **({} if self.options.text_only else {"limit_mm_per_prompt": pictures}),
        )
        self._engine = AsyncLLM.from_engine_args(arguments)
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "prefix_caching": False,
            "pictures": "ordinary tokens, no vision work" if self.options.text_only else "through the plugin",
        }

    async def clear(self) -> None:
        for name in ("reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"):
            if hasattr(self._engine, name):
                await getattr(self._engine, name)()

    async def ask(self, request: Request) -> Answer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, min_tokens=request.output_tokens, max_tokens=request.output_tokens, ignore_eos=True,
            detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        first, tokens, prompt_tokens = 0.0, 0, 0
        async for output in self._engine.generate(self._prompt(request), params, f"step-{next(self._numbers)}"):
            first = first or time.perf_counter()
            tokens += len(output.outputs[0].token_ids)
            prompt_tokens = len(output.prompt_token_ids or []) or prompt_tokens
        if tokens != request.output_tokens or prompt_tokens != request.prompt_tokens:
            wanted = f"{request.prompt_tokens} + {request.output_tokens}"
            raise RuntimeError(f"vLLM saw {prompt_tokens} + {tokens} tokens, the request has {wanted}")
        return Answer(tokens, first)

    def _prompt(self, request: Request) -> dict[str, Any]:
        if self.options.text_only:
            return {"prompt_token_ids": request.expanded(self.options.placeholder)}
        from PIL import Image

        pictures = [Image.open(io.BytesIO(self._pictures.read(path))).convert("RGB") for path in request.images]
        return {"prompt_token_ids": request.token_ids, "multi_modal_data": {"image": pictures}}

    async def settle(self) -> None:
        """A request whose reading is cancelled is aborted at once."""

    async def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text-only", action="store_true")
    parser.add_argument("--placeholder", type=int, default=0)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--eager", action="store_true")
    asyncio.run(Worker(Vllm(parser.parse_args())).serve())


if __name__ == "__main__":
    main()
