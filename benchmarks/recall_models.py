"""The tiny models of the recall suite: alike but for which of their four mixers are attention."""

from __future__ import annotations

from dataclasses import dataclass

from recall_tasks import COLOURS, LABELS, Batch, Task
from torch import Tensor, nn

from holotron.model.config import HolotronConfig
from holotron.model.modeling import HolotronForConditionalGeneration


@dataclass(frozen=True, slots=True)
class Mixers:
    """The mixers of a model, in the letters of its layer pattern, and the state size N of the Mamba ones."""

    name: str
    pattern: str
    state: int = 16


MODELS = {
    m.name: m
    for m in (
        Mixers("0of4", "MMMM"), Mixers("0of4-N64", "MMMM", 64), Mixers("1of4", "MM*M"), Mixers("2of4", "M*M*"),
        Mixers("4of4", "****"),
    )
}  # fmt: skip


def build(task: Task, mixers: Mixers, width: int) -> HolotronForConditionalGeneration:
    """Four mixers and no MLP: attention of 4 query and 2 KV heads, Mamba-2 of 4 heads, near equal in parameters."""
    language = {
        "vocab_size": task.vocabulary, "hidden_size": width, "hybrid_override_pattern": mixers.pattern,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 2, "intermediate_size": 2 * width,
        "mamba_num_heads": 4, "mamba_head_dim": width // 2, "ssm_state_size": mixers.state, "n_groups": 1,
        "chunk_size": 32,
    }  # fmt: skip
    if not task.pictures:
        return HolotronForConditionalGeneration(HolotronConfig(llm_config=language))
    config = HolotronConfig(
        llm_config=language,
        vision_config={"tower": "conv", "channels": [16, 32, 48], "blocks": [1, 1]},
        patch_size=8,
        projector_hidden_size=2 * width,
        img_context_token_id=task.vocabulary - 1,
    )
    return HolotronForConditionalGeneration(config)


class Learner(nn.Module):
    """The model and, for tasks with pictures, a reading head that only training needs.

    The head says which label and colour an image token covers. Without it the tower learns the letters from the
    answers alone, which takes longer than all the rest, and the runs would compare eyes instead of memories.
    """

    def __init__(self, task: Task, mixers: Mixers, width: int) -> None:
        super().__init__()
        self.model = build(task, mixers, width)
        self.reading = nn.Linear(width, len(LABELS) + len(COLOURS)) if task.pictures else None

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits at the questions (n, vocabulary), their answers (n,), and scores of image tokens or None."""
        tokens = None if batch.pixels is None else self.model.encode_images(batch.pixels).tokens.flatten(0, 1)
        hidden = self.model.language_model(self.model.embed(batch.ids, tokens))
        asked = batch.labels[:, 1:] >= 0
        logits = self.model.language_model.lm_head(hidden[:, :-1][asked])
        return logits, batch.labels[:, 1:][asked], self.reading(tokens) if self.reading and tokens is not None else None
