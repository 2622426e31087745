"""`holotron look`: what a checkpoint looks at on a screenshot, asked as the agent asks it."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image

from holotron.contract.contract import Contract, get_contract
from holotron.contract.conversation import Conversation, Screenshot, Turn
from holotron.contract.policy import ContractError, PolicyError
from holotron.contract.step import Step
from holotron.engine import LLM, EngineError, ModelLoadError, SamplingParams, StructuredOutputs
from holotron.engine.outputs import RequestOutput
from holotron.engine.sequence import Sequence as Request
from holotron.model.attention_map import AttentionMap, attention_layers, attention_map
from holotron.model.pictures import rgb_pixels
from holotron.report.attention import Panel, attention_panel, pointer_panel, shares, write_attention
from holotron.report.readable import tool_call_text
from holotron.serving.policy import AgentSettings

At = Literal["prompt", "point"]
_X = re.compile(rb'"x":\s*(\d)')


@dataclass(slots=True)
class Look:
    """What was looked at, and from where. `tokens` is the prompt's length, `step` the reply if one was written."""

    model: str
    task: str
    screenshot: Screenshot
    picture: Image.Image
    at: At
    tokens: int
    seen: AttentionMap
    cells: int | None  # of the grounding head, per side of an image token
    layers: list[tuple[int, ...]]  # of each panel
    step: Step | None = None
    point: tuple[float, float] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def points(self) -> bool:
        """Whether the grounding head has a say here: it is trained at the token before a coordinate alone."""
        return self.at == "point" and self.seen.pointer is not None


def look(
    picture: Path, task: str, model: Path, *, at: str = "prompt", layer: str = "last", contract: str | None = None
) -> Look:
    """Show the checkpoint one screenshot and one task in its contract's words, and map the attention of one token.

    `at` "prompt" is the last token of the prompt, "point" the one before the x of the click that the model writes.
    `layer` is last, all, mean, or a place in the layer pattern. Raises PolicyError for a model that cannot be looked
    at, ConfigError, ContractError for a reply without a click, ValueError for what cannot be read or is unknown.
    """
    if at not in get_args(At):
        raise ValueError(f"--at is {at!r}; it is one of {', '.join(get_args(At))}")
    screenshot, image = read_screenshot(picture)
    llm, settings = _load(model)
    layers = chosen_layers(layer, attention_layers(llm.model.config))
    speaks = get_contract(contract or settings.contract, images_kept=settings.images_kept)
    request = _request(llm, speaks, settings, Conversation(task, [Turn(screenshot)]))
    notes = _notes(llm, settings, screenshot, len(request.prompt))
    prompt, images, step, point = list(request.prompt), request.images, None, None
    if at == "point":
        reply = _write(llm, request)
        prompt += before_x(llm, reply)
        step = speaks.parse(reply.outputs[0].text)
        point = speaks.point(step.tool_call, screenshot)
    seen = attention_map(llm.model, prompt, images)
    head = llm.model.grounding_head
    return Look(
        str(model), task, screenshot, image, "point" if step else "prompt", len(prompt), seen,
        head.config.cells if head else None, layers, step, point, notes,
    )  # fmt: skip


def read_screenshot(path: Path) -> tuple[Screenshot, Image.Image]:
    """The file as the agent would have it from a browser: PNG, upright, without transparency. Raises ValueError."""
    try:
        image = Image.fromarray(rgb_pixels(path.read_bytes()).numpy())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Screenshot(buffer.getvalue(), *image.size, *image.size), image


def chosen_layers(wanted: str, there: Sequence[int]) -> list[tuple[int, ...]]:
    """Which of the attention layers `there` each panel shows. Raises ValueError."""
    if wanted == "all":
        return [(layer,) for layer in there]
    if wanted == "mean":
        return [tuple(there)]
    if wanted == "last":
        return [(there[-1],)]
    if wanted.isdecimal() and int(wanted) in there:
        return [(int(wanted),)]
    raise ValueError(
        f"--layer is {wanted!r}; the layers that attend are {', '.join(map(str, there))}, or say last, mean or all"
    )


def draw(found: Look, out: Path) -> Path:
    """The PNG: a panel for each choice of layers, and one for the grounding head where it has a say."""
    panels: list[Panel] = []
    for layers in found.layers:
        which = f"layer {layers[0]}" if len(layers) == 1 else f"mean of layers {', '.join(map(str, layers))}"
        panels.append(attention_panel(found.seen, layers, f"Attention, {which}", point=found.point))
    if found.points and found.cells is not None:
        panels.append(pointer_panel(found.seen, found.cells, "Grounding head", point=found.point))
    where = "the last token of the prompt"
    if found.step is not None:
        call = tool_call_text(found.step.tool_call.model_dump(mode="json"), places=False)
        where = f"the token before the x of its reply, which was to {call} (+)"
    heads = found.seen.mass.shape[1]
    below = f"What {found.model} attends to from {where}; mean of {heads} heads"
    if found.seen.images[-1].thumbnail:
        below += "; tiles and thumbnail added up"
    return write_attention(out, found.picture, panels, found.task, below)


def as_json(found: Look, out: Path) -> str:
    """One object: shares of attention by layer and head, the strongest tokens with their boxes, the pointer."""
    seen = found.seen
    values: dict[str, Any] = {
        "model": found.model, "task": found.task, "picture": str(out), "at": found.at,
        "width": found.screenshot.width, "height": found.screenshot.height,
        "prompt_tokens": found.tokens, "image_tokens": seen.images[-1].num_tokens,
        "panels": [_panel_values(seen, layers) for layers in found.layers],
        "notes": found.notes,
    }  # fmt: skip
    if found.step is not None:
        values["step"] = found.step.model_dump(mode="json")
        values["point"] = found.point
    if found.points and found.cells is not None:
        values["pointer"] = _strongest(pointer_panel(seen, found.cells, ""), "cell")
    return json.dumps(values, ensure_ascii=False)


def summary(found: Look) -> list[str]:
    """A line for each panel, for a person."""
    lines = []
    for layers in found.layers:
        parts = ", ".join(f"{100 * part:.1f} % on {name}" for name, part in shares(found.seen, layers).items())
        lines.append(f"layer {', '.join(map(str, layers))}: {parts}")
    return lines + [f"note: {note}" for note in found.notes]


def _panel_values(seen: AttentionMap, layers: tuple[int, ...]) -> dict[str, Any]:
    panel = attention_panel(seen, layers, "")
    by_head = seen.on_image()[seen.rows(layers)].sum(-1)
    return {
        "layers": list(layers),
        "shares": dict(panel.shares),
        "picture_by_head": [[round(v, 6) for v in row] for row in by_head.tolist()],
        "strongest": _strongest(panel, "token"),
    }


def _strongest(panel: Panel, name: str) -> list[dict[str, Any]]:
    return [
        {name: i, "mass": float(panel.mass[i]), "box": [round(v, 3) for v in panel.boxes[i].tolist()]}
        for i in panel.strongest()
    ]


def _load(model: Path) -> tuple[LLM, AgentSettings]:
    if not model.is_dir():
        raise PolicyError(f"{model} is no checkpoint folder; attention is read from weights, not from an endpoint")
    try:
        # how long a prompt may be in service does not matter here: it is noted, and looked at all the same
        llm = LLM(model, max_model_len=sys.maxsize)
    except ModelLoadError as error:
        raise PolicyError(str(error)) from error
    if llm.model.vision_model is None:
        raise PolicyError(f"{model} has no vision tower: it reads text alone and cannot look at a screenshot")
    return llm, AgentSettings.read(model)


def _request(llm: LLM, contract: Contract, settings: AgentSettings, conversation: Conversation) -> Request:
    """What `EnginePolicy` sends at its first attempt."""
    params = SamplingParams(
        max_tokens=settings.max_tokens, structured_outputs=StructuredOutputs(json=contract.schema())
    )
    return llm.prepare_chat(contract.messages(conversation), params, {"enable_thinking": False})


def _write(llm: LLM, request: Request) -> RequestOutput:
    llm.add_request(request)
    done: list[RequestOutput] = []
    while llm.has_unfinished:
        done += llm.step()
    if done[0].error is not None:
        raise EngineError(done[0].error)
    return done[0]


def before_x(llm: LLM, reply: RequestOutput) -> list[int]:
    """The reply's tokens up to the one that begins its x. Raises ContractError for a reply without a place."""
    made, data, ends = reply.outputs[0], b"", []
    for token in made.token_ids:
        data += llm.vocabulary.token_bytes[token]
        ends.append(len(data))
    found = _X.search(data)
    if found is None or made.finish_reason != "stop":
        cut = "was cut off" if made.finish_reason != "stop" else "has no place to click"
        raise ContractError(f"the model's reply {cut}: {made.text[:200]!r}; look with --at prompt", raw_text=made.text)
    return made.token_ids[: next(i for i, end in enumerate(ends) if end > found.start(1))]


def _notes(llm: LLM, settings: AgentSettings, screenshot: Screenshot, tokens: int) -> list[str]:
    notes = []
    limit = llm.model.config.language.max_position_embeddings
    if tokens >= limit:
        notes.append(f"the prompt has {tokens} tokens and the checkpoint serves {limit}: an agent would be refused")
    size = (screenshot.width, screenshot.height)
    if settings.viewport is not None and settings.viewport != size:
        known = "{} x {}".format(*settings.viewport)
        notes.append(
            f"this checkpoint was trained on pages of {known} pixels, the screenshot has {size[0]} x {size[1]}"
        )
    return notes
