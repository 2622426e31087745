"""Pixel shuffle and projector, bit for bit against transformers' `nemotron_h_omni`."""

from __future__ import annotations

import pytest
import torch
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3,
    NemotronH_Omni_Reasoning_V3MultiModalProjector,
)

from holotron.model.projector import Projector, pixel_shuffle_v2


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (2, 6), (6, 4)])
def test_shuffle_equals_transformers(seed: int, rows: int, columns: int) -> None:
    x = torch.randn(3, rows, columns, 5)
    # The method reads nothing of its model.
    expected = NemotronH_Omni_Reasoning_V3.pixel_shuffle(None, x)  # type: ignore[arg-type]
    assert torch.equal(pixel_shuffle_v2(x), expected)


def test_one_hot_patch_on_an_oblong_grid() -> None:
    """Trap 13: patch (y, x), channel c moves to cell (y/2, x/2), channel (y%2, x%2, c)."""
    rows, columns, channels = 4, 10, 3
    for y, x, c in [(0, 0, 0), (3, 9, 2), (1, 6, 1), (2, 7, 0)]:
        hot = torch.zeros(1, rows, columns, channels)
        hot[0, y, x, c] = 1
        place = [0, y // 2, x // 2, (y % 2) * 2 * channels + (x % 2) * channels + c]
        assert pixel_shuffle_v2(hot).nonzero().tolist() == [place]


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (4, 3)])
def test_odd_grids_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} x {columns}"):
        pixel_shuffle_v2(torch.zeros(1, rows, columns, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_projector_equals_transformers(seed: int, dtype: torch.dtype) -> None:
    expected = NemotronH_Omni_Reasoning_V3MultiModalProjector(32, 96, 24)
    expected.layer_norm.weight.normal_()
    expected.to(dtype)
    ours = Projector(32, 96, 24).to(dtype)
    names = {"layer_norm.weight": "0.weight", "linear_1.weight": "1.weight", "linear_2.weight": "3.weight"}
    ours.load_state_dict({names[key]: value for key, value in expected.state_dict().items()})
    x = torch.randn(2, 7, 32, dtype=dtype)
    assert torch.equal(ours(x), expected(x))


@torch.no_grad()
def test_epsilon(seed: int) -> None:
    """Trap 14: with faint features 1e-5 and 1e-6 differ by far more than rounding."""
    x = torch.randn(4, 32) * 1e-3
    normed = Projector(32, 8, 8)[0](x)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(normed.double(), exact, atol=1e-6, rtol=1e-5)
    assert (normed - x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).abs().max() > 0.1
