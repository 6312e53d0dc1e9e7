"""Typed functions over the extension: checks of shapes, and no logic.

On the CPU activations are float32; weights are stored in float32 or bfloat16 and multiplied in float32.
All results depend, to the bit, on a token's own row alone: neither the batch around it nor the number of threads
changes them. Functions release the GIL. Dims: T tokens, H hidden, N outputs, K inputs, I intermediate, NQ / NKV heads,
D head dim, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import _C

Error = _C.Error

PANEL_WIDTH = 16
_F32 = torch.float32
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


def set_num_threads(n: int) -> None:
    """Threads of every CPU kernel, the caller's included. Call before the first kernel."""
    _C.set_num_threads(n)


def num_threads() -> int:
    return _C.num_threads()


def isa() -> str:
    """The instruction set in use: "avx2", "avx512" or "neon"."""
    return _C.isa()


def _check_f32(tensor: Tensor, *shape: int) -> None:
    """A dense float32 CPU tensor of this shape."""
    assert tensor.dtype is _F32 and tensor.is_cpu and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    assert tensor.shape == shape, (tuple(tensor.shape), shape)


def _check_i32(tensor: Tensor, *shape: int) -> None:
    """A dense int32 CPU tensor of this shape."""
    assert tensor.dtype is torch.int32 and tensor.is_cpu and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    assert tensor.shape == shape, (tuple(tensor.shape), shape)


def _check_heads(tensor: Tensor) -> None:
    """Float32 heads [T, heads, D] on the CPU, heads of a token dense, tokens perhaps apart (a slice of a fused row)."""
    assert tensor.dtype is _F32 and tensor.is_cpu and tensor.dim() == 3, (tensor.dtype, tensor.shape)
    assert tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2], tensor.stride()


# --- dense layers -------------------------------------------------------------------------------------------------


class PackedWeight:
    """A weight [N, K] in the layout of the matrix kernel: panels of 16 rows, [ceil(N / 16), K, 16], zero padded."""

    __slots__ = ("_address", "_code", "_storage", "dtype", "in_features", "out_features")

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        assert out_features >= 1 and in_features >= 1 and dtype in _DTYPE_CODES, (out_features, in_features, dtype)
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        num_panels = -(-out_features // PANEL_WIDTH)
        self._storage = torch.empty(num_panels, in_features, PANEL_WIDTH, dtype=dtype)
        self._storage[-1].zero_()
        self._address = self._storage.data_ptr()
        self._code = _DTYPE_CODES[dtype]

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    def __repr__(self) -> str:
        return f"PackedWeight([{self.out_features}, {self.in_features}], {self.dtype})"


def pack_weight(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """weight [N, K], float32, bfloat16 or float16, as a checkpoint holds it."""
    return pack_weights([weight], dtype)


def pack_weights(weights: Sequence[Tensor], dtype: torch.dtype) -> PackedWeight:
    """Weights [Ni, K] stacked along N (fused query, key and value; gate and up), without a copy that joins them."""
    in_features = weights[0].shape[1]
    packed = PackedWeight(sum(w.shape[0] for w in weights), in_features, dtype)
    first_row = 0
    for weight in weights:
        assert weight.dim() == 2 and weight.shape[1] == in_features and weight.is_cpu, weight.shape
        assert weight.dtype in (torch.float32, torch.bfloat16, torch.float16), weight.dtype
        rows = weight.shape[0]
        dense = (weight.float() if weight.dtype is torch.float16 else weight).contiguous()
        code = _DTYPE_CODES[dense.dtype]
        _C.pack_weight(dense.data_ptr(), code, packed._address, packed._code, first_row, rows, in_features)
        first_row += rows
    return packed


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [T, K] · weightᵀ + bias [N] → [T, N], float32."""
    num_tokens = x.shape[0]
    n, k = weight.out_features, weight.in_features
    _check_f32(x, num_tokens, k)
    if out is None:
        out = torch.empty(num_tokens, n)
    else:
        _check_f32(out, num_tokens, n)
    bias_address = 0
    if bias is not None:
        _check_f32(bias, n)
        bias_address = bias.data_ptr()
    _C.linear(x.data_ptr(), weight._address, weight._code, bias_address, out.data_ptr(), num_tokens, n, k)
    return out


def embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows ids int32 [T] of the weight → [T, K] float32. An id outside [0, N) is an Error."""
    num_tokens = ids.shape[0]
    _check_i32(ids, num_tokens)
    out = torch.empty(num_tokens, weight.in_features)
    _C.gather_rows(
        ids.data_ptr(),
        weight._address,
        weight._code,
        out.data_ptr(),
        num_tokens,
        weight.out_features,
        weight.in_features,
    )
    return out


# --- norms, positions, activations --------------------------------------------------------------------------------


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x [T, H], weight [H] → x / rms(x) * weight, [T, H]; `out` may be x.

    With a residual [T, H]: residual += x in place, and the residual is what is normalised.
    """
    num_tokens, hidden = x.shape
    _check_f32(x, num_tokens, hidden)
    _check_f32(weight, hidden)
    if out is None:
        out = torch.empty(num_tokens, hidden)
    else:
        _check_f32(out, num_tokens, hidden)
    residual_address = 0
    if residual is not None:
        _check_f32(residual, num_tokens, hidden)
        residual_address = residual.data_ptr()
    _C.rms_norm(x.data_ptr(), residual_address, weight.data_ptr(), out.data_ptr(), num_tokens, hidden, eps)
    return out


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """x [T, heads, D] normalised over D in place, weight [D]; x may be a slice of a fused row."""
    num_tokens, num_heads, head_dim = x.shape
    _check_heads(x)
    _check_f32(weight, head_dim)
    _C.head_rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), num_tokens, num_heads, head_dim, eps)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates q [T, NQ, D] and k [T, NKV, D] in place (both may be slices of a fused row), half-rotation style.

    positions int32 [T]; cos_sin float32 [P, R] holds R / 2 cosines, then R / 2 sines per position. R <= D: the first
    R dimensions of a head turn. A position outside [0, P) is an Error.
    """
    num_tokens, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    num_positions, rotary_dim = cos_sin.shape
    _check_heads(q)
    _check_heads(k)
    assert k.shape[0] == num_tokens and k.shape[2] == head_dim, (q.shape, k.shape)
    _check_i32(positions, num_tokens)
    _check_f32(cos_sin, num_positions, rotary_dim)
    _C.rotary(
        q.data_ptr(),
        k.data_ptr(),
        q.stride(0),
        k.stride(0),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        num_tokens,
        num_positions,
        q_heads,
        k_heads,
        head_dim,
        rotary_dim,
    )


_SILU, _GELU_ERF, _GELU_TANH = 0, 1, 2  # as in csrc/ops/activation.h


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] → silu(gate) * up, [T, I]."""
    return _gated(gate_up, _SILU)


def gelu_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """gate_up [T, 2 I] → gelu(gate) * up, [T, I]; `tanh`: the approximation by tanh, else the exact one by erf."""
    return _gated(gate_up, _GELU_TANH if tanh else _GELU_ERF)


def _gated(gate_up: Tensor, activation: int) -> Tensor:
    num_tokens, doubled = gate_up.shape
    _check_f32(gate_up, num_tokens, doubled)
    assert doubled % 2 == 0, doubled
    out = torch.empty(num_tokens, doubled // 2)
    _C.gated_activation(gate_up.data_ptr(), out.data_ptr(), num_tokens, doubled // 2, activation)
    return out
