"""Mixture-of-experts layer: a sigmoid router with a correction bias, grouped squared-ReLU experts, a shared expert.

Router (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, as Nemotron 3 uses it): s = sigmoid(W x) in fp32; experts are
*chosen* by s + correction bias, within the best groups if there are several, and *weighted* by s alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holotron.model.cache import HybridCache
from holotron.model.config import ConfigError, LanguageConfig


def check_moe(config: LanguageConfig) -> None:
    """Raises ConfigError, naming the field, where the expert sizes do not make a layer."""

    def require(fine: bool, name: str, wanted: str) -> None:
        if not fine:
            raise ConfigError(f"llm_config.{name} is {getattr(config, name)!r}, but a layer of experts needs {wanted}")

    sizes = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
    for name in (*sizes, "n_group", "topk_group"):
        require(getattr(config, name) >= 1, name, "at least 1")
    require(config.moe_latent_size is None or config.moe_latent_size >= 1, "moe_latent_size", "at least 1, or null")
    experts, groups = config.n_routed_experts, config.n_group
    require(experts % groups == 0, "n_group", f"a divisor of n_routed_experts {experts}")
    size = experts // groups
    require(groups == 1 or size >= 2, "n_group", f"two experts or more in a group (n_routed_experts is {experts})")
    require(config.topk_group <= groups, "topk_group", f"at most n_group {groups}")
    allowed = config.topk_group * size
    require(config.num_experts_per_tok <= allowed, "num_experts_per_tok", f"at most the {allowed} experts to choose of")
    require(math.isfinite(config.routed_scaling_factor), "routed_scaling_factor", "a finite number")


@dataclass(slots=True, eq=False)
class ExpertLoad:
    """What one layer's router did with the tokens it saw, padding left out.

    counts (E,) int64, tokens sent to each expert; mass (E,) float64, routing weight each received, every token
    giving 1 in all. Both may be summed over processes before they are read.
    """

    counts: Tensor
    mass: Tensor

    def add(self, experts: Tensor, weights: Tensor) -> None:
        """experts, weights (tokens, k): what was chosen, and with what weight."""
        share = weights.detach().double()
        share = share / share.sum(-1, keepdim=True).clamp_min(1e-20)
        chosen = experts.flatten()
        self.counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        self.mass.scatter_add_(0, chosen, share.flatten())

    def share(self) -> Tensor:
        """(E,) float64, each expert's part of all choices; zeros before the first token."""
        return self.counts.double() / self.counts.sum().clamp_min(1)

    def mass_share(self) -> Tensor:
        """(E,) float64, each expert's part of all routing weight."""
        return self.mass / self.mass.sum().clamp_min(1e-20)

    def max_over_mean(self) -> float:
        """Load of the busiest expert over the mean load: 1 is balanced, the number of experts is collapse."""
        return float(self.share().max() * len(self.counts))

    def entropy(self) -> float:
        """Of `share`, in nats; log(E) is balanced, log(k) is all tokens at the same k experts."""
        return float(torch.special.entr(self.share()).sum())

    def idle(self) -> float:
        """Fraction of experts that no token was sent to."""
        return float((self.counts == 0).double().mean())


class Router(nn.Module):
    """Scores experts per token. Weight and bias stay fp32 whatever the model is cast to (numeric trap 8)."""

    e_score_correction_bias: Tensor

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        experts, width = config.n_routed_experts, config.hidden_size
        self.weight = nn.Parameter(torch.empty(experts, width, dtype=torch.float32))
        nn.init.normal_(self.weight, std=width**-0.5)
        # A buffer, as in transformers: it is moved by `update_correction_bias`, never by an optimizer.
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (tokens, hidden) -> experts (tokens, k) int64 and their weights (tokens, k) fp32."""
        cfg = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        wanted = scores.detach() + self.e_score_correction_bias
        if cfg.n_group > 1:
            wanted = self._keep_best_groups(wanted)
        experts = wanted.topk(cfg.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if cfg.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * cfg.routed_scaling_factor

    def _keep_best_groups(self, wanted: Tensor) -> Tensor:
        """(tokens, E) -> the same with -inf outside the `topk_group` groups whose two best experts add up highest."""
        grouped = wanted.view(len(wanted), self.config.n_group, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.config.topk_group, dim=-1, sorted=False).indices
        barred = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(barred.unsqueeze(-1), -math.inf).view_as(wanted)


def fits_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped_mm takes these, forwards and backwards: dtype, device and 16-byte rows."""
    if not hasattr(F, "grouped_mm") or not len(rows) or rows.dtype != weight.dtype:
        return False
    if weight.device.type == "cuda":
        known = weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    else:
        known = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:]) and weight.data_ptr() % 16 == 0
    return known and aligned and weight.is_contiguous()


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows[ends[e-1]:ends[e]] @ weight[e].T for every e, one below the other.

    rows (S, in); weight (E, out, in); ends (E,) int32, non-decreasing, the last is S. Returns (S, out).
    One grouped GEMM where torch has it, else one GEMM per expert that has rows. No weight is copied.
    """
    if fits_grouped_mm(rows, weight):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    # unbind, not weight[e]: its gradient is one stack, where indexing would fill a whole stack per expert
    blocks = zip(torch.split(rows, counts), weight.unbind(), counts, strict=True)
    parts = [F.linear(block, matrix) for block, matrix, count in blocks if count]
    return torch.cat(parts) if parts else rows.new_zeros(0, weight.shape[1])


class Experts(nn.Module):
    """All routed experts, down relu(up x)^2, stacked: up_proj (E, ffn, d) and down_proj (E, d, ffn).

    State dicts have released checkpoints' keys, `{e}.up_proj.weight` and `{e}.down_proj.weight`. Saved values
    share memory with the stacks, so copying into them loads an expert in place.
    """

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(experts, inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))
        for stack in (self.up_proj, self.down_proj):
            nn.init.uniform_(stack, -(stack.shape[-1] ** -0.5), stack.shape[-1] ** -0.5)  # as nn.Linear

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x (tokens, d); experts, weights (tokens, k). Returns the weighted sums, (tokens, d), added up in fp32."""
        kind, (tokens, k) = x.device.type, experts.shape
        # grouped_mm is not known to autocast
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.up_proj.dtype
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.zeros(len(self.up_proj), dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = x.to(dtype)[order // k]
        rows = F.relu(grouped_linear(rows, self.up_proj.to(dtype), ends)).square()
        rows = grouped_linear(rows, self.down_proj.to(dtype), ends)
        rows = rows[order.argsort()].view(tokens, k, x.shape[-1])
        return (rows * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def slices(self, keep_vars: bool = False) -> dict[str, Tensor]:
        """Released key -> view of the stack; detached unless `keep_vars`."""
        stacks = {"up_proj": self.up_proj, "down_proj": self.down_proj}
        views = {name: (stack if keep_vars else stack.detach()).unbind() for name, stack in stacks.items()}
        return {f"{e}.{name}.weight": matrix for name, found in views.items() for e, matrix in enumerate(found)}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + key: value for key, value in self.slices(keep_vars).items()})

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """nn.Module's part of `load_state_dict`, per expert; with `assign=True` the tensors given are stacked."""
        slices = {prefix + key: value for key, value in self.slices().items()}
        found = slices.keys() & state_dict.keys()
        fine = {key for key in found if state_dict[key].shape == slices[key].shape}
        if strict:
            missing += [key for key in slices if key not in found]
            unexpected += [key for key in state_dict if key.startswith(prefix) and key not in slices]
        for key in sorted(found - fine):
            was, wanted = tuple(state_dict[key].shape), tuple(slices[key].shape)
            errors.append(f"size mismatch for {key}: {was} in the state dict, {wanted} in the model")
        if metadata.get("assign_to_params_buffers", False) and len(fine) == len(slices):
            for name in ("up_proj", "down_proj"):
                old: nn.Parameter = getattr(self, name)
                stack = torch.stack([state_dict[f"{prefix}{e}.{name}.weight"].detach() for e in range(len(old))])
                setattr(self, name, nn.Parameter(stack, requires_grad=old.requires_grad))
            return
        for key in fine:
            slices[key].copy_(state_dict[key].detach())


class SharedExperts(nn.Module):
    """The squared-ReLU MLP that every token passes, (..., hidden) -> (..., hidden)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.relu(self.up_proj(x)).square())
        return out


class MoE(nn.Module):
    """Routed experts plus shared expert. Raises ConfigError if the config's expert sizes do not fit together.

    With `moe_latent_size` the routed experts work in a narrower space, between fc1_latent_proj and
    fc2_latent_proj; router and shared expert always read the full hidden state.
    """

    def __init__(self, config: LanguageConfig, index: int) -> None:
        super().__init__()
        check_moe(config)
        self.index = index
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.gate = Router(config)
        self.experts = Experts(config.n_routed_experts, latent or hidden, config.moe_intermediate_size)
        self.shared_experts = SharedExperts(hidden, config.moe_shared_expert_intermediate_size)
        self.fc1_latent_proj = nn.Linear(hidden, latent, bias=False) if latent else None
        self.fc2_latent_proj = nn.Linear(latent, hidden, bias=False) if latent else None
        self.loads: list[ExpertLoad] = []  # filled only inside `record_routing`

    def forward(
        self, u: Tensor, valid: Tensor | None, cache: HybridCache | None, segments: Tensor | None = None
    ) -> Tensor:
        """u (B, T, hidden); valid (B, T) bool, False on padding, whose output is zero. Tokens do not interact."""
        if valid is None:
            return self._mix(u.flatten(0, 1)).view_as(u)
        return torch.zeros_like(u).masked_scatter(valid.unsqueeze(-1), self._mix(u[valid]).to(u.dtype))

    def _mix(self, x: Tensor) -> Tensor:
        """x (tokens, hidden) -> (tokens, hidden)."""
        experts, weights = self.gate(x)
        # gradient checkpointing runs a forward again inside the backward; those tokens are counted already
        if self.loads and torch._C._current_graph_task_id() == -1:
            for load in self.loads:
                load.add(experts, weights)
        inner = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        routed: Tensor = self.experts(inner, experts, weights)
        if self.fc2_latent_proj is not None:
            routed = self.fc2_latent_proj(routed)
        out: Tensor = routed + self.shared_experts(x)
        return out


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, ExpertLoad]]:
    """Counts where the routers of `model` send tokens: {module name of the MoE layer: its ExpertLoad}.

    Costs nothing outside the block. Forward passes inside it add up; blocks may be nested.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    loads = {}
    for name, layer in layers.items():
        counts = torch.zeros_like(layer.gate.e_score_correction_bias, dtype=torch.int64)
        loads[name] = ExpertLoad(counts, counts.double())
        layer.loads.append(loads[name])
    try:
        yield loads
    finally:
        for name, layer in layers.items():
            layer.loads[:] = [load for load in layer.loads if load is not loads[name]]


@torch.no_grad()
def update_correction_bias(model: nn.Module, routing: dict[str, ExpertLoad], rate: float = 1e-3) -> None:
    """One step of loss-free balancing (arXiv 2408.15664): experts with less than the mean load become likelier.

    `routing` as recorded since the last step, summed over processes. Layers that saw no token are unchanged.
    """
    for name, load in routing.items():
        bias = model.get_buffer(f"{name}.gate.e_score_correction_bias".lstrip("."))
        counts = load.counts.double()
        bias += rate * torch.sign(counts.mean() - counts).to(bias)
