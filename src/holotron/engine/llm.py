"""The engine's front: `LLM.generate`, `LLM.chat`, and the step by which many requests advance together."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from holotron.engine.checkpoint import build_image_processor, find_folder, load_model, load_tokenizer, special_ids
from holotron.engine.errors import EngineError, ModelLoadError
from holotron.engine.grammar import Grammars
from holotron.engine.outputs import RequestOutput
from holotron.engine.prompts import Message, Prompt, read_messages, read_prompt
from holotron.engine.runner import Runner
from holotron.engine.sampling_params import SamplingParams
from holotron.engine.sequence import Sequence
from holotron.engine.vocabulary import Vocabulary
from holotron.model.cache import HybridCache
from holotron.model.image_tokens import expand_images
from holotron.model.images import ProcessedImage
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.pictures import Picture

_MAX_PREFILL_TOKENS = 8192  # of one padded batch; a single longer prompt still runs, alone


class LLM:
    """A model with continuous batching. One thread adds, steps and aborts; any thread may prepare.

    `model` is a checkpoint folder, a hub id, or a model, which then needs its `tokenizer`. `max_batch` sequences run at
    once, `max_model_len` tokens is the most for prompt and reply together (default: the config's), `threads`
    the CPU threads of the whole process (default: as they are). Raises ModelLoadError.
    """

    def __init__(
        self,
        model: str | Path | HolotronForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast | None = None,
        *,
        max_batch: int = 32,
        max_model_len: int | None = None,
        threads: int | None = None,
        skip_forced_tokens: bool = True,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}; at least one sequence must run")
        if threads is not None:
            torch.set_num_threads(threads)
        folder = None
        if isinstance(model, str | Path):
            folder = find_folder(model)
            model = load_model(folder)
            tokenizer = tokenizer or load_tokenizer(folder)
        if tokenizer is None:
            raise ModelLoadError("a model given as an object needs its tokenizer beside it")
        self.model = model
        torch.nn.Module.eval(model)
        self.vocabulary = Vocabulary(tokenizer, model.config.language.vocab_size)
        self.special = special_ids(model, tokenizer, folder)
        self.vocabulary.stops = self.special.stop
        self.max_batch = max_batch
        self.max_model_len = max_model_len or model.config.language.max_position_embeddings
        self._grammars = Grammars(self.vocabulary)
        self._images = build_image_processor(model)
        self._runner = Runner(model, skip_forced=skip_forced_tokens)
        self._numbers = itertools.count()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._cache: HybridCache | None = None  # its rows are `running`, in order
        self._done: list[Sequence] = []

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        sampling_params: SamplingParams | Many[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Replies in the order of `prompts`: one prompt or a list of them (what one is: see `read_prompt`).

        Raises ValueError for a request that cannot be served, before any of them runs; EngineError.
        """
        one = isinstance(prompts, str | dict) or (bool(prompts) and isinstance(prompts[0], int))
        each: Any = [prompts] if one else prompts
        return self._run([self.prepare(p, s) for p, s in _paired(each, sampling_params)])

    def chat(
        self,
        messages: Many[Message] | Many[Many[Message]],
        sampling_params: SamplingParams | Many[SamplingParams] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation of OpenAI chat messages or a list of them."""
        each: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        pairs = _paired(each, sampling_params)
        return self._run([self.prepare_chat(m, s, chat_template_kwargs) for m, s in pairs])

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> Sequence:
        """A request ready to be added. Any thread may call it. Raises ValueError."""
        ids, pictures = read_prompt(prompt, self.vocabulary)
        return self._sequence(ids, pictures, params or SamplingParams())

    def prepare_chat(
        self,
        messages: Many[Message],
        params: SamplingParams | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Sequence:
        """As `prepare`."""
        ids, pictures = read_messages(messages, self.vocabulary, chat_template_kwargs)
        return self._sequence(ids, pictures, params or SamplingParams())

    def add_request(self, request: Sequence | Prompt, params: SamplingParams | None = None) -> str:
        """Queue a prepared request, or prepare and queue a prompt. Returns its id. Raises ValueError."""
        sequence = request if isinstance(request, Sequence) else self.prepare(request, params)
        self.waiting.append(sequence)
        return sequence.request_id

    def abort(self, request_id: str) -> bool:
        """Stop a request; the next step hands back what it had. False if it is not in the engine."""
        for sequence in self.waiting:
            if sequence.request_id == request_id:
                self.waiting.remove(sequence)
                sequence.finish_reason = "abort"
                self._done.append(sequence)
                return True
        for sequence in self.running:
            if sequence.request_id == request_id:
                sequence.finish_reason = "abort"
                return True
        return False

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self._done)

    def step(self) -> list[RequestOutput]:
        """Prefill what waits and fits, else decode one step of what runs. Returns the requests that ended."""
        self._retire()  # what was aborted since the last step costs no forward pass
        admitted = self._schedule()
        if admitted:
            fresh = self._runner.prefill(admitted)
            self._join(admitted, fresh)
        elif self._cache is not None:
            self._runner.decode(self.running, self._cache)
        self._retire()
        done, self._done = self._done, []
        return [sequence.result() for sequence in done]

    def reset(self) -> None:
        """Forget all requests, as after a failed step."""
        self.waiting.clear()
        self.running.clear()
        self._done.clear()
        self._cache = None

    def check_integrity(self) -> None:
        """Raises EngineError if sequences and cache rows do not match, as after a leak."""
        rows = [] if self._cache is None else self._cache.lengths.tolist()
        seen = [sequence.tokens_seen for sequence in self.running]
        if rows != seen or (self._cache is not None and not rows):
            raise EngineError(f"cache rows hold {rows} tokens, the running sequences {seen}: a slot leaked")
        if len(self.running) > self.max_batch:
            raise EngineError(f"{len(self.running)} sequences run, the limit is {self.max_batch}")

    def _schedule(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        longest = 0
        while self.waiting and len(self.running) + len(admitted) < self.max_batch:
            longest = max(longest, len(self.waiting[0].pending))
            if admitted and longest * (len(admitted) + 1) > _MAX_PREFILL_TOKENS:
                break
            admitted.append(self.waiting.popleft())
        return admitted

    @torch.inference_mode()
    def _join(self, admitted: list[Sequence], fresh: HybridCache) -> None:
        self._cache = fresh if self._cache is None else HybridCache.concatenate([self._cache, fresh])
        self.running += admitted

    @torch.inference_mode()
    def _retire(self) -> None:
        """Take finished sequences and their cache rows out of the batch."""
        keep = [row for row, sequence in enumerate(self.running) if sequence.finish_reason is None]
        if len(keep) == len(self.running) or self._cache is None:
            return
        for row, sequence in enumerate(self.running):
            if sequence.finish_reason is not None:
                sequence.metrics.kv_bytes = self._cache.kv_bytes(row)
                self._done.append(sequence)
        self.running = [self.running[row] for row in keep]
        self._cache = self._cache.select(keep) if keep else None

    def _sequence(self, ids: list[int], pictures: list[Picture], params: SamplingParams) -> Sequence:
        images = [self._process(picture, i) for i, picture in enumerate(pictures)]
        image_token: int | None = self.model.config.img_context_token_id
        counts = [image.num_tokens for image in images]
        prompt = expand_images(ids, counts, image_token, self.special.image_start, self.special.image_end)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with a reply it must stay within {self.max_model_len}"
            )
        wanted = params.structured_outputs
        seed = random.getrandbits(63) if params.seed is None else params.seed
        return Sequence(
            request_id=f"request-{next(self._numbers)}",
            prompt=prompt,
            images=images,
            params=params,
            vocabulary=self.vocabulary,
            constraint=None if wanted is None else self._grammars.constraint(wanted),
            generator=torch.Generator().manual_seed(seed),
            max_tokens=min(params.max_tokens, room),
        )

    def _process(self, picture: Picture, index: int) -> ProcessedImage:
        if self._images is None:
            raise ValueError("this checkpoint has no vision tower; it takes text only")
        try:
            return self._images(picture)
        except ValueError as error:
            raise ValueError(f"image {index}: {error}") from error

    def _run(self, sequences: list[Sequence]) -> list[RequestOutput]:
        if self.has_unfinished:
            raise EngineError("other requests are in the engine; use AsyncLLM to serve several callers")
        for sequence in sequences:
            self.add_request(sequence)
        found: dict[str, RequestOutput] = {}
        try:
            while self.has_unfinished:
                found.update((output.request_id, output) for output in self.step())
        except BaseException:
            self.reset()
            raise
        for output in found.values():
            if output.error is not None:
                raise EngineError(f"{output.request_id}: {output.error}")
        return [found[sequence.request_id] for sequence in sequences]


def _paired(
    prompts: Many[Any], params: SamplingParams | Many[SamplingParams] | None
) -> Iterable[tuple[Any, SamplingParams | None]]:
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in prompts]
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling params")
    return list(zip(prompts, params, strict=True))
