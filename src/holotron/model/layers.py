"""The layers of the language model: RMS norm, Mamba-2 mixer, attention, squared-ReLU MLP; experts are in moe.py."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holotron.model import cpu_attention, kernels
from holotron.model.cache import HybridCache
from holotron.model.config import LanguageConfig
from holotron.model.fused import conv_silu, gated_norm, rms_norm, squared_relu
from holotron.model.kernels import gradients
from holotron.model.linear import Linear
from holotron.model.moe import MoE
from holotron.model.ssd import ssd_chunked, ssd_step


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, mean square in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight.float(), self.eps).to(x.dtype)


class GatedGroupNorm(nn.Module):
    """RMS norm over each of G groups of channels, after gating with SiLU(z)."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return gated_norm(y, z, self.weight.view(self.groups, -1), self.eps)


class Mamba2Mixer(nn.Module):
    """Mamba-2: in_proj, causal depthwise convolution, state-space recurrence, gated norm, out_proj.

    Channel order of in_proj: z (width) | x (width) | B (G*N) | C (G*N) | dt (heads).
    """

    def __init__(self, config: LanguageConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        width, heads = config.mamba_width, config.mamba_num_heads
        channels, kernel = config.conv_channels, config.conv_kernel
        self.in_proj = Linear(config.hidden_size, width + channels + heads)
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=config.use_conv_bias)
        self.A_log = nn.Parameter(torch.log(torch.empty(heads).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(heads))
        step = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # inverse softplus
        self.norm = GatedGroupNorm(width, config.n_groups, config.layer_norm_epsilon)
        self.out_proj = Linear(width, config.hidden_size)

    def forward(
        self, u: Tensor, valid: Tensor | None, cache: HybridCache | None, segments: Tensor | None = None
    ) -> Tensor:
        """u (B, T, hidden); valid (B, T) bool, False on right padding, None if all are tokens; segments (B, T) int64,
        the document of each token, never falling along a row, None if a row is one document (not with a cache)."""
        cfg = self.config
        sizes = [cfg.mamba_width, cfg.conv_channels, cfg.mamba_num_heads]
        projected = self.in_proj(u)
        z, xbc, dt = torch.split(projected, sizes, dim=-1)
        if cache is None and valid is None and torch.is_grad_enabled() and self._trains_through_kernels(projected):
            gated = self._core(projected, segments)
        elif torch.is_autocast_enabled(u.device.type):
            with torch.autocast(u.device.type, enabled=False):  # dt, decay and state are fp32 whatever is around them
                gated = self._mix(z, xbc, dt, valid, cache, segments)
        else:
            gated = self._mix(z, xbc, dt, valid, cache, segments)
        out: Tensor = self.out_proj(gated)
        return out

    def _trains_through_kernels(self, projected: Tensor) -> bool:
        parameters = (self.conv1d.weight, self.conv1d.bias, self.A_log, self.D, self.dt_bias, self.norm.weight)
        return (
            projected.numel() > 0
            and self.config.conv_kernel <= kernels.MOST_TAPS
            and self.config.time_step_limit[0] <= 0
            and math.isinf(self.config.time_step_limit[1])
            and gradients.serves(projected, *parameters)
            and kernels.cpu() is not None
        )

    def _core(self, projected: Tensor, segments: Tensor | None) -> Tensor:
        """`_mix` of rows that start from nothing, with one gradient for all of it."""
        taps, weight = self.conv1d.weight.squeeze(1).t(), self.norm.weight.view(self.norm.groups, -1)
        a = -torch.exp(self.A_log)
        inputs = (projected, taps, self.conv1d.bias, self.dt_bias, a, self.D, weight, self.norm.eps, segments)
        gated: Tensor = gradients.MixerCore.apply(kernels.cpu(), *inputs)  # type: ignore[no-untyped-call]
        return gated

    def _mix(
        self,
        z: Tensor,
        xbc: Tensor,
        dt: Tensor,
        valid: Tensor | None,
        cache: HybridCache | None,
        segments: Tensor | None,
    ) -> Tensor:
        """What lies between the projections, (B, T, width) in the dtype of z."""
        xbc = self._convolve(xbc, valid, cache, segments)
        y = self._recur(xbc, dt, valid, cache, segments)
        gated: Tensor = self.norm(y.flatten(-2).to(z.dtype), z)
        return gated

    def _recur(
        self, xbc: Tensor, dt: Tensor, valid: Tensor | None, cache: HybridCache | None, segments: Tensor | None
    ) -> Tensor:
        """xbc (B, T, channels) after the convolution, dt (B, T, H) raw -> y (B, T, H, P) fp32; the state is kept."""
        cfg, exact = self.config, dt.dtype == torch.float32
        dt = F.softplus(dt.float() + self.dt_bias.float())
        low, high = cfg.time_step_limit
        if low > 0 or math.isfinite(high):
            dt = dt.clamp(low, high)
        if valid is not None:
            dt = dt * valid.unsqueeze(-1)
        sizes = [cfg.mamba_width, *[cfg.n_groups * cfg.ssm_state_size] * 2]
        x, b, c = torch.split(xbc.float(), sizes, dim=-1)
        x = x.view(*x.shape[:-1], cfg.mamba_num_heads, cfg.mamba_head_dim)
        b, c = (t.view(*t.shape[:-1], cfg.n_groups, cfg.ssm_state_size) for t in (b, c))
        a, d = -torch.exp(self.A_log.float()), self.D.float()
        if cache is not None and xbc.shape[1] == 1:
            y, state = ssd_step(x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], d, cache.ssm[self.index])
            y = y.unsqueeze(1)
        else:
            before = None if cache is None else cache.ssm[self.index]
            chunk = None if x.device.type == "cpu" else cfg.chunk_size
            y, state = ssd_chunked(x, dt, a, b, c, d, chunk, before, segments, exact)
        if cache is not None:
            cache.ssm[self.index] = state
        return y

    def _convolve(
        self, xbc: Tensor, valid: Tensor | None, cache: HybridCache | None, segments: Tensor | None
    ) -> Tensor:
        """silu(sum_j w_j xbc[t-K+1+j] + bias); the last K-1 valid columns become the new conv state."""
        if valid is not None:
            xbc = xbc * valid.unsqueeze(-1)
        weight = self.conv1d.weight.squeeze(1)  # (channels, K)
        if cache is None:
            return conv_silu(xbc, weight, self.conv1d.bias, segments)
        kernel, length, bias = self.config.conv_kernel, xbc.shape[1], self.conv1d.bias
        before = cache.conv[self.index].transpose(1, 2)
        if valid is None and length >= kernel - 1:
            cache.conv[self.index] = xbc[:, length - kernel + 1 :].transpose(1, 2).contiguous()
            return conv_silu(xbc, weight, bias, None, before)
        padded = torch.cat([before, xbc], dim=1)
        if valid is None:
            tail = padded[:, length:]
        else:
            first = valid.sum(1)[:, None] + torch.arange(kernel - 1, device=xbc.device)
            tail = padded.gather(1, first.unsqueeze(-1).expand(-1, -1, padded.shape[-1]))
        cache.conv[self.index] = tail.transpose(1, 2).contiguous()
        if length > 1:
            return conv_silu(xbc, weight, bias, None, before)
        out = (padded * weight.t()).sum(1, keepdim=True)
        return F.silu(out if bias is None else out + bias)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention from the first token on. q (B, heads, T, size); k, v (B, kv heads, T, size)."""
    if cpu_attention.serves(q):
        return cpu_attention.causal_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal grouped-query attention, scale 1/sqrt(head_dim), no bias and no position encoding."""

    def __init__(self, config: LanguageConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = Linear(config.hidden_size, q)
        self.k_proj = Linear(config.hidden_size, kv)
        self.v_proj = Linear(config.hidden_size, kv)
        self.o_proj = Linear(q, config.hidden_size)

    def forward(
        self, u: Tensor, valid: Tensor | None, cache: HybridCache | None, segments: Tensor | None = None
    ) -> Tensor:
        """u (B, T, hidden). With a cache, token t of row b stands at position cache.lengths[b] + t.

        With segments (B, T), a token sees only its own document.
        """
        q, k, v = (
            p(u).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            out = self._attend_cached(q, k, v, cache)
        elif segments is not None and (kept := cpu_attention.kernel_attention(q, k, v, segments)) is not None:
            out = kept
        elif segments is not None:
            mask = (segments[:, None, :, None] == segments[:, None, None, :]).tril()  # (B, 1, T, T)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            out = attend(q, k, v)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return result

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: HybridCache) -> Tensor:
        """q (B, heads, T, size), k and v (B, kv heads, T, size), which are stored in the cache before they are read."""
        keys, values = cache.keys[self.index], cache.values[self.index]
        batch, length = q.shape[0], q.shape[2]
        position = cache.lengths[:, None] + torch.arange(length, device=q.device)  # (B, T)
        row = torch.arange(batch, device=q.device)[:, None].expand_as(position)
        keys[row, :, position] = k.transpose(1, 2).to(keys.dtype)
        values[row, :, position] = v.transpose(1, 2).to(values.dtype)
        used = int(position.max()) + 1
        if used == length:  # nothing came before: what is not yet a token stands behind every token of its row
            return attend(q, k, v)
        if bool((position[:, 0] == position[0, 0]).all()):  # no row's queries stand before those of another
            mixed = cpu_attention.kernel_attention(q, keys[:, :, :used], values[:, :, :used])
            if mixed is not None:
                return mixed
        mask = torch.arange(used, device=q.device) <= position[:, None, :, None]  # (B, 1, T, used)
        return F.scaled_dot_product_attention(
            q, keys[:, :, :used].to(q.dtype), values[:, :, :used].to(q.dtype), attn_mask=mask, enable_gqa=True
        )


class MLP(nn.Module):
    """down(relu(up x)^2)."""

    def __init__(self, config: LanguageConfig, index: int) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(
        self, u: Tensor, valid: Tensor | None, cache: HybridCache | None, segments: Tensor | None = None
    ) -> Tensor:
        result: Tensor = self.down_proj(squared_relu(self.up_proj(u)))
        return result


MIXERS: dict[str, type[Mamba2Mixer] | type[Attention] | type[MLP] | type[MoE]] = {
    "M": Mamba2Mixer,
    "*": Attention,
    "-": MLP,
    "E": MoE,
}
