"""Where a model looks: how much attention one token pays to every token before it, and where on the screen that is.

Attention layers alone are shown. Mamba layers carry what a picture said in their state, and no map tells which part
of a picture it came from: little mass on the picture does not mean that the model did not read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.modeling import EncodedImages, HolotronForConditionalGeneration
from holotron.model.processed_image import ProcessedImage


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMap:
    """The attention of the token at `query` in every attention layer, by head, on the CPU.

    `mass` is float32 (layers, heads, tokens) in the order of `layers`, which are places in the layer pattern. A row
    sums to 1 and is 0 behind the query. `places[i]` int64 are the positions of the tokens of `images[i]`.
    `pointer` float32 (cells of the newest image,) sums to 1: where the grounding head would click if a coordinate were
    written next; None without such a head. Its cells are those of `cell_boxes`.
    """

    layers: tuple[int, ...]
    mass: Tensor
    query: int
    images: tuple[ProcessedImage, ...]
    places: tuple[Tensor, ...]
    pointer: Tensor | None = None

    def on_image(self, image: int = -1) -> Tensor:
        """float32 (layers, heads, image tokens): what falls on one picture."""
        return self.mass[:, :, self.places[image]]

    def heat(self, image: int = -1, layers: Sequence[int] | None = None) -> Tensor:
        """float32 (image tokens,): mean over heads and over these layers; by default the last attention layer."""
        return self.on_image(image)[self.rows(layers)].mean(dim=(0, 1))

    def text_mass(self, layers: Sequence[int] | None = None) -> float:
        """What falls on no picture, mean over heads and layers as `heat` has it."""
        rows = self.mass[self.rows(layers)].mean(dim=(0, 1))
        rows[torch.cat([*self.places, torch.empty(0, dtype=torch.int64)])] = 0
        return float(rows.sum())

    def rows(self, layers: Sequence[int] | None) -> list[int]:
        """Where these layers stand in `mass`. Raises ValueError for a layer that does not attend."""
        chosen = self.layers[-1:] if layers is None else tuple(layers)
        wrong = [layer for layer in chosen if layer not in self.layers]
        if wrong or not chosen:
            there = ", ".join(str(layer) for layer in self.layers)
            raise ValueError(
                f"layer {wrong[0] if wrong else '(none)'} has no attention; the layers that do are {there}"
            )
        return [self.layers.index(layer) for layer in chosen]


@torch.no_grad()
def attention_map(
    model: HolotronForConditionalGeneration, ids: Sequence[int], images: Sequence[ProcessedImage], query: int = -1
) -> AttentionMap:
    """What the token at position `query` of a prompt attends to; by default the last, before the next is written.

    `ids` are the prompt's tokens with every image placeholder as long as its image (`image_tokens.expand_images`),
    `images` the pictures in their order. Raises ConfigError for a model without attention layers or, where there are
    images, without a vision tower; ValueError where ids and images do not match or `query` is off the prompt.
    """
    prompt = torch.tensor([list(ids)], device=model.device)
    at = query + len(ids) if query < 0 else query
    if not 0 <= at < len(ids):
        raise ValueError(f"query position {query} is outside the prompt of {len(ids)} tokens")
    encoded = [model.encode_images(i.pixel_values.to(model.device, model.dtype)) for i in images]
    tokens = torch.cat([e.tokens.flatten(0, 1) for e in encoded]) if encoded else None
    embeddings = model.embed(prompt, tokens)
    with capture(model, at) as seen:
        hidden: Tensor = model.language_model(embeddings)
    by_image: tuple[Tensor, ...] = ()
    if images:
        places = (prompt[0] == model.config.img_context_token_id).nonzero().flatten().cpu()
        by_image = torch.split(places, [image.num_tokens for image in images])
    pointer = None
    if images and model.grounding_head is not None:
        pointer = _pointer(model, encoded[-1], images[-1], hidden[0, by_image[-1]], hidden[0, at])
    return AttentionMap(tuple(seen.layers), seen.mass(len(ids)), at, tuple(images), by_image, pointer)


def attention_layers(config: HolotronConfig) -> list[int]:
    """Places of the attention layers in the layer pattern. Raises ConfigError where there is none."""
    pattern = config.language.hybrid_override_pattern
    layers = [i for i, kind in enumerate(pattern) if kind == "*"]
    if not layers:
        raise ConfigError(f"the layer pattern {pattern!r} has no attention layer (*): nothing attends")
    return layers


@dataclass(slots=True)
class Captured:
    """Queries (heads, size) and keys (tokens, kv heads, size) of each attention layer, from one forward pass."""

    layers: list[int]
    query: int
    head_dim: int
    q: dict[int, Tensor] = field(default_factory=dict)
    k: dict[int, Tensor] = field(default_factory=dict)

    def mass(self, length: int) -> Tensor:
        """float32 (layers, heads, length): softmax over j <= query of q . k_j / sqrt(size), on the CPU."""
        rows = []
        for layer in self.layers:
            q, k = self.q[layer].float(), self.k[layer].float()
            grouped = q.reshape(k.shape[1], -1, self.head_dim)  # (kv heads, queries of each, size)
            scores = torch.einsum("gqd,tgd->gqt", grouped, k) / math.sqrt(self.head_dim)
            row = scores.softmax(-1).flatten(0, 1).cpu()
            rows.append(torch.nn.functional.pad(row, (0, length - row.shape[1])))
        return torch.stack(rows)


@contextmanager
def capture(model: HolotronForConditionalGeneration, query: int) -> Iterator[Captured]:
    """While it lasts, a forward pass over one whole prompt leaves here what its attention at `query` is computed from.

    Outputs are not changed, and nothing stays behind on the model. Raises ConfigError where no layer attends.
    """
    language, layers = model.config.language, attention_layers(model.config)
    seen = Captured(layers, query, language.head_dim)

    def keep(store: dict[int, Tensor], layer: int, wanted: slice | int) -> Any:
        def hook(module: torch.nn.Module, given: Any, out: Tensor) -> None:
            store[layer] = _by_head(out.detach()[0, wanted], language.head_dim)

        return hook

    hooks = []
    try:
        for layer in layers:
            mixer: Any = model.language_model.backbone.layers[layer].mixer
            hooks.append(mixer.q_proj.register_forward_hook(keep(seen.q, layer, query)))
            hooks.append(mixer.k_proj.register_forward_hook(keep(seen.k, layer, slice(query + 1))))
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _by_head(out: Tensor, size: int) -> Tensor:
    return out.reshape(*out.shape[:-1], -1, size)


def _pointer(
    model: HolotronForConditionalGeneration,
    encoded: EncodedImages,
    image: ProcessedImage,
    above: Tensor,
    query: Tensor,
) -> Tensor:
    """The grounding head's choice of a cell, those whose centre lies in padding left out. above (image tokens, D)."""
    head = model.grounding_head
    assert head is not None
    keys = head.keys(encoded.features, above.view(len(encoded.features), -1, above.shape[-1]), encoded.columns)
    scores = head.scores(query.view(1, 1, -1), keys.flatten(0, 1).unsqueeze(0)).flatten().float().cpu()
    padded = replace(
        image,
        width=round(image.canvas_width / image.scale[0]),
        height=round(image.canvas_height / image.scale[1]),
    )
    boxes = cell_boxes(padded, head.config.cells)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    inside = (centres < torch.tensor([image.width, image.height], dtype=torch.float64)).all(dim=1)
    return scores.masked_fill(~inside, -torch.inf).softmax(-1)


def cell_boxes(image: ProcessedImage, cells: int) -> Tensor:
    """`ProcessedImage.token_boxes` for the grounding head's cells, `cells` per side of an image token."""
    across, down = image.tokens_per_tile
    finer = replace(image, tokens_per_tile=(across * cells, down * cells), num_tokens=image.num_tokens * cells**2)
    return finer.token_boxes()


def spread(boxes: Tensor, mass: Tensor, size: tuple[int, int], raster: tuple[int, int]) -> Tensor:
    """float64 (rows, columns): how much mass falls on each pixel of a raster over the picture.

    Each token's mass lies evenly over its box (x0, y0, x1, y1 in pixels of a picture of `size`), and what lies on top
    of each other adds up: of a tile and the thumbnail, too. The raster's sum is the mass of all boxes that are not
    empty. `size` and `raster` are (width, height).
    """
    scale = torch.tensor([raster[0] / size[0], raster[1] / size[1]] * 2, dtype=torch.float64)
    x0, y0, x1, y1 = (boxes.double() * scale).unbind(1)
    area = (x1 - x0) * (y1 - y0)
    density = torch.where(area > 0, mass.double() / area.clamp(min=1e-300), 0.0)
    return (_overlap(y0, y1, raster[1]) * density[:, None]).T @ _overlap(x0, x1, raster[0])


def _overlap(low: Tensor, high: Tensor, count: int) -> Tensor:
    """(n, count): how much of the interval [i, i + 1] lies in [low, high]."""
    left = torch.arange(count, dtype=low.dtype)
    return (torch.minimum(high[:, None], left + 1) - torch.maximum(low[:, None], left)).clamp(min=0)
