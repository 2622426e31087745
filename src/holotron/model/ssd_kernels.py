"""The scan of ssd.py through Triton kernels on CUDA: mamba-ssm's if it is installed, else fla-core's.

Written from their signatures (mamba-ssm 2.3, fla-core 0.6) and tested on a CPU against slow stand-ins that keep the
kernels' contracts. **The kernels themselves were never run: no GPU was at hand.** Run `pytest -m gpu
tests/model/test_ssd_kernels.py` on yours before you rely on them.

Both multiply fp32 in TF32 (10 bits), so they serve only where the caller's activations are 16 bit anyway, or where
`torch.set_float32_matmul_precision` allows it. They get fp32 tensors: states between chunks take the dtype of C.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

Scan = Callable[..., tuple[Tensor, Tensor]]


@cache
def installed() -> Scan | None:
    """A function of the arguments of `ssd.ssd_chunked`, or None. An installation that does not import is reported."""
    for module, name, adapt in (
        ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", through_mamba),
        ("fla.ops.simple_gla", "chunk_simple_gla", through_fla),
    ):
        try:
            kernel = getattr(import_module(module), name)
        except ModuleNotFoundError as missing:
            if missing.name != module.split(".")[0]:
                logging.getLogger(__name__).warning("%s is installed but does not import: %s", module, missing)
            continue
        except Exception as error:  # wheels built for another torch or CUDA fail in many ways
            logging.getLogger(__name__).warning("%s is installed but does not import: %s", module, error)
            continue
        return lambda *arguments, adapt=adapt, kernel=kernel: adapt(kernel, *arguments)
    return None


def serves(exact: bool) -> bool:
    """Whether kernels that round products to TF32 may be used: `exact` False, or torch's own precision allows it."""
    return (not exact or torch.get_float32_matmul_precision() != "highest") and installed() is not None


def document_numbers(segments: Tensor) -> Tensor:
    """(B, L) -> (B, L) int32 counting the documents of each row from 0, padding as one more: the kernel takes the
    initial state for that of document 0."""
    changes = torch.zeros_like(segments, dtype=torch.int32)
    changes[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return changes.cumsum(1, dtype=torch.int32)


def document_starts(segments: Tensor) -> Tensor:
    """(B, L) -> int64 starts of all documents in the rows laid end to end, then B * L."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = starts.flatten().nonzero().squeeze(-1)
    return torch.cat([first, first.new_tensor([segments.numel()])])


def through_mamba(
    kernel: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    chunk_size: int,
    state: Tensor,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gating is left to the mixer, whose norm has groups; dt comes after softplus."""
    y, last = kernel(
        x.contiguous(),
        dt.contiguous(),
        a,
        b.contiguous(),
        c.contiguous(),
        chunk_size,
        D=d,
        initial_states=state.contiguous(),
        seq_idx=None if segments is None else document_numbers(segments),
        dt_softplus=False,
        return_final_states=True,
    )
    return y, last


def through_fla(
    kernel: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    chunk_size: int,
    state: Tensor,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As gated linear attention with a scalar gate per head: q = C, k = B, v = dt x, log gate = dt A, scale 1.

    Its states are (sequence, H, N, P). Documents go in as one row with their starts. The kernel picks its own chunk.
    """
    per = x.shape[2] // b.shape[2]
    inputs = [c.repeat_interleave(per, 2), b.repeat_interleave(per, 2), x * dt.unsqueeze(-1), dt * a]
    first, starts = state.transpose(-1, -2), None
    if segments is not None:
        starts = document_starts(segments)
        inputs = [t.flatten(0, 1).unsqueeze(0) for t in inputs]
        opening = starts[:-1] % segments.shape[1] == 0  # documents at the start of a row continue its state
        first = first.new_zeros(len(starts) - 1, *first.shape[1:]).index_put((opening.nonzero().squeeze(-1),), first)
    q, k, v, g = (t.contiguous() for t in inputs)
    out, last = kernel(
        q, k, v, g=g, scale=1.0, initial_state=first.contiguous(), output_final_state=True, cu_seqlens=starts
    )
    if segments is not None and starts is not None:
        out, last = out.view(x.shape), last[starts[1:] % segments.shape[1] == 0]
    return out + d.unsqueeze(-1) * x, last.transpose(-1, -2)
