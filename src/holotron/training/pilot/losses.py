"""The pilot's losses: reply tokens, pointer, characters; and, to compare, attention supervised as a pointer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holotron.model.grounding import GroundingHead
from holotron.model.modeling import EncodedImages, HolotronForConditionalGeneration
from holotron.training.pilot.samples import CLASSES, IGNORE, TOKEN, Example, Question, cell_targets


@dataclass(frozen=True, slots=True)
class Weights:
    """Of each loss beside the reply's cross-entropy (1). `bins` scales the coordinate tokens inside it."""

    pointer: float = 1.0
    characters: float = 1.0
    bins: float = 0.2
    attention: float = 0.0
    blank: float = 0.1


class CharacterHead(nn.Module):
    """Reads the character in each 8 x 4 pixel cell from the tower's features alone; not exported."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 2 * CLASSES)

    def forward(self, features: Tensor, rows: int) -> Tensor:
        """features (n, rows * columns, F) -> logits (n, rows, 2 * columns, CLASSES)."""
        return self.linear(features).unflatten(1, (rows, -1)).unflatten(-1, (2, CLASSES)).flatten(2, 3)


def character_loss(logits: Tensor, labels: Tensor, blank: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean weighted cross-entropy, and (right, all) counts over cells that hold a character."""
    weight = logits.new_ones(CLASSES)
    weight[0] = blank
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), weight=weight, ignore_index=IGNORE)
    letters = labels > 0
    right = (logits.argmax(-1) == labels) & letters
    return loss, right.sum(), letters.sum()


class AttentionProbe:
    """Catches q and k of the last attention layer, to supervise where one token looks."""

    def __init__(self, model: HolotronForConditionalGeneration) -> None:
        kinds = model.config.language.hybrid_override_pattern
        mixer: Any = model.language_model.backbone.layers[kinds.rindex("*")].mixer
        self.config = model.config.language
        self.q, self.k = torch.empty(0), torch.empty(0)
        mixer.q_proj.register_forward_hook(lambda m, i, out: setattr(self, "q", out))
        mixer.k_proj.register_forward_hook(lambda m, i, out: setattr(self, "k", out))

    def scores(self, at: Tensor, where: Tensor) -> Tensor:
        """Log attention mass (questions, image tokens), mean over heads, of token `at` on tokens `where`."""
        size, heads = self.config.head_dim, self.config.num_attention_heads
        rows = torch.arange(len(at))
        q = self.q[rows, at].unflatten(-1, (heads, size))
        k = self.k[rows[:, None], where].unflatten(-1, (-1, size))
        k = k.repeat_interleave(heads // k.shape[2], dim=2)
        mass = (torch.einsum("bhd,bthd->bht", q, k) / math.sqrt(size)).softmax(-1).mean(1)
        return (mass + 1e-9).log()


def forward_questions(
    model: HolotronForConditionalGeneration,
    encoded: EncodedImages,
    owners: list[int],
    questions: list[Question],
    weights: Weights,
    probe: AttentionProbe | None = None,
) -> dict[str, Tensor]:
    """Summed losses and counts over questions; owners[i] is the image that question i is about."""
    lengths = torch.tensor([len(q.ids) for q in questions])
    ids = torch.full((len(questions), int(lengths.max())), int(model.config.pad_token_id))
    for row, q in enumerate(questions):
        ids[row, : len(q.ids)] = torch.tensor(q.ids)
    hidden = model.language_model(model.embed(ids, encoded.tokens[owners].flatten(0, 1)))
    sums = reply_loss(model, hidden, questions, weights.bins)
    pointing = [row for row, q in enumerate(questions) if q.point > 0]
    if not pointing:
        return sums
    rows = torch.tensor(pointing)
    at = torch.tensor([questions[r].point - 1 for r in pointing])
    tokens = encoded.tokens.shape[1]
    first = torch.tensor([questions[r].ids.index(int(model.config.img_context_token_id)) for r in pointing])
    where = first[:, None] + torch.arange(tokens)
    cells_wide = encoded.columns * 2
    cells_high = encoded.features.shape[1] // cells_wide
    target = torch.stack([cell_targets(questions[r].boxes, cells_high, cells_wide) for r in pointing])
    head = model.grounding_head
    if head is not None and weights.pointer:
        image_rows = torch.tensor([owners[r] for r in pointing])
        scores = pointer_scores(head, encoded, hidden, rows, at, where, image_rows)
        sums["pointer"] = -(target * scores.log_softmax(-1)).sum() * weights.pointer
        best = scores.argmax(-1)
        sums["hits"] = (target.gather(1, best[:, None]) > 0).sum()
    if probe is not None and weights.attention:
        grid = target.view(len(pointing), cells_high // 2, 2, cells_wide // 2, 2).sum((2, 4)).flatten(1)
        probe.q, probe.k = probe.q[rows], probe.k[rows]
        sums["attention"] = -(grid * probe.scores(at, where)).sum() * weights.attention
    sums["points"] = torch.tensor(len(pointing))
    return sums


def pointer_scores(
    head: GroundingHead,
    encoded: EncodedImages,
    hidden: Tensor,
    rows: Tensor,
    at: Tensor,
    where: Tensor,
    images: Tensor,
) -> Tensor:
    """Logits over cells (questions, cells) of the states at `at`, keys from the states at `where`."""
    keys = head.keys(encoded.features[images], hidden[rows[:, None], where], encoded.columns)
    scores: Tensor = head.scores(hidden[rows, at].unsqueeze(1), keys).squeeze(1)
    return scores


def reply_loss(
    model: HolotronForConditionalGeneration, hidden: Tensor, questions: list[Question], bins: float
) -> dict[str, Tensor]:
    """Cross-entropy summed over reply tokens, coordinate tokens scaled by `bins`; counts of exact replies."""
    rows = [row for row, q in enumerate(questions) for _ in range(len(q.ids) - q.reply)]
    spots = [i for q in questions for i in range(q.reply, len(q.ids))]
    labels = torch.tensor([t for q in questions for t in q.ids[q.reply :]])
    logits = model.language_model.lm_head(hidden[rows, [s - 1 for s in spots]])
    losses = F.cross_entropy(logits, labels, reduction="none")
    first = min((model.config.coordinate_tokens or {"x": 1 << 30}).values())
    coordinate = labels >= first
    right = (logits.argmax(-1) == labels) | coordinate
    wrong = torch.zeros(len(questions)).index_add_(0, torch.tensor(rows), (~right).float())
    coordinates_right = ((logits.argmax(-1) == labels) & coordinate).sum()
    return {
        "reply": (losses * torch.where(coordinate, bins, 1.0)).sum(),
        "exact": (wrong == 0).sum(),
        "bins_right": coordinates_right,
        "bins": coordinate.sum(),
    }


def pad_images(examples: list[Example], pixels: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One batch (n, 3, H, W) and its character labels; all screenshots must have one size."""
    sizes = {(-(-e.height // TOKEN), -(-e.width // TOKEN)) for e in examples}
    if len(sizes) != 1:
        raise ValueError(f"a batch mixes screenshots of different sizes: {sorted(sizes)}")
    return torch.cat(pixels), torch.stack([e.characters for e in examples])
