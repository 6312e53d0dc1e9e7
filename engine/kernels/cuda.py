"""Typed functions over the extension's CUDA kernels: checks of shapes, and no logic.

The functions of engine.kernels for tensors on a device, in float32 or bfloat16 (one dtype for activations, weights and
cache; arithmetic is float32). Work is queued on torch's current stream; nothing synchronises or, where `out` is given,
allocates, and all of it can be captured in a CUDA graph. What is data of a step lives in device memory: slots of -1 and
rows of -1 are skipped, so a graph of a padded size serves every smaller step.

Dims: T tokens, H hidden, I intermediate, NQ / NKV heads, D head dim, P positions, R rotary dims, N sampled rows,
V vocabulary, K alternatives, NB blocks, L layers, BS tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.flag import Flag
from bequest.engine.kernels.hidden_tap import LayerTap, tap_arguments
from bequest.engine.kernels.host_arrays import address
from bequest.engine.kernels.kv_format import FP8, UNSCALED, KvScales
from bequest.engine.kernels.kv_view import view_of
from bequest.engine.kernels.streams import current_stream as _stream
from bequest.engine.types import IntArray

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # csrc/core/dtype.h


def address_of(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a dense device tensor of this dtype and shape."""
    assert tensor.is_cuda and tensor.dtype is dtype and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    assert tensor.shape == shape, (tuple(tensor.shape), shape)
    return tensor.data_ptr()


def _check_optional(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int:
    return 0 if tensor is None else address_of(tensor, dtype, *shape)


def _heads(tensor: Tensor, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Address, T, heads, D and token stride of heads [T, heads, D], heads of a token dense (a slice of a fused row is
    fine)."""
    num_tokens, num_heads, head_dim = tensor.shape
    distance, head_stride, stride = tensor.stride()
    assert tensor.is_cuda and tensor.dtype is dtype, tensor.dtype
    assert stride == 1 and (num_heads <= 1 or head_stride == head_dim), tensor.stride()
    return tensor.data_ptr(), num_tokens, num_heads, head_dim, distance


def _result(out: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    address_of(out, like.dtype, *shape)
    return out


# --- layers -------------------------------------------------------------------------------------------------------


def embedding(ids: Tensor, weight: Tensor, last_tokens: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Rows ids int32 [T] of weight [V, H] → [T, H].

    An id of -(row + 1) is the last token of sampler row `row`: last_tokens int32 [rows] (CudaSampler.last_tokens).
    An id outside the vocabulary gives NaN, which fails that request alone when it is sampled.
    """
    num_tokens = ids.shape[0]
    vocab_size, hidden = weight.shape
    out = _result(out, weight, num_tokens, hidden)
    num_rows = 0 if last_tokens is None else last_tokens.shape[0]
    _C.cuda_embedding(
        (
            address_of(ids, torch.int32, num_tokens),
            num_tokens,
            _check_optional(last_tokens, torch.int32, num_rows),
            num_rows,
        ),
        (address_of(weight, weight.dtype, vocab_size, hidden), vocab_size, hidden, DTYPE_CODES[weight.dtype]),
        out.data_ptr(),
        _stream(),
    )
    return out


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tap: LayerTap | None = None,
    offset: float = 0.0,
) -> Tensor:
    """x [T, H], weight [H] → x / rms(x) * (offset + weight), [T, H]; `out` may be x.

    With a residual [T, H]: residual += x in place, and the residual is what is normalised. A tap stores hidden states.
    """
    num_tokens, hidden = x.shape
    dtype = x.dtype
    out = _result(out, x, num_tokens, hidden)
    _C.cuda_rms_norm(
        (address_of(x, dtype, num_tokens, hidden), num_tokens, hidden, DTYPE_CODES[dtype]),
        (address_of(weight, dtype, hidden), eps, offset),
        _check_optional(residual, dtype, num_tokens, hidden),
        out.data_ptr(),
        tap_arguments(tap, num_tokens, hidden, dtype),
        _stream(),
    )
    return out


def norm_in_place(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
    """x [T, H] → x / rms(x) * (offset + weight), weight [H]; x may be columns of wider rows."""
    num_tokens, hidden = x.shape
    distance, stride = x.stride()
    assert x.is_cuda and stride == 1, x.stride()
    rows = (x.data_ptr(), num_tokens, hidden, DTYPE_CODES[x.dtype])
    _C.cuda_norm_in_place(rows, distance, (address_of(weight, x.dtype, hidden), eps, offset), _stream())


def tap_rows(x: Tensor, tap: LayerTap) -> None:
    """Stores hidden states x [T, H] as a norm that sees them would."""
    num_tokens, hidden = x.shape
    arguments = tap_arguments(tap, num_tokens, hidden, x.dtype)
    assert arguments is not None and not tap.of_output
    rows = (address_of(x, x.dtype, num_tokens, hidden), num_tokens, hidden, DTYPE_CODES[x.dtype])
    _C.cuda_tap_rows(rows, arguments, _stream())


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None, tap: LayerTap | None = None
) -> Tensor:
    """x [T, H], weight and bias [H] → (x - mean) / deviation * weight + bias, [T, H]; the others as in rms_norm."""
    num_tokens, hidden = x.shape
    dtype = x.dtype
    out = torch.empty_like(x)
    _C.cuda_layer_norm(
        (address_of(x, dtype, num_tokens, hidden), num_tokens, hidden, DTYPE_CODES[dtype]),
        (address_of(weight, dtype, hidden), address_of(bias, dtype, hidden), eps),
        _check_optional(residual, dtype, num_tokens, hidden),
        out.data_ptr(),
        tap_arguments(tap, num_tokens, hidden, dtype),
        _stream(),
    )
    return out


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate_up [T, 2 I] → silu(gate) * up, [T, I]."""
    return gated_activation(gate_up, "silu", out)


def gelu_mul(gate_up: Tensor, tanh: bool, out: Tensor | None = None) -> Tensor:
    """gate_up [T, 2 I] → gelu(gate) * up, [T, I]; `tanh`: the approximation by tanh, else the exact one by erf."""
    return gated_activation(gate_up, "gelu_tanh" if tanh else "gelu", out)


def gated_activation(gate_up: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """gate_up [T, 2 I] → f(gate) * up, [T, I]."""
    num_tokens, doubled = gate_up.shape
    assert doubled % 2 == 0, doubled
    out = _result(out, gate_up, num_tokens, doubled // 2)
    rows = (address_of(gate_up, gate_up.dtype, num_tokens, doubled), num_tokens, doubled, DTYPE_CODES[gate_up.dtype])
    _C.cuda_gated_activation(rows, out.data_ptr(), (0, 0), ACTIVATION_CODES[activation], _stream())
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """f(x) in place, any shape; returns x."""
    _C.cuda_activate(
        address_of(x, x.dtype, *x.shape), DTYPE_CODES[x.dtype], x.numel(), ACTIVATION_CODES[activation], _stream()
    )
    return x


# --- queries, keys and values -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Norms of query and key heads: weights [D], to which the offset is added."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0


def prepare_qkv(
    qkv: Tensor,
    num_q_heads: int,
    kv_cache: Tensor,
    layer: int,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    norm: QkNorm | None = None,
    scales: KvScales = UNSCALED,
    query_scales: Tensor | None = None,
) -> Tensor:
    """All that lies between the fused projection qkv [T, (NQ + 2 NKV) D] and the attention, in one launch.

    Query and key heads are normalised (if `norm`) and rotated by cos_sin float32 [P, R] at positions int32 [T] (if
    given), queries then multiplied by query_scales float32 [P] at theirs (if given); keys and values go to kv_cache
    [NB, L, 2, NKV, BS, D] at slot_mapping int64 [T], those of slot -1 nowhere (in an fp8 cache divided by their scales
    and at most ±448).
    Queries are changed in place; returns them as a view [T, NQ, D]. The key and value parts of qkv stay as they are.
    """
    num_tokens, width = qkv.shape
    view = view_of(kv_cache)
    num_kv_heads, head_dim = view.num_kv_heads, view.head_dim
    assert width == (num_q_heads + 2 * num_kv_heads) * head_dim, (width, num_q_heads, num_kv_heads, head_dim)
    heads = qkv.view(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads[:, :num_q_heads], heads[:, num_q_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    slots, to = _store(kv_cache, layer, slot_mapping, scales, qkv)
    normed = head_norm(norm, qkv.dtype, head_dim)
    _prepare(q, k, v, (normed, rotation(positions, cos_sin, num_tokens, query_scales), slots, to))
    return q


def write_kv(
    k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor, scales: KvScales = UNSCALED
) -> None:
    """Stores k, v [T, NKV, D] (views of a fused row are fine) in kv_cache [NB, L, 2, NKV, BS, D], as prepare_qkv does.

    slot_mapping int64 [T]: block * BS + offset; -1 is skipped.
    """
    slots, to = _store(kv_cache, layer, slot_mapping, scales, k)
    _prepare(k[:, :0], k, v, (None, _NO_ROTATION, slots, to))


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates q [T, NQ, D] and k [T, NKV, D] in place (both may be slices of a fused row), half-rotation style.

    positions int32 [T]; cos_sin float32 [P, R] holds R / 2 cosines, then R / 2 sines per position. R <= D: the first
    R dimensions of a head turn.
    """
    _prepare(q, k, None, (None, rotation(positions, cos_sin, q.shape[0]), 0, None))


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """x [T, heads, D] normalised over D in place, weight [D]; x may be a slice of a fused row."""
    address = address_of(weight, x.dtype, x.shape[2])
    _prepare(x, x[:, :0], None, ((address, address, eps, 0.0), _NO_ROTATION, 0, None))


HeadNorm = tuple[int, int, float, float]  # weights, eps, offset
Rotation = tuple[int, int, int, int]  # positions, cosines and sines, R, scales of queries
LayerCache = tuple[_C.KvCacheView, int, float, float]  # cache, layer, scales of keys and values
Preparation = tuple[HeadNorm | None, Rotation, int, LayerCache | None]  # the third are the slots
_NO_ROTATION: Rotation = (0, 0, 0, 0)


def head_norm(norm: QkNorm | None, dtype: torch.dtype, head_dim: int) -> HeadNorm | None:
    """As the extension takes it."""
    if norm is None:
        return None
    q_weight, k_weight = (address_of(weight, dtype, head_dim) for weight in (norm.q_weight, norm.k_weight))
    return q_weight, k_weight, norm.eps, norm.offset


def rotation(
    positions: Tensor, cos_sin: Tensor | None, num_tokens: int, query_scales: Tensor | None = None
) -> Rotation:
    """As the extension takes it."""
    places = address_of(positions, torch.int32, num_tokens)
    if cos_sin is None:
        assert query_scales is None, "no model scales queries that do not turn"
        return places, 0, 0, 0
    num_positions, rotary_dim = cos_sin.shape
    table = address_of(cos_sin, torch.float32, num_positions, rotary_dim)
    scales = 0 if query_scales is None else address_of(query_scales, torch.float32, num_positions)
    return places, table, rotary_dim, scales


def _store(
    kv_cache: Tensor, layer: int, slot_mapping: Tensor, scales: KvScales, rows: Tensor
) -> tuple[int, LayerCache]:
    """Where the keys and values of these rows [T, …] go: the slots' address, and the layer."""
    assert kv_cache.is_cuda and kv_cache.dtype in (rows.dtype, FP8), (kv_cache.dtype, rows.dtype)
    slots = address_of(slot_mapping, torch.int64, rows.shape[0])
    return slots, (view_of(kv_cache).bound, layer, scales.key, scales.value)


def _prepare(q: Tensor, k: Tensor, v: Tensor | None, steps: Preparation) -> None:
    """prepare_qkv over separate heads; without a cache keys are changed in place and values are not needed."""
    dtype = q.dtype
    q_heads, k_heads = _heads(q, dtype), _heads(k, dtype)
    assert k_heads[1] == q_heads[1] and k_heads[3] == q_heads[3], (q.shape, k.shape)
    v_heads = None if v is None else _heads(v, dtype)
    assert steps[3] is None or (v_heads is not None and v_heads[1:4] == k_heads[1:4])
    _C.cuda_prepare_qkv(q_heads, k_heads, v_heads, DTYPE_CODES[dtype], steps, _stream())


# --- blocks -------------------------------------------------------------------------------------------------------


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    """Copies blocks inside a cache, all layers, in one launch: pairs int32 [C, 2] (source, destination), on the device.

    A source of -1 is skipped. The copies have no order: no destination may occur twice or be a source.
    """
    num_pairs = pairs.shape[0]
    assert kv_cache.is_cuda and kv_cache.is_contiguous()
    cache = (kv_cache.data_ptr(), kv_cache.shape[0])
    block_bytes = kv_cache.nbytes // kv_cache.shape[0]
    _C.cuda_copy_blocks(cache, block_bytes, address_of(pairs, torch.int32, num_pairs, 2), num_pairs, _stream())


class LateCopy:
    """Copies from pinned memory to the device, int32 [N] both, that wait on the device until their content is there.

    Queueing one waits until the one before is done, so the source may be written behind it. What it takes is one call:
    others want the interpreter at that moment.
    """

    def __init__(self, source: Tensor, destination: Tensor) -> None:
        assert source.is_pinned() and source.is_contiguous() and source.dtype == torch.int32
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._flag_address = self._flag.data_ptr()
        self._arrived = torch.zeros(1, dtype=torch.int32, device=destination.device)
        self._kept = (source, destination)
        self._num_words = source.numel()
        into = address_of(destination, torch.int32, source.numel())
        self._copy = _C.CudaLateCopy(self._flag_address, source.data_ptr(), into, self._arrived.data_ptr())

    def pass_by(self) -> None:
        """What is queued on the current stream comes before copies beside it that are queued behind this one."""
        self._copy.pass_by(_stream())

    def queue(self, num_words: int, value: int) -> None:
        """Queues the copy of the first `num_words` on the current stream, for when the flag has the value."""
        assert num_words <= self._num_words
        self._copy.queue(4 * num_words, value, _stream())

    def queue_beside(self, before: LateCopy, num_words: int, value: int, stream: int) -> None:
        """The same on another stream: what is queued next on the current one waits for the copy. What reads the
        destination of the copy before was queued when the copy `before` was."""
        assert num_words <= self._num_words
        self._copy.queue_beside(before._copy, 4 * num_words, value, stream, _stream())

    def flag(self, value: int) -> Flag:
        """Says that what was written to the source may be copied. For any thread."""
        return Flag(self._flag_address, value)


def swap_blocks(source_cache: Tensor, destination_cache: Tensor, pairs: IntArray) -> None:
    """Copies blocks between a cache on the device and one in pinned host memory: pairs [C, 2], a host array.

    Queued on the current stream and done by the copy engines. A block outside its cache is an Error.
    """
    assert pairs.dtype == np.int32 and pairs.flags.c_contiguous and pairs.ndim == 2 and pairs.shape[1] == 2
    assert source_cache.is_contiguous() and destination_cache.is_contiguous()
    assert source_cache.shape[1:] == destination_cache.shape[1:] and source_cache.dtype == destination_cache.dtype
    assert all(cache.is_cuda or cache.is_pinned() for cache in (source_cache, destination_cache))
    source = (source_cache.data_ptr(), source_cache.shape[0])
    destination = (destination_cache.data_ptr(), destination_cache.shape[0])
    _C.cuda_swap_blocks(source, destination, source_cache[0].nbytes, address(pairs), pairs.shape[0], _stream())


# --- log-probabilities --------------------------------------------------------------------------------------------


def logit_rows(logits: Tensor) -> tuple[int, int, int, int, int]:
    """Address, N, V, row stride and dtype code of logits [N, V], float32 or bfloat16."""
    num, vocab_size = logits.shape
    distance, stride = logits.stride()
    assert logits.is_cuda and stride == 1, logits.stride()
    return logits.data_ptr(), num, vocab_size, distance, DTYPE_CODES[logits.dtype]


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Raw log-probabilities on the device: of the chosen tokens, their ranks (1 is best), and the K best tokens."""

    chosen: Tensor  # float32 [N]
    rank: Tensor  # int32 [N]
    top_ids: Tensor  # int32 [N, K], best first, equal ones by lower id
    top: Tensor  # float32 [N, K]

    @staticmethod
    def empty(num: int, top: int, device: torch.device) -> DeviceLogprobs:
        return DeviceLogprobs(
            torch.empty(num, dtype=torch.float32, device=device),
            torch.empty(num, dtype=torch.int32, device=device),
            torch.empty(num, top, dtype=torch.int32, device=device),
            torch.empty(num, top, dtype=torch.float32, device=device),
        )


def logprobs(logits: Tensor, chosen: Tensor, top: int, out: DeviceLogprobs | None = None) -> DeviceLogprobs:
    """Log-softmax of logits [N, V]: of the chosen tokens int32 [N], their ranks, and the K = `top` <= 1024 best.

    A row with NaN or +inf, or with a chosen token outside the vocabulary (padding: -1), gives NaN, rank 1 and tokens 0.
    """
    num = logits.shape[0]
    if out is None:
        out = DeviceLogprobs.empty(num, top, logits.device)
    places = (
        address_of(out.chosen, torch.float32, num),
        address_of(out.rank, torch.int32, num),
        address_of(out.top_ids, torch.int32, num, top),
        address_of(out.top, torch.float32, num, top),
    )
    _C.cuda_logprobs(logit_rows(logits), address_of(chosen, torch.int32, num), top, places, _stream())
    return out
