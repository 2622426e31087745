"""Checkpoints of model type `holotron` in vLLM: its NemotronH for the language, our tower and projector for images.

The grounding head stays out: vLLM has no place for it, so a click is the coordinate tokens that the model writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMultiModal
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY

from holotron.model.config import ConfigError
from holotron.model.conv_tower import ConvTower
from holotron.model.modeling import build_tower
from holotron.model.projector import Projector, pixel_shuffle_v2
from holotron.model.radio import RadioTower
from holotron.serving.vllm_plugin.configs import ServedConfig
from holotron.serving.vllm_plugin.heads import widen
from holotron.serving.vllm_plugin.images import DummyInputs, Info, Processor
from holotron.serving.vllm_plugin.logits import known_tokens, only_tokens


@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=DummyInputs)
class HolotronForVllm(nn.Module, HasInnerState, IsHybrid, SupportsMultiModal):
    """The whole model but for the grounding head. Every tensor parallel rank holds the tower and the projector."""

    vision_model: ConvTower | RadioTower
    mlp1: Projector

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return "<image>" if modality.startswith("image") else None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: ServedConfig = vllm_config.model_config.hf_config
        self.config = config
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.known_tokens = known_tokens(vllm_config.model_config)
        marks: Any = self  # by which vLLM leaves out what a deployment does not use
        with marks._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=config.text_config,
                prefix=maybe_prefix(prefix, "language_model"),
            )
        with marks._mark_tower_model(vllm_config, "image"):
            tower = build_tower(config).to(self.dtype)
            merged = tower.out_features * round(1 / config.downsample_ratio) ** 2
            self.vision_model = tower
            self.mlp1 = Projector(merged, config.projector_hidden_size, config.language.hidden_size).to(self.dtype)

    def embed_multimodal(self, **kwargs: Any) -> tuple[Tensor, ...]:
        """One (tokens, hidden) for each image; `pixel_values` is a list, or one stack, of (tiles, 3, H, W)."""
        pictures = kwargs.get("pixel_values")
        return () if pictures is None else tuple(self._encode(picture) for picture in pictures)

    def _encode(self, tiles: Tensor) -> Tensor:
        patch = self.vision_model.patch_size
        rows, columns = (side // patch for side in tiles.shape[-2:])
        features = self.vision_model(tiles.to(self.dtype))
        shuffled = pixel_shuffle_v2(features.view(len(tiles), rows, columns, -1))
        tokens: Tensor = self.mlp1(shuffled.flatten(1, 2))
        return tokens.flatten(0, 1)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        return self.language_model(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
        )

    def compute_logits(self, hidden_states: Tensor) -> Any:
        return only_tokens(self.language_model.compute_logits(hidden_states), self.known_tokens)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Raises ConfigError for weights of the tower or projector that are missing or do not belong."""
        seeing: dict[str, Tensor] = {}
        loaded = self.language_model.load_weights(self._language_weights(weights, seeing))
        names = {f"language_model.{name}" for name in loaded}
        for name in ("vision_model", "mlp1"):
            module = getattr(self, name)
            if not list(module.parameters()):  # images are switched off, so vLLM left the module out
                continue
            start = f"{name}."
            own = {key[len(start) :]: value for key, value in seeing.items() if key.startswith(start)}
            report = module.load_state_dict(own, strict=False)
            if report.missing_keys or report.unexpected_keys:
                raise ConfigError(
                    f"the weights of {name} do not fit config.json: missing {report.missing_keys[:5]}, "
                    f"unexpected {report.unexpected_keys[:5]}"
                )
            names |= {start + key for key in own}
        return names

    def _language_weights(
        self, weights: Iterable[tuple[str, Tensor]], seeing: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The language model's, one at a time under vLLM's names; those of tower and projector go into `seeing`."""
        narrow, wide = self.config.language.head_dim, self.config.text_config.head_dim
        for name, tensor in weights:
            if name.startswith("language_model."):
                yield name.removeprefix("language_model."), widen(name, tensor, narrow, wide)
            elif not name.startswith("grounding_head."):
                seeing[name] = tensor.detach().clone()  # vLLM may reuse the memory of what it hands out

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        return NemotronHForCausalLM.get_mamba_state_shape_from_config(_language_of(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        return NemotronHForCausalLM.get_mamba_state_dtype_from_config(_language_of(vllm_config))

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return NemotronHForCausalLM.get_mamba_state_copy_func()


def _language_of(vllm_config: VllmConfig) -> VllmConfig:
    return vllm_config.with_hf_config(vllm_config.model_config.hf_config.text_config)
