"""The gated delta rule and the gate of an attention on a GPU: checks of shapes, and no logic."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cuda import DTYPE_CODES, address_of
from bequest.engine.kernels.delta_net import DeltaRule, RecurrentStep
from bequest.engine.kernels.streams import current_stream


def delta_net(rows: Tensor, rule: DeltaRule, step: RecurrentStep) -> Tensor:
    """Rows [T, C + HV DV + 2 HV] → [T, HV DV], float32 or bfloat16. Sequences without tokens are padding; so are tokens
    behind the last one of a sequence, whose results are zeros."""
    sizes, num_tokens, num_sequences = rule.sizes, rows.shape[0], len(step.starts)
    out = torch.empty(num_tokens, sizes.value_size, dtype=rows.dtype, device=rows.device)
    table, f32 = step.states, torch.float32
    described = (sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.conv_width)
    scratch = torch.empty(
        _C.cuda_delta_net_scratch(described, num_tokens, step.one_each), dtype=f32, device=rows.device
    )
    states = address_of(table, f32, table.shape[0], table.shape[1], sizes.state_size)
    assert 0 <= rule.state_layer < table.shape[1], rule.state_layer
    _C.cuda_delta_net(
        described,
        (
            address_of(rows, rows.dtype, num_tokens, sizes.row_size),
            num_tokens,
            address_of(step.query_start, torch.int32, num_sequences + 1),
            num_sequences,
        ),
        (
            address_of(rule.taps, f32, sizes.conv_width, sizes.channels),
            address_of(rule.decay, f32, sizes.value_heads),
            address_of(rule.step_bias, f32, sizes.value_heads),
            address_of(rule.norm, f32, sizes.value_dim),
            rule.eps,
        ),
        (
            states + 4 * sizes.state_size * rule.state_layer,
            table.stride(0),
            table.shape[0],
            address_of(step.starts, torch.int32, num_sequences),
            address_of(step.slots, torch.int32, num_tokens),
        ),
        (out.data_ptr(), DTYPE_CODES[rows.dtype], step.one_each, scratch.data_ptr()),
        current_stream(),
    )
    return out


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x times the logistic function of the gate, of the same shape and dtype, in place; returns x."""
    gate_address = address_of(gate, x.dtype, *x.shape)
    _C.cuda_sigmoid_gate(
        address_of(x, x.dtype, *gate.shape), gate_address, DTYPE_CODES[x.dtype], x.numel(), current_stream()
    )
    return x
