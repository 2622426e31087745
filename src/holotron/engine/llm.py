"""The engine's front: `LLM.generate`, `LLM.chat`, and the step by which many requests advance together."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from holotron.engine.checkpoint import build_image_processor, find_folder, load_model, load_tokenizer, special_ids
from holotron.engine.errors import EngineError, ModelLoadError
from holotron.engine.grammar import Grammars
from holotron.engine.outputs import RequestOutput
from holotron.engine.pages import PagePool
from holotron.engine.pointer import Pointer
from holotron.engine.prefix_tree import Key, PrefixTree, prompt_key
from holotron.engine.prompts import Message, Prompt, read_messages, read_prompt
from holotron.engine.runner import Runner
from holotron.engine.sampling_params import SamplingParams
from holotron.engine.scheduler import Scheduler
from holotron.engine.sequence import Sequence
from holotron.engine.speculate import Lookup
from holotron.engine.vision_cache import VisionCache, image_hash, tile_hashes
from holotron.engine.vocabulary import Vocabulary
from holotron.model.flat import SavedState, StatePool
from holotron.model.image_tokens import expand_images
from holotron.model.images import ProcessedImage
from holotron.model.modeling import HolotronForConditionalGeneration
from holotron.model.pictures import Picture

_CLOSE = 16  # tokens: a snapshot so near to another is not worth its bytes
_RECENT = 8  # prompts that a new one is compared with, to find what it shares with other conversations


@dataclass(slots=True, frozen=True)
class Kept:
    """A sequence after some token: what the prefix tree keeps of it. The pages are shared, not copied."""

    state: SavedState
    pages: list[int]
    pointer: Pointer | None


class LLM:
    """A model with continuous batching. One thread adds, steps and aborts; any thread may prepare.

    `model` is a checkpoint folder, a hub id, or a model, which then needs its `tokenizer`. `max_batch` sequences run at
    once, `max_model_len` tokens is the most for prompt and reply together (default: the config's), `threads`
    the CPU threads of the whole process (default: as they are). A step computes about `step_tokens`. Memory, in bytes:
    `kv_bytes` for keys and values, `snapshot_bytes` for states kept after a request (0: no prefix is reused), which
    `snapshot_dtype` may round to 16 bits (the state of a running sequence is never rounded),
    `vision_bytes` for encoded tiles. `lookup_drafts` lets greedy replies guess ahead from what they hold already.
    Raises ModelLoadError.
    """

    def __init__(
        self,
        model: str | Path | HolotronForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast | None = None,
        *,
        max_batch: int = 32,
        max_model_len: int | None = None,
        threads: int | None = None,
        step_tokens: int = 2048,
        page_tokens: int = 64,
        kv_bytes: int = 2**30,
        snapshot_bytes: int = 2**29,
        snapshot_dtype: torch.dtype = torch.float32,
        vision_bytes: int = 2**28,
        skip_forced_tokens: bool = True,
        lookup_drafts: bool = True,
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
        language = model.config.language
        self.vocabulary = Vocabulary(tokenizer, language.vocab_size)
        self.special = special_ids(model, tokenizer, folder)
        self.vocabulary.stops = self.special.stop
        self.max_batch = max_batch
        longest = max_model_len or language.max_position_embeddings
        page_bytes = StatePool.page_bytes(language, page_tokens, model.dtype)
        most = 2 * max_batch * -(-longest // page_tokens)
        if page_bytes:
            pages = PagePool(min(kv_bytes // page_bytes, most), page_tokens)
        else:  # no layer of attention: a page of any length costs nothing
            pages = PagePool(max_batch + 2**16, longest)
        self.max_model_len = min(longest, pages.pages * page_tokens)
        self.pool = StatePool.create(language, max_batch, pages.pages, pages.page_tokens, model.dtype)
        self.scheduler = Scheduler(pages, max_batch, step_tokens)
        self.vision = VisionCache(vision_bytes)
        self._snapshot_dtype, wide = snapshot_dtype, snapshot_dtype.itemsize
        self._snapshot_bytes = language.state_bytes(wide, wide) + page_bytes  # the last page is seldom shared
        self.prefixes = self._empty_tree(snapshot_bytes)
        self._recent: deque[Key] = deque(maxlen=_RECENT)
        self._drafts = lookup_drafts
        self._barred = self.special.stop | self.vocabulary.specials
        self._grammars = Grammars(self.vocabulary)
        self._images = build_image_processor(model)
        self._runner = Runner(model, self.pool, self.vision, skip_forced=skip_forced_tokens)
        self._numbers = itertools.count()
        self._done: list[Sequence] = []

    def _empty_tree(self, budget: int) -> PrefixTree[Kept]:
        language = self.model.config.language
        per_token = 2.0 * sum(p.numel() for p in self.model.language_model.backbone.layers.parameters())
        heads = language.hybrid_override_pattern.count("*") * language.num_attention_heads
        return PrefixTree(
            budget,
            lambda kept: self.scheduler.pages.release(kept.pages),
            flops_per_token=per_token,
            flops_per_pair=4.0 * heads * language.head_dim,
        )

    @property
    def waiting(self) -> list[Sequence]:
        return self.scheduler.waiting

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler.running

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
        self.scheduler.add(sequence)
        return sequence.request_id

    def abort(self, request_id: str) -> bool:
        """Stop a request; the next step hands back what it had. False if it is not in the engine."""
        for sequence in (*self.waiting, *self.running):
            if sequence.request_id == request_id:
                sequence.finish_reason = "abort"
                return True
        return False

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self._done)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Advance what runs by a token each and read on in the prompts. Returns the requests that ended."""
        self._retire()  # what was aborted since the last step costs no forward pass
        for sequence in self.scheduler.admit(self._start, self.prefixes.evict_one):
            self._runner.begin(sequence)
        self._retire()
        planned = self.scheduler.plan(self.prefixes.evict_one)
        if planned:
            self._runner.step(planned)
            for sequence, _ in planned:
                if sequence.seen in sequence.borders:
                    self._remember(sequence)
        self._retire()
        done, self._done = self._done, []
        return [sequence.result() for sequence in done]

    def reset(self) -> None:
        """Forget all requests and snapshots, and whatever leaked, as after a failed step."""
        old = self.scheduler
        self._done.clear()
        self.scheduler = Scheduler(PagePool(old.pages.pages, old.pages.page_tokens), self.max_batch, old.step_tokens)
        self.scheduler.preemptions = old.preemptions
        counted, self.prefixes = self.prefixes.stats, self._empty_tree(self.prefixes.budget_bytes)
        self.prefixes.stats = replace(counted, snapshots=0, bytes=0)

    def stats(self) -> dict[str, float]:
        """What is in the engine now, and what it did since it was made."""
        pages, tree = self.scheduler.pages, self.prefixes.stats
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "preemptions": self.scheduler.preemptions,
            "kv_usage": 1 - pages.free / pages.pages if pages.pages else 0.0,
            "prefix_queries": tree.tokens_asked,
            "prefix_hits": tree.tokens_hit,
            "snapshots": tree.snapshots,
            "snapshot_bytes": tree.bytes,
            "tiles_requested": self.vision.requested,
            "tiles_encoded": self.vision.encoded,
        }

    def check_integrity(self) -> None:
        """Raises EngineError unless every slot, page and snapshot is free or has its owner."""
        held = [sequence.slot for sequence in self.running]
        slots = sorted([*self.scheduler.free_slots, *(slot for slot in held if slot is not None)])
        if slots != list(range(self.max_batch)):
            raise EngineError(f"slots free or held are {slots} of {self.max_batch}: a slot leaked")
        kept = [payload.pages for payload in self.prefixes.payloads()]
        self.scheduler.pages.check([*kept, *(sequence.pages for sequence in self.running)])
        self.prefixes.check(0)

    def _start(self, sequence: Sequence) -> None:
        """Put an admitted sequence where the longest usable snapshot left off, or at its beginning."""
        assert sequence.slot is not None
        key = self._key(sequence)
        found = self.prefixes.find(key, len(key) - 1)
        points = sequence.wants_pointer and Pointer.available(self.model)
        if found is not None and points and found.position > sequence.spans[-1][0] and found.payload.pointer is None:
            found = self.prefixes.find(key, sequence.spans[-1][0])  # the newest image has to be read again
        if found is None:
            self.pool.clear(sequence.slot)
        else:
            kept, size = found.payload, self.scheduler.pages.page_tokens
            whole, rest = divmod(found.position, size)
            self.scheduler.pages.share(kept.pages[:whole])
            sequence.pages = kept.pages[:whole]
            if rest:  # the page goes on differently in every sequence
                sequence.pages += self.scheduler.pages.allocate(1)
                self.pool.copy_page(kept.pages[whole], sequence.pages[whole])
            self.pool.restore(sequence.slot, kept.state)
            sequence.seen = found.position
            if points and found.position > sequence.spans[-1][0]:
                sequence.pointer = kept.pointer
            sequence.metrics.cached_tokens = min(found.position, len(sequence.prompt))
        sequence.metrics.state_bytes = self.model.config.language.state_bytes()
        if not sequence.metrics.queue_s:
            sequence.metrics.queue_s = time.perf_counter() - sequence.arrived
        sequence.borders = self._borders(sequence, key)
        self._recent.append(key)

    def _borders(self, sequence: Sequence, key: Key) -> list[int]:
        """Where later prompts may branch off: before the oldest picture, which a window of pictures drops next, after
        the newest, and where other conversations went different ways."""
        shared = max((_common(key, other) for other in self._recent), default=0)
        wanted = [shared]
        if sequence.spans:
            first, last = sequence.spans[0][0], sequence.spans[-1][1]
            tokens, special = sequence.tokens, self.special
            wanted.append(first - (first > 0 and tokens[first - 1] == special.image_start))
            wanted.append(last + (last < len(tokens) and tokens[last] == special.image_end))
        if any(other.digest == sequence.digest for other in self.waiting):
            wanted.append(len(sequence.tokens) - 1)
        borders: list[int] = []
        for border in sorted(set(wanted), reverse=True):
            near = borders and borders[-1] - border < _CLOSE
            if sequence.seen + _CLOSE <= border < len(sequence.tokens) and not near:
                borders.append(border)
        return borders[::-1]

    def _remember(self, sequence: Sequence) -> None:
        """Keep a snapshot of a sequence where it is."""
        key = self._key(sequence)[: sequence.seen]
        if self._snapshot_bytes > self.prefixes.budget_bytes or len(key) < _CLOSE or self.prefixes.touch(key):
            return
        assert sequence.slot is not None
        pages = self.scheduler.pages
        kept = Kept(
            self.pool.save(sequence.slot, self._snapshot_dtype),
            sequence.pages[: pages.pages_for(sequence.seen)],
            sequence.pointer,
        )
        pages.share(kept.pages)
        if not self.prefixes.insert(key, kept, self._snapshot_bytes):
            pages.release(kept.pages)

    def _key(self, sequence: Sequence) -> Key:
        output = np.array(sequence.tokens[len(sequence.prompt) :], dtype=np.int64)
        return np.concatenate([sequence.key, output])

    def _retire(self) -> None:
        """Take finished sequences out; those that ran through leave a snapshot for their conversation's next turn."""
        for sequence in [s for s in (*self.waiting, *self.running) if s.finish_reason is not None]:
            if sequence.slot is not None:
                sequence.metrics.kv_bytes = sequence.seen * self.model.config.language.kv_bytes_per_token(
                    self.model.dtype.itemsize
                )
                if sequence.finish_reason != "abort":
                    self._remember(sequence)
            self.scheduler.leave(sequence)
            sequence.encoded.clear()
            self._done.append(sequence)

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
        tiles = [tile_hashes(image.pixel_values) for image in images]
        hashes = [
            image_hash(keys, image.grid, (image.width, image.height)) for keys, image in zip(tiles, images, strict=True)
        ]
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
            key=prompt_key(prompt, image_token if images else None, hashes, counts),
            spans=_spans(prompt, image_token, counts),
            tiles=tiles,
            lookup=Lookup(self._barred) if self._drafts and params.temperature == 0 else None,
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


def _spans(prompt: list[int], image_token: int | None, counts: list[int]) -> list[tuple[int, int]]:
    """First and last-but-one place of each image's tokens; the tokens of one image follow each other."""
    if not counts:
        return []
    places = [place for place, token in enumerate(prompt) if token == image_token]
    ends = list(itertools.accumulate(counts))
    return [(places[end - count], places[end - 1] + 1) for end, count in zip(ends, counts, strict=True)]


def _common(first: Key, second: Key) -> int:
    """How many tokens two prompts begin with together."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def _paired(
    prompts: Many[Any], params: SamplingParams | Many[SamplingParams] | None
) -> Iterable[tuple[Any, SamplingParams | None]]:
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in prompts]
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling params")
    return list(zip(prompts, params, strict=True))
