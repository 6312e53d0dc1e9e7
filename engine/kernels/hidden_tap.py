"""Where norms store the hidden states that tokens of a step asked for; the same for both backends."""

from __future__ import annotations

from dataclasses import dataclass

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

    def of(self, rows: Tensor) -> HiddenTap:
        """The table of some of the tokens: rows [R] int64."""
        return HiddenTap(self.ring_rows[rows], self.layers[rows], self.ring)


@dataclass(frozen=True, slots=True)
class LayerTap:
    """A table at one norm of the model."""

    table: HiddenTap
    layer: int  # what the norm sees, in [0, 128)
    of_output: bool = False  # the normed row, else the residual after the addition


def tap_arguments(tap: LayerTap | None, num_tokens: int, hidden: int, dtype: torch.dtype) -> TapArguments:
    if tap is None:
        return (0, 0, 0, 0, 0, False)
    table = tap.table
    assert table.ring_rows.shape == (num_tokens,) and table.ring_rows.dtype is torch.int32
    assert table.layers.shape == (num_tokens, 2) and table.layers.dtype is torch.int64
    assert table.ring.shape[1] == hidden and table.ring.dtype is dtype
    assert table.ring_rows.is_contiguous() and table.layers.is_contiguous() and table.ring.is_contiguous()
    return (
        table.ring_rows.data_ptr(),
        table.layers.data_ptr(),
        table.ring.data_ptr(),
        table.ring.shape[0],
        tap.layer,
        tap.of_output,
    )
