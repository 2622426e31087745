"""What a batch of sequences carries from one forward call to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holotron.model.config import LanguageConfig


@dataclass(slots=True)
class HybridCache:
    """Recurrent state of constant size per sequence, and keys and values that grow.

    conv[i]  (batch, conv_channels, K-1)   last pre-activation columns of xBC, activation dtype
    ssm[i]   (batch, heads, head_dim, N)   fp32
    keys[i], values[i]  (batch, kv_heads, capacity, head_dim); rows beyond `lengths` are garbage
    lengths  (batch,) int64, tokens seen

    i runs over the layer index; only layers of the right kind have an entry.
    """

    conv: dict[int, Tensor]
    ssm: dict[int, Tensor]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    lengths: Tensor

    @classmethod
    def empty(
        cls,
        config: LanguageConfig,
        batch: int,
        capacity: int = 256,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> HybridCache:
        kinds = config.hybrid_override_pattern
        mamba = [i for i, kind in enumerate(kinds) if kind == "M"]
        attention = [i for i, kind in enumerate(kinds) if kind == "*"]
        conv_shape = (batch, config.conv_channels, config.conv_kernel - 1)
        ssm_shape = (batch, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)
        kv_shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        return cls(
            conv={i: torch.zeros(conv_shape, dtype=dtype, device=device) for i in mamba},
            ssm={i: torch.zeros(ssm_shape, dtype=torch.float32, device=device) for i in mamba},
            keys={i: torch.zeros(kv_shape, dtype=dtype, device=device) for i in attention},
            values={i: torch.zeros(kv_shape, dtype=dtype, device=device) for i in attention},
            lengths=torch.zeros(batch, dtype=torch.int64, device=device),
        )

    @property
    def batch(self) -> int:
        return int(self.lengths.shape[0])

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more tokens in every sequence; capacity at least doubles when it grows."""
        need = int(self.lengths.max()) + tokens if self.batch else tokens
        for store in (self.keys, self.values):
            for i, old in store.items():
                if old.shape[2] < need:
                    new = old.new_zeros(*old.shape[:2], max(need, 2 * old.shape[2]), old.shape[3])
                    new[:, :, : old.shape[2]] = old
                    store[i] = new

    def select(self, rows: Tensor | list[int]) -> HybridCache:
        """A copy holding only these rows, in this order; repeated rows fork without sharing memory."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.lengths.device)
        conv, ssm, keys, values = ({i: t.index_select(0, index) for i, t in part.items()} for part in self._parts())
        return HybridCache(conv, ssm, keys, values, self.lengths.index_select(0, index))

    @staticmethod
    def concatenate(caches: list[HybridCache]) -> HybridCache:
        """One batch out of several, padded to the largest capacity."""
        capacity = max((t.shape[2] for c in caches for t in c.keys.values()), default=0)

        def pad(tensor: Tensor) -> Tensor:
            return torch.nn.functional.pad(tensor, (0, 0, 0, capacity - tensor.shape[2]))

        first = caches[0]
        return HybridCache(
            conv={i: torch.cat([c.conv[i] for c in caches]) for i in first.conv},
            ssm={i: torch.cat([c.ssm[i] for c in caches]) for i in first.ssm},
            keys={i: torch.cat([pad(c.keys[i]) for c in caches]) for i in first.keys},
            values={i: torch.cat([pad(c.values[i]) for c in caches]) for i in first.values},
            lengths=torch.cat([c.lengths for c in caches]),
        )

    def _parts(self) -> tuple[dict[int, Tensor], ...]:
        return self.conv, self.ssm, self.keys, self.values

    def state_bytes(self) -> int:
        """Bytes of recurrent state per sequence."""
        return sum(t[0].numel() * t.element_size() for part in (self.conv, self.ssm) for t in part.values())

    def kv_bytes(self, row: int) -> int:
        """Bytes of keys and values in use by one sequence."""
        tokens = int(self.lengths[row])
        return sum(
            tokens * t.shape[1] * t.shape[3] * t.element_size()
            for part in (self.keys, self.values)
            for t in part.values()
        )
