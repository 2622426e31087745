"""RADIO-H vision tower (C-RADIOv2-H): a pre-norm ViT with a cropped position embedding and prefix tokens.

Module names follow the released checkpoints, so that a state dict loads without renaming. Inputs arrive
normalised: the checkpoint's own `input_conditioner` is stored and saved back, but never applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What public configs call the fields of RadioConfig.
_ALIASES = {
    "hidden_size": "hidden",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp",
}
# Options of the wider RADIO family that change the computation, with the only value this tower computes.
_FIXED = {
    "use_swiglu_ffn": False,
    "qkv_bias": True,
    "layerscale_value": 1.0,
    "num_channels": 3,
    "hidden_act": "gelu",
}


@dataclass(frozen=True, slots=True)
class RadioConfig:
    """Sizes of the tower; the defaults are C-RADIOv2-H with the 16 prefix tokens expected of 12B-v2-VL."""

    hidden: int = 1280
    depth: int = 32
    heads: int = 16
    mlp: int = 5120
    patch_size: int = 16
    pos_grid: int = 128  # the position embedding is stored for pos_grid x pos_grid patches
    prefix_tokens: int = 16
    layer_norm_eps: float = 1e-6
    summary_idxs: tuple[int, ...] = (0, 1)  # stored for round trips, unused by the features

    def __post_init__(self) -> None:
        for name in ("hidden", "depth", "heads", "mlp", "patch_size", "pos_grid"):
            if getattr(self, name) < 1:
                raise ValueError(f"RadioConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.prefix_tokens < 0:
            raise ValueError(f"RadioConfig.prefix_tokens must not be negative, got {self.prefix_tokens}")
        if self.hidden % self.heads:
            raise ValueError(f"RadioConfig.hidden {self.hidden} is not a multiple of heads {self.heads}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RadioConfig:
        """Reads our own names and those of transformers' `radio`; keys about other things are ignored.

        Raises ValueError for an option that would need another computation. Sizes a config does not state
        keep the RADIO-H defaults: correct them from the weights with `with_shapes`.
        """
        for key, value in _FIXED.items():
            if values.get(key, value) != value:
                raise ValueError(f"vision config has {key}={values[key]!r}, but only {value!r} is supported")
        known = {field.name for field in fields(cls)}
        read = {_ALIASES[key]: value for key, value in values.items() if key in _ALIASES}
        read |= {key: value for key, value in values.items() if key in known}
        if "mlp" not in read and "mlp_ratio" in values:
            read["mlp"] = int(read.get("hidden", cls().hidden) * values["mlp_ratio"])
        if "pos_grid" not in read and "max_img_size" in values:
            read["pos_grid"] = values["max_img_size"] // read.get("patch_size", cls().patch_size)
        if "prefix_tokens" not in read and "num_cls_tokens" in values:
            read["prefix_tokens"] = values["num_cls_tokens"] + values.get("num_registers", 0)
        if read.get("summary_idxs", ()) is None:
            del read["summary_idxs"]
        if "summary_idxs" in read:
            read["summary_idxs"] = tuple(int(index) for index in read["summary_idxs"])
        return cls(**read)

    def with_shapes(self, shapes: Mapping[str, Sequence[int]]) -> RadioConfig:
        """The same config with every size that the weights decide taken from them.

        `shapes` maps keys from `radio_model.` on to tensor shapes. The number of heads leaves no trace in the
        weights and is kept. Raises ValueError naming a key that is missing.
        """

        def shape(key: str) -> Sequence[int]:
            try:
                return shapes[f"radio_model.{key}"]
            except KeyError:
                raise ValueError(f"vision weights lack radio_model.{key}") from None

        hidden, patch_pixels = shape("model.patch_generator.embedder.weight")
        blocks = {key.split(".")[3] for key in shapes if key.startswith("radio_model.model.blocks.")}
        kept = self.summary_idxs
        summaries = shapes.get("radio_model.summary_idxs", (len(kept),))[0]
        return replace(
            self,
            hidden=hidden,
            depth=len(blocks),
            mlp=shape("model.blocks.0.mlp.fc1.weight")[0],
            patch_size=round((patch_pixels / 3) ** 0.5),
            pos_grid=round(shape("model.patch_generator.pos_embed")[1] ** 0.5),
            prefix_tokens=shape("model.patch_generator.cls_token.token")[0],
            summary_idxs=kept if len(kept) == summaries else tuple(range(summaries)),
        )


class InputConditioner(nn.Module):
    """The checkpoint's own mean and std, (3, 1, 1). Kept for round trips; the image processor normalises."""

    norm_mean: Tensor
    norm_std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm_mean", torch.empty(3, 1, 1))
        self.register_buffer("norm_std", torch.empty(3, 1, 1))
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """The values C-RADIO was trained with, for files that do not store them."""
        self.norm_mean.copy_(torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1))
        self.norm_std.copy_(torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1))


class PrefixTokens(nn.Module):
    """Learned summary and register tokens, (R, hidden)."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(config.prefix_tokens, config.hidden))


class PatchGenerator(nn.Module):
    """Pixels to tokens: patch linear, position embedding on the patches, prefix tokens in front."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.patch_size, self.pos_grid = config.patch_size, config.pos_grid
        self.embedder = nn.Linear(3 * config.patch_size**2, config.hidden, bias=False)
        self.pos_embed = nn.Parameter(torch.empty(1, config.pos_grid**2, config.hidden))
        self.cls_token = PrefixTokens(config)

    def patches(self, pixel_values: Tensor) -> Tensor:
        """(n, 3, H, W) -> (n, h*w, 3*p*p), row-major, pixels of a patch in the order c, y, x."""
        n, channels, height, width = pixel_values.shape
        p = self.patch_size
        if channels != 3 or height % p or width % p or not height or not width:
            raise ValueError(
                f"pixel_values of shape {tuple(pixel_values.shape)}: expected (n, 3, H, W) with H and W "
                f"positive multiples of the patch size {p}"
            )
        tiles = pixel_values.view(n, 3, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
        return tiles.reshape(n, (height // p) * (width // p), 3 * p * p)

    def position_embedding(self, rows: int, columns: int) -> Tensor:
        """(1, rows*columns, hidden): the stored grid resized to a square, then its top-left window.

        Bilinear, align_corners=False, in float32 whatever the weights' dtype.
        """
        side = max(rows, columns)
        grid = self.pos_embed.view(1, self.pos_grid, self.pos_grid, -1).permute(0, 3, 1, 2).float()
        square = F.interpolate(grid, size=(side, side), mode="bilinear", align_corners=False)
        window = square[:, :, :rows, :columns].to(self.pos_embed.dtype)
        return window.flatten(2).transpose(1, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(n, 3, H, W) -> (n, R + h*w, hidden)."""
        x = self.embedder(self.patches(pixel_values))
        rows, columns = pixel_values.shape[2] // self.patch_size, pixel_values.shape[3] // self.patch_size
        x = x + self.position_embedding(rows, columns)
        return torch.cat([self.cls_token.token.expand(x.shape[0], -1, -1), x], dim=1)


class VisionAttention(nn.Module):
    """Full (not causal) multi-head attention; the rows of `qkv` are all queries, all keys, all values."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(n, length, width))
        return out


class VisionMLP(nn.Module):
    """Two linears around the exact (erf) GELU."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden, config.mlp)
        self.fc2 = nn.Linear(config.mlp, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class VisionBlock(nn.Module):
    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.attn = VisionAttention(config)
        self.norm2 = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """Patch generator and blocks. No final norm: the features are the last block's output."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.patch_generator = PatchGenerator(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))

    def forward(self, pixel_values: Tensor) -> Tensor:
        x: Tensor = self.patch_generator(pixel_values)
        for block in self.blocks:
            x = block(x)
        return x


class RadioModel(nn.Module):
    """Everything a checkpoint stores below `radio_model.`."""

    summary_idxs: Tensor

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.config = config
        self.input_conditioner = InputConditioner()
        self.register_buffer("summary_idxs", torch.tensor(config.summary_idxs, dtype=torch.long))
        self.model = VisionTransformer(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal, std 0.02, for linears and tables; zeros for biases; norms at identity."""
        for name, parameter in self.model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif ".norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Normalised (n, 3, H, W) -> (n, h*w, hidden), row-major, prefix tokens dropped.

        Raises ValueError if a side is no positive multiple of the patch size.
        """
        out: Tensor = self.model(pixel_values)
        return out[:, self.model.patch_generator.cls_token.token.shape[0] :]


class RadioTower(nn.Module):
    """RADIO as every vision tower looks: `out_features`, `patch_size`, and features one by one patch."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.radio_model = RadioModel(config)
        self.out_features = config.hidden
        self.patch_size = config.patch_size

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Normalised (n, 3, H, W) -> (n, h*w, out_features), row-major."""
        features: Tensor = self.radio_model(pixel_values)
        return features
