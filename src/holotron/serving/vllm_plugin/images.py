"""Our pictures in vLLM's terms: the image processors of `holotron.model` behind its multimodal interface."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import BatchFeature
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
)

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.image_tokens import expand_images
from holotron.model.images import DynamicProcessor, ImageProcessor, TileProcessor
from holotron.model.processing import processor_of
from holotron.serving.vllm_plugin.configs import ServedConfig

# A picture at its own resolution has no largest size of its own; vLLM must set memory aside for one.
NATIVE_TOKENS = 16384


class Pictures:
    """What vLLM calls an HF processor: a list of pictures to tensors, nothing else. The same pixels as the engine's."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor

    def __call__(self, images: Sequence[Any], **ignored: Any) -> BatchFeature:
        """`pixel_values` holds one (tiles, 3, H, W) for each picture, `image_tokens` their counts."""
        done = [self.processor(image) for image in images]
        return BatchFeature(
            {"pixel_values": [one.pixel_values for one in done], "image_tokens": [one.num_tokens for one in done]}
        )


class Info(BaseProcessingInfo):
    """What vLLM asks about a checkpoint's images."""

    def get_hf_config(self) -> HolotronConfig:
        config: HolotronConfig = self.ctx.get_hf_config(ServedConfig)
        return config

    def get_hf_processor(self, **kwargs: Any) -> Pictures:
        processor = processor_of(self.get_hf_config())
        if processor is None:
            raise ConfigError("config.json has no vision_config; serve the language model alone as nemotron_h")
        return Pictures(processor)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def token_ids(self) -> tuple[int, int | None, int | None]:
        """Ids of the placeholder and of what stands before and after an image."""
        config, tokenizer = self.get_hf_config(), self.get_tokenizer()
        vocabulary = tokenizer.get_vocab()
        image = vocabulary.get(config.img_context_token, config.img_context_token_id)
        if image is None:
            raise ConfigError(f"the tokenizer has no token {config.img_context_token!r} for images")
        return image, vocabulary.get(config.img_start_token), vocabulary.get(config.img_end_token)

    def largest_size(self) -> tuple[int, int]:
        """Width and height of a picture with as many tokens as one may have."""
        processor = self.get_hf_processor().processor
        if isinstance(processor, TileProcessor):
            most, side = processor.config.max_num_tiles, processor.config.size
            sizes = [(i * side, j * side) for i in range(1, most + 1) for j in range(1, most // i + 1)]
            return max(sizes, key=lambda size: processor.num_tokens(*size))
        if isinstance(processor, DynamicProcessor):
            side = math.isqrt(processor.config.max_num_patches) * processor.config.patch_size
            return side, side
        limit = min(NATIVE_TOKENS, self.ctx.model_config.max_model_len - 8)
        step = processor.config.multiple  # type: ignore[attr-defined]
        side = math.isqrt(max(limit, 1)) * step
        return side, side


class DummyInputs(BaseDummyInputsBuilder):
    """The request by which vLLM measures memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.info.get_hf_config().img_context_token * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        width, height = self.info.largest_size()
        count = mm_counts.get("image", 0)
        options = mm_options.get("image")
        return {"image": self._get_dummy_images(width=width, height=height, num_images=count, overrides=options)}


class Processor(BaseMultiModalProcessor):
    """Placeholders in the prompt to as many tokens as their images have, delimited as the engine does it."""

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            "pixel_values": MultiModalFieldConfig.batched("image"),
            "image_tokens": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
        image, start, end = self.info.token_ids()
        return expand_images(prompt, [1] * prompt.count(image), image, start, end)

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        image = self.info.token_ids()[0]

        def tokens(index: int) -> list[int]:
            return [image] * int(out_mm_kwargs["image"][index]["image_tokens"].data)

        return [PromptReplacement(modality="image", target=[image], replacement=tokens)]
