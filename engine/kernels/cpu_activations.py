"""Activations on the CPU, plain and gated: functions of one element, whose bits do not depend on where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine import _C

# As in csrc/ops/activation.h.
ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "clamped_swish": 4}


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] → silu(gate) * up, [T, I]."""
    return gated_activation(gate_up, "silu")


def gelu_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """gate_up [T, 2 I] → gelu(gate) * up, [T, I]; `tanh`: the approximation by tanh, else the exact one by erf."""
    return gated_activation(gate_up, "gelu_tanh" if tanh else "gelu")


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 I] → f(gate) * up, [T, I]."""
    num_tokens, doubled = gate_up.shape
    _check(gate_up)
    assert doubled % 2 == 0, doubled
    out = torch.empty(num_tokens, doubled // 2)
    code = ACTIVATION_CODES[activation]
    _C.gated_activation(gate_up.data_ptr(), out.data_ptr(), num_tokens, doubled // 2, code)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """f(x) in place, any shape; returns x."""
    _check(x)
    _C.activate(x.data_ptr(), x.numel(), ACTIVATION_CODES[activation])
    return x


def _check(tensor: Tensor) -> None:
    assert tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
