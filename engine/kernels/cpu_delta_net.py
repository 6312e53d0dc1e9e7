"""The gated delta rule and the gate of an attention on the CPU: checks of shapes, and no logic."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.delta_net import DeltaRule, RecurrentStep


def delta_net(rows: Tensor, rule: DeltaRule, step: RecurrentStep) -> Tensor:
    """Rows [T, C + HV DV + 2 HV] float32 → [T, HV DV]. A row depends, to the bit, on its sequence's tokens alone."""
    sizes, num_tokens = rule.sizes, rows.shape[0]
    _check(rows, torch.float32, num_tokens, sizes.row_size)
    _check(rule.taps, torch.float32, sizes.conv_width, sizes.channels)
    _check(rule.decay, torch.float32, sizes.value_heads)
    _check(rule.step_bias, torch.float32, sizes.value_heads)
    _check(rule.norm, torch.float32, sizes.value_dim)
    num_sequences = len(step.starts)
    _check(step.query_start, torch.int32, num_sequences + 1)
    _check(step.starts, torch.int32, num_sequences)
    _check(step.slots, torch.int32, num_tokens)
    table = step.states
    _check(table, torch.float32, table.shape[0], table.shape[1], sizes.state_size)
    assert 0 <= rule.state_layer < table.shape[1], rule.state_layer
    out = torch.empty(num_tokens, sizes.value_size)
    _C.delta_net(
        (sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.conv_width),
        (rows.data_ptr(), num_tokens, step.query_start.data_ptr(), num_sequences),
        (
            rule.taps.data_ptr(),
            rule.decay.data_ptr(),
            rule.step_bias.data_ptr(),
            rule.norm.data_ptr(),
            rule.eps,
        ),
        (
            table.data_ptr() + 4 * sizes.state_size * rule.state_layer,
            table.stride(0),
            table.shape[0],
            step.starts.data_ptr(),
            step.slots.data_ptr(),
        ),
        out.data_ptr(),
    )
    return out


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x times the logistic function of the gate, float32 of the same shape, in place; returns x."""
    _check(x, torch.float32, *gate.shape)
    _check(gate, torch.float32, *x.shape)
    _C.sigmoid_gate(x.data_ptr(), gate.data_ptr(), x.numel())
    return x


def _check(tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    assert tensor.shape == shape, (tuple(tensor.shape), shape)
