"""A layer norm of query and key heads, each head with a weight of its own: by torch on both backends, as few models
have it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def centre_heads(rows: Tensor, weight: Tensor, eps: float) -> None:
    """Rows [T, heads D], in place: each head less its mean, by its deviation, times its row of weight [heads, D]."""
    heads = rows.unflatten(-1, weight.shape)
    heads.copy_(functional.layer_norm(heads.float(), weight.shape[1:], eps=eps).mul_(weight))
