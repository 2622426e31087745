"""From traces to requests: the tokens that a checkpoint's own template and tokenizer make of every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holotron.bench.replay import Request, shared_prefix
from holotron.bench.traces import TraceFolder
from holotron.model.chat import Chat
from holotron.model.config import ConfigError
from holotron.model.dialects import read_config
from holotron.model.hub import read_json
from holotron.model.image_tokens import expand_images
from holotron.model.processing import processor_of
from holotron.model.special_ids import read_special_ids


def build_requests(
    traces: TraceFolder,
    model: Path,
    images_kept: int | None,
    *,
    on_trace: Callable[[], None] | None = None,
) -> list[list[Request]]:
    """The requests of every trace, turn by turn, for the checkpoint folder `model`.

    `images_kept` is the window of screenshots, None an append-only history. Raises ConfigError for a folder without a
    vision tower or chat template.
    """
    chat = Chat.from_folder(model)
    special = read_special_ids(model, chat.tokenizer)
    processor = processor_of(read_config(read_json(model, "config.json")))
    if processor is None:
        raise ConfigError(f"{model} has no vision tower; traces are of screenshots")
    contract = traces.contract(images_kept)
    found: list[list[Request]] = []
    for number, trace in enumerate(traces.set.traces):
        requests = []
        for place, turn in enumerate(trace.turns):
            conversation = traces.conversation(trace, place, contract)
            ids = chat.prompt_ids(contract.messages(conversation), template_kwargs={"enable_thinking": False})
            live = trace.turns[max(0, place + 1 - images_kept) if images_kept else 0 : place + 1]
            requests.append(
                Request(
                    trace=number,
                    turn=place,
                    token_ids=expand_images(
                        ids, [1] * len(live), special.image, special.image_start, special.image_end
                    ),
                    images=[str(traces.path(t.image)) for t in live],
                    image_tokens=[processor.num_tokens(t.width, t.height) for t in live],
                    output_tokens=len(chat.tokenizer.backend_tokenizer.encode(turn.reply, add_special_tokens=False)),
                    think_s=turn.think_s,
                )
            )
        found.append(requests)
        if on_trace is not None:
            on_trace()
    return found


def least_computed_fraction(traces: list[list[Request]], placeholder: int) -> float:
    """What of all prompts lies behind the prefix shared with the user's step before: no engine that reuses prefixes
    of one user's history alone computes less. Pictures count as equal where their files are."""
    fresh = total = 0
    for trace in traces:
        before: list[int] = []
        for request in trace:
            names = iter(request.images)
            counts = iter(request.image_tokens)
            now: list[int] = []
            for token in request.token_ids:
                if token == placeholder:
                    now += [-1 - (hash(next(names)) & 0xFFFFFF)] * next(counts)
                else:
                    now.append(token)
            fresh += len(now) - shared_prefix(before, now)
            total += len(now)
            before = now
    return fresh / total
