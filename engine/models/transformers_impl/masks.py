"""What a mask of transformers lets a token see: all tokens before it, or a window of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# (batch, head, query, key) → whether the query sees the key; indices broadcast
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SeenMask:
    """Takes the place of a mask while a model is watched: layers hand it on to their attention."""

    window: int | None  # tokens back, itself included; 0: all; None: neither


def window_of(mask: MaskFunction, num_positions: int) -> int | None:
    """The window of a causal mask over so many positions, 0 where it hides nothing. None: it is another kind."""
    last = num_positions - 1
    window = int(_row(mask, last, num_positions).sum())
    if window == 0:
        return None
    for query in {last, last // 2, 0, 1, window - 1, window, window + 1}:
        if query > last:
            continue
        keys = torch.arange(num_positions)
        if not torch.equal(_row(mask, query, num_positions), (keys <= query) & (keys > query - window)):
            return None
    return 0 if window == num_positions else window


def _row(mask: MaskFunction, query: int, num_positions: int) -> Tensor:
    """[num_positions] bool: which keys the query sees."""
    zero = torch.tensor(0)
    seen = mask(zero, zero, torch.tensor(query), torch.arange(num_positions))
    return seen.expand(num_positions).bool()
