"""Where norms store the hidden states that tokens of a step asked for; the same for both backends."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# (ring_rows, layers, ring, num_ring_rows, layer, store_output) as the extension takes them
TapArguments = tuple[int, int, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class HiddenTap:
    """The table of a step. A token's layers take consecutive ring rows (modulo their number), in ascending order."""

    ring_rows: Tensor  # [T] int32: the token's first row in the ring, -1: it asked for nothing
    layers: Tensor  # [T, 2] int64: bit i of the 128 says that it wants layer i
    ring: Tensor  # [ring rows, H] in the dtype of the activations
    shape: tuple[int, int] = field(init=False)  # (T, H) of the rows that norms may see
    addresses: tuple[int, int, int, int] = field(init=False)  # once for all the norms of the step

    def __post_init__(self) -> None:
        num_tokens = len(self.ring_rows)
        assert self.ring_rows.dtype is torch.int32 and self.ring_rows.is_contiguous()
        assert self.layers.shape == (num_tokens, 2) and self.layers.dtype is torch.int64
        assert self.layers.is_contiguous() and self.ring.is_contiguous()
        object.__setattr__(self, "shape", (num_tokens, self.ring.shape[1]))
        tensors = (self.ring_rows, self.layers, self.ring)
        object.__setattr__(self, "addresses", (*(tensor.data_ptr() for tensor in tensors), self.ring.shape[0]))

    def of(self, rows: Tensor) -> HiddenTap:
        """The table of some of the tokens: rows [R] int64."""
        return HiddenTap(self.ring_rows[rows], self.layers[rows], self.ring)


@dataclass(frozen=True, slots=True)
class LayerTap:
    """A table at one norm of the model."""

    table: HiddenTap
    layer: int  # what the norm sees, in [0, 128)
    of_output: bool = False  # the normed row, else the residual after the addition


def tap_arguments(tap: LayerTap | None, num_tokens: int, hidden: int, dtype: torch.dtype) -> TapArguments | None:
    if tap is None:
        return None
    table = tap.table
    assert table.shape == (num_tokens, hidden) and table.ring.dtype is dtype, (table.shape, num_tokens, hidden)
    return (*table.addresses, tap.layer, tap.of_output)
