"""Released vision-language checkpoints in vLLM: its own `nano_nemotron_vl`, with six things mended.

- it imports torchvision, for a function that this family never calls; a placeholder stands in where it is missing;
- it rounds vision features to bfloat16 whatever the dtype of the run, which in float32 does not even add up;
- it knows four sizes of RADIO towers by name; ours may have any;
- it divides the room left in the context among the images, so that a screenshot changes its grid as the history
  grows, and the cache of processed images hands out grids of another turn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.radio import VIT_TIMM_DIM_BY_NAME

from holotron.serving.vllm_plugin.configs import tower_sizes
from holotron.serving.vllm_plugin.logits import known_tokens, only_tokens
from holotron.serving.vllm_plugin.torchvision import placeholder

with placeholder():
    from vllm.model_executor.models.nano_nemotron_vl import (
        NanoNemotronVLDummyInputsBuilder,
        NanoNemotronVLMultiModalProcessor,
        NanoNemotronVLProcessingInfo,
        NemotronH_Nano_VL_V2,
    )
    from vllm.transformers_utils.processors import nano_nemotron_vl


if current_platform.is_cpu():
    resize = nano_nemotron_vl._bicubic_resize_and_normalize
    nano_nemotron_vl._bicubic_resize_and_normalize = getattr(resize, "_torchdynamo_orig_callable", resize)

TILES_AT_ONCE = 128  # through the tower: bounds the memory of a request with many images


class FixedGrids(nano_nemotron_vl.DynamicResolutionImageTiler):
    """A picture's grid follows from its size alone, never from its neighbours."""

    def compute_params(self, media_list: list[Any], num_tokens_available: int) -> list[Any]:
        return [self.process_media(media, self._max_num_patches)[0] for media in media_list]


class Info(NanoNemotronVLProcessingInfo):
    def get_hf_processor(self, **kwargs: Any) -> nano_nemotron_vl.NanoNemotronVLProcessor:
        kwargs.setdefault("max_num_tiles", self.get_hf_config().max_num_tiles)
        processor = super().get_hf_processor(**kwargs)
        if processor.dynamic_tiler is not None:
            processor.dynamic_tiler.__class__ = FixedGrids
        return processor


@MULTIMODAL_REGISTRY.register_processor(
    NanoNemotronVLMultiModalProcessor, info=Info, dummy_inputs=NanoNemotronVLDummyInputsBuilder
)
class ReleasedModel(NemotronH_Nano_VL_V2):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # upstream builds tower and projector in the checkpoint's dtype, even where the run has another
        vllm_config.model_config.hf_config.text_config.dtype = vllm_config.model_config.dtype
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.known_tokens = known_tokens(vllm_config.model_config)

    def compute_logits(self, hidden_states: Tensor) -> Any:
        return only_tokens(super().compute_logits(hidden_states), self.known_tokens)

    def get_vit_model_from_radio_config(self, hf_config: Any) -> Any:
        name = hf_config.vision_config.args["model"]
        sizes = tower_sizes(name)
        if sizes is not None:
            VIT_TIMM_DIM_BY_NAME.setdefault(name, sizes)
        return super().get_vit_model_from_radio_config(hf_config)

    def extract_feature(self, pixel_values: Tensor, num_frames: int | None = None) -> Tensor:
        """Tiles (n, 3, H, W) to (n, tokens, hidden); a video's frames stay upstream's business."""
        if num_frames is not None:
            return super().extract_feature(pixel_values, num_frames)
        rows, columns = (side // self.patch_size for side in pixel_values.shape[-2:])
        done = []
        for tiles in pixel_values.split(TILES_AT_ONCE):
            features = self._features(tiles)
            shuffled = self.pixel_shuffle(
                features.view(len(tiles), rows, columns, -1), scale_factor=self.downsample_ratio
            )
            done.append(self.mlp1(shuffled.flatten(1, 2)))
        return torch.cat(done)

    def extract_feature_dynamic(self, pixel_values: Tensor, imgs_sizes: list[tuple[int, int]]) -> Tensor:
        """Packed patches of images of any sizes, (1, patches, pixels), to (1, tokens, hidden)."""
        features = self._features(pixel_values, imgs_sizes=imgs_sizes)
        return self.mlp1(self.pixel_shuffle_dynamic_res(features, imgs_sizes=imgs_sizes))

    def _features(self, pixels: Tensor, **sizes: Any) -> Tensor:
        _, features = self.vision_model(pixels, **sizes)
        features = features.to(self.llm_dtype)
        return features if self.vision_final_layernorm is None else self.vision_final_layernorm(features)
