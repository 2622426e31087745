"""The whole model: vision tower -> pixel shuffle -> projector -> hybrid language model -> (grounding head)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from holotron.model.cache import HybridCache
from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.conv_tower import ConvTower, ConvTowerConfig
from holotron.model.grounding import GroundingConfig, GroundingHead
from holotron.model.language import LanguageModel
from holotron.model.projector import Projector, pixel_shuffle_v2
from holotron.model.radio import InputConditioner, RadioConfig, RadioTower


@dataclass(slots=True)
class EncodedImages:
    """What images became. `tokens` (n, rows*cols, hidden) for the language model; `features` (n, cells, F)."""

    tokens: Tensor
    features: Tensor
    columns: int  # image tokens in a row


def build_tower(config: HolotronConfig) -> ConvTower | RadioTower:
    values = dict(config.vision_config or {})
    kind = values.pop("tower", "radio")
    if kind == "conv":
        return ConvTower(ConvTowerConfig.from_dict(values))
    if kind == "radio":
        return RadioTower(RadioConfig.from_dict(values))
    raise ConfigError(f"vision_config.tower is {kind!r}; known towers: conv, radio")


class HolotronForConditionalGeneration(PreTrainedModel):  # type: ignore[no-untyped-call]
    """State-dict layout of released VL checkpoints: `language_model.*`, `vision_model.*`, `mlp1.*`.

    `grounding_head.*` exists only where `config.grounding_config` asks for it.
    """

    config_class = HolotronConfig
    config: HolotronConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean over the batch at hand
    _supports_sdpa = True
    _no_split_modules = ["Layer"]
    _keep_in_fp32_modules_strict = ["A_log", "D", "dt_bias"]

    def __init__(self, config: HolotronConfig) -> None:
        super().__init__(config)
        if config.ps_version != "v2":
            raise ConfigError(f"ps_version {config.ps_version!r}: only pixel shuffle v2 is implemented")
        language = config.language
        self.language_model = LanguageModel(language)
        self.vision_model: ConvTower | RadioTower | None = None
        self.grounding_head: GroundingHead | None = None
        if config.vision_config is not None:
            tower = build_tower(config)
            side = round(1 / config.downsample_ratio)
            self.vision_model = tower
            self.mlp1 = Projector(tower.out_features * side**2, config.projector_hidden_size, language.hidden_size)
            if config.grounding_config is not None:
                grounding = GroundingConfig.from_dict(config.grounding_config)
                self.grounding_head = GroundingHead(grounding, language.hidden_size, tower.out_features)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """Parameters are initialised where they are made; only what a file may lack is redone here."""
        if isinstance(module, InputConditioner):
            module.reset_buffers()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        revision: str | None = None,
    ) -> HolotronForConditionalGeneration:
        """`checkpoint.load` under the name transformers' users know. Raises ConfigError; never runs remote code."""
        from holotron.model.checkpoint import load

        chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(chosen, torch.dtype):
            raise ValueError(f"dtype {dtype!r} is unknown; give float32, bfloat16 or float16")
        return load(path, dtype=chosen, device=device, revision=revision)

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.backbone.embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def encode_images(self, pixel_values: Tensor) -> EncodedImages:
        """pixel_values (n, 3, H, W), normalised, H and W multiples of twice the patch size (`patch_size` pixels)."""
        if self.vision_model is None:
            raise ConfigError("this checkpoint has no vision tower (vision_config is missing)")
        features: Tensor = self.vision_model(pixel_values)
        rows, columns = (s // self.vision_model.patch_size for s in pixel_values.shape[-2:])
        shuffled = pixel_shuffle_v2(features.view(len(features), rows, columns, -1))
        tokens = self.mlp1(shuffled.flatten(1, 2))
        return EncodedImages(tokens, features, shuffled.shape[2])

    def embed(self, input_ids: Tensor, image_tokens: Tensor | None = None) -> Tensor:
        """Embeddings (B, T, hidden) of ids (B, T), image positions filled in order from (total, hidden)."""
        embeddings: Tensor = self.language_model.backbone.embeddings(input_ids)
        if image_tokens is None:
            return embeddings
        where = input_ids == self.config.img_context_token_id
        if int(where.sum()) != len(image_tokens):
            raise ValueError(f"{int(where.sum())} image placeholders in the prompt, {len(image_tokens)} image features")
        return embeddings.masked_scatter(where.unsqueeze(-1), image_tokens.to(embeddings.dtype))

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: HybridCache | None = None,
        labels: Tensor | None = None,
        segment_ids: Tensor | None = None,
        return_logits: bool = True,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits (B, T, vocab) of ids (B, T); `lengths` (B,) where rows are right-padded.

        `segment_ids` (B, T) where a row packs several documents (see LanguageModel.forward). `labels` (B, T), -100
        where there is nothing to learn, are shifted here and give `loss`; no document's first token is predicted
        from the document before. With `return_logits` False only the loss is made, from the tokens that have a label:
        in fine-tuning few have one, and the vocabulary is the widest product. Other arguments, which wrappers may
        pass as None, raise TypeError.
        """
        refuse_arguments(kwargs)
        image_tokens = None
        if pixel_values is not None:
            image_tokens = self.encode_images(pixel_values).tokens.flatten(0, 1)
        hidden = self.language_model(self.embed(input_ids, image_tokens), lengths, cache, segment_ids)
        lm_head = self.language_model.lm_head
        if labels is None:
            return CausalLMOutput(logits=lm_head(hidden), hidden_states=(hidden,))
        targets = labels[:, 1:]
        if segment_ids is not None:
            inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
            targets = targets.masked_fill(~inside, -100)
        if return_logits:
            logits = lm_head(hidden)
            scored = logits[:, :-1].flatten(0, 1)
        else:
            logits, taught = None, targets != -100
            scored, targets = lm_head(hidden[:, :-1][taught]), targets[taught]
        loss = nn.functional.cross_entropy(scored.float(), targets.flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=(hidden,))


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# What transformers' and peft's wrappers pass of their own accord, where the value asks for nothing.
IDLE_ARGUMENTS = {"use_cache": False, "return_dict": True, "output_attentions": False, "output_hidden_states": False}


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Raises TypeError for arguments that the model's forward would otherwise ignore."""
    for name, value in arguments.items():
        if value is None or (name in IDLE_ARGUMENTS and value is IDLE_ARGUMENTS[name]):
            continue
        if name == "position_ids":
            restart = bool((value[..., 1:] <= value[..., :-1]).any())
            found = "position_ids restart inside a row, as in packed documents" if restart else "position_ids given"
            raise TypeError(f"{found}: this model has no position encoding; name the documents with segment_ids (B, T)")
        if name == "attention_mask":
            raise TypeError("attention_mask given: for right padding pass lengths (B,), for packing segment_ids (B, T)")
        raise TypeError(f"forward() has no argument {name!r}")
