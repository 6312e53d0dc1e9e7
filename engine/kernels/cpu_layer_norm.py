"""Layer norm on the CPU. A row's result depends on the row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.hidden_tap import LayerTap, tap_arguments


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None, tap: LayerTap | None = None
) -> Tensor:
    """x [T, H], weight and bias [H] → (x - mean) / deviation * weight + bias, [T, H].

    With a residual [T, H]: residual += x in place, and the residual is what is normalised. A tap stores hidden states.
    """
    num_tokens, hidden = x.shape
    _check(x, num_tokens, hidden)
    _check(weight, hidden)
    _check(bias, hidden)
    out = torch.empty(num_tokens, hidden)
    residual_address = 0
    if residual is not None:
        _check(residual, num_tokens, hidden)
        residual_address = residual.data_ptr()
    tapped = None if tap is None else tap_arguments(tap, num_tokens, hidden, x.dtype)
    norm = (weight.data_ptr(), bias.data_ptr(), eps)
    _C.layer_norm((x.data_ptr(), num_tokens, hidden), norm, residual_address, out.data_ptr(), tapped)
    return out


def _check(tensor: Tensor, *shape: int) -> None:
    """A dense float32 CPU tensor of this shape."""
    assert tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    assert tensor.shape == shape, (tuple(tensor.shape), shape)
