"""Typed functions over the extension: checks of shapes, and no logic.

On the CPU activations are float32; weights are stored in float32, bfloat16 or the codes of a quantised file, and
multiplied in float32; codes also as integers, with x rounded to 16 bits. A chip with matrix units multiplies bfloat16
weights by them: x is rounded to bfloat16, sums are float32.
All results depend, to the bit, on a token's own row alone: neither the batch around it nor the number of threads
changes them. Functions release the GIL. Dims: T tokens, H hidden, N outputs, K inputs, I intermediate, NQ / NKV heads,
D head dim, P positions, S sequences, NB blocks, L layers, BS tokens per block, MB blocks per row, V vocabulary.
Host arrays (lengths, tables, rows) are int32, numpy or torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cpu_activations import activate as activate
from bequest.engine.kernels.cpu_activations import gated_activation as gated_activation
from bequest.engine.kernels.cpu_activations import gelu_mul as gelu_mul
from bequest.engine.kernels.cpu_activations import silu_mul as silu_mul
from bequest.engine.kernels.cpu_layer_norm import layer_norm as layer_norm
from bequest.engine.kernels.cpu_sampler import Sampler as Sampler
from bequest.engine.kernels.cpu_sampler import logprobs as logprobs
from bequest.engine.kernels.cpu_weights import PackedWeight
from bequest.engine.kernels.cpu_weights import QuantisedRows as QuantisedRows
from bequest.engine.kernels.cpu_weights import advise_large_pages as advise_large_pages
from bequest.engine.kernels.cpu_weights import dot as dot
from bequest.engine.kernels.cpu_weights import multiplies_integers as multiplies_integers
from bequest.engine.kernels.cpu_weights import multiplies_tiles as multiplies_tiles
from bequest.engine.kernels.cpu_weights import pack_quantised as pack_quantised
from bequest.engine.kernels.cpu_weights import pack_weight as pack_weight
from bequest.engine.kernels.cpu_weights import pack_weights as pack_weights
from bequest.engine.kernels.hidden_tap import LayerTap, tap_arguments
from bequest.engine.kernels.host_arrays import HostInts, host_ints
from bequest.engine.kernels.kv_format import UNSCALED, KvScales
from bequest.engine.kernels.kv_view import view_of

Error = _C.Error
WITH_CUDA: bool = _C.with_cuda  # whether this build has the CUDA kernels

_F32 = torch.float32


def set_num_threads(n: int) -> None:
    """Threads of every CPU kernel, the caller's included. Call before the first kernel."""
    _C.set_num_threads(n)


def keep_freed_memory() -> None:
    """Makes malloc keep what steps free for the next ones. Call when the weights are loaded."""
    _C.keep_freed_memory()


def populate_pages(tensor: Tensor, begin: int, end: int) -> bool:
    """Gives bytes [begin, end) of a tensor their memory and leaves their content alone. False: the system cannot."""
    assert tensor.is_cpu and tensor.is_contiguous() and 0 <= begin <= end <= tensor.nbytes, (begin, end)
    return _C.populate_pages(tensor.data_ptr() + begin, end - begin)


def num_threads() -> int:
    return _C.num_threads()


def isa() -> str:
    """The instruction set in use: "avx2", "avx512", "amx" (AVX-512 and matrix units) or "neon"."""
    return _C.isa()


def _check_f32(tensor: Tensor, *shape: int) -> None:
    """A dense float32 CPU tensor of this shape."""
    assert tensor.dtype is _F32 and tensor.is_cpu and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    assert tensor.shape == shape, (tuple(tensor.shape), shape)


def _check_rows(rows: Tensor, width: int) -> tuple[int, int, int]:
    """Dense float32 rows on the CPU, perhaps apart or overlapping. Returns their address, number and distance."""
    distance, stride = rows.stride()
    num_rows, columns = rows.shape
    assert rows.dtype is _F32 and rows.is_cpu and stride == 1 and columns == width, rows.shape
    return rows.data_ptr(), num_rows, distance


def _check_bias(bias: Tensor | None, size: int) -> int:
    """The address of a bias [size], 0 where there is none."""
    if bias is None:
        return 0
    _check_f32(bias, size)
    return bias.data_ptr()


def _check_i32(tensor: Tensor, *shape: int) -> None:
    """A dense int32 CPU tensor of this shape."""
    assert tensor.dtype is torch.int32 and tensor.is_cpu and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    assert tensor.shape == shape, (tuple(tensor.shape), shape)


def _check_heads(tensor: Tensor) -> tuple[int, int, int, int, int]:
    """Float32 heads [T, heads, D] on the CPU, heads of a token dense, tokens perhaps apart (a slice of a fused row).

    Returns their address, T, heads, D and the distance of tokens."""
    num_tokens, num_heads, head_dim = tensor.shape
    token_stride, head_stride, stride = tensor.stride()
    assert tensor.dtype is _F32 and tensor.is_cpu, tensor.dtype
    assert stride == 1 and (num_heads == 1 or head_stride == head_dim), tensor.stride()
    return tensor.data_ptr(), num_tokens, num_heads, head_dim, token_stride


# --- dense layers -------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [T, K] · weightᵀ + bias [N] → [T, N], float32. Rows of x may be apart or overlap."""
    rows = _check_rows(x, weight.in_features)
    if out is None:
        out = torch.empty(rows[1], weight.out_features)  # of a tuple it would take longer than the call below
    else:
        _check_f32(out, rows[1], weight.out_features)
    bias_address = 0 if bias is None else _check_bias(bias, weight.out_features)
    _C.linear(rows, weight._matrix, bias_address, out.data_ptr())
    return out


def gated_linear(x: Tensor, weight: PackedWeight, activation: str, bias: Tensor | None = None) -> Tensor:
    """f(x · gateᵀ) * (x · upᵀ): x [T, K], weight [2 I, K] of the gate's rows, then the up's, bias [2 I] → [T, I].

    To the bit what `linear` and the gated activation give, or, over a weight in tiles, to 2^-13; the weight must be one
    that can (`can_gate`).
    """
    assert weight.can_gate, weight
    out = torch.empty(x.shape[0], weight.out_features // 2)
    _finished_linear(x, weight, activation, bias, out, gated=True)
    return out


def activated_linear(
    x: Tensor, weight: PackedWeight, activation: str, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """f(x [T, K] · weightᵀ + bias [N]) → [T, N]. Rows of x may be apart or overlap.

    To 2^-13 what `linear` and `activate` give: a product that follows rounds to 2^-9. The weight must be one that can
    (`can_activate`).
    """
    assert weight.can_activate, weight
    if out is None:
        out = torch.empty(x.shape[0], weight.out_features)
    else:
        _check_f32(out, x.shape[0], weight.out_features)
    _finished_linear(x, weight, activation, bias, out, gated=False)
    return out


def _finished_linear(
    x: Tensor, weight: PackedWeight, activation: str, bias: Tensor | None, out: Tensor, gated: bool
) -> None:
    rows = _check_rows(x, weight.in_features)
    bias_address = _check_bias(bias, weight.out_features)
    _C.finished_linear(rows, weight._matrix, bias_address, out.data_ptr(), ACTIVATION_CODES[activation], gated)


def feed_forward(
    x: Tensor,
    up: PackedWeight,
    up_bias: Tensor | None,
    down: PackedWeight,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
) -> Tensor:
    """x [T, K], up [I, K] with bias [I], or gate and up [2 I, K], down [N, I] with bias [N] → [T, N].

    To the bit what `activated_linear` or `gated_linear` and then `linear` give, whose weights must be in tiles.
    """
    num_tokens = x.shape[0]
    inner = down.in_features
    assert up.tiles and down.tiles and up.out_features == (2 * inner if gated else inner), (up, down)
    assert up.can_gate or not gated, up
    _check_f32(x, num_tokens, up.in_features)
    out = torch.empty(num_tokens, down.out_features)
    _C.feed_forward(
        (x.data_ptr(), num_tokens, up.in_features),
        (up._matrix, _check_bias(up_bias, up.out_features)),
        (down._matrix, _check_bias(down_bias, down.out_features)),
        out.data_ptr(),
        ACTIVATION_CODES[activation],
        gated,
    )
    return out


def embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows ids int32 [T] of the weight → [T, K] float32. An id outside [0, N) is an Error."""
    num_tokens = ids.shape[0]
    _check_i32(ids, num_tokens)
    out = torch.empty(num_tokens, weight.in_features)
    _C.gather_rows(ids.data_ptr(), num_tokens, weight._matrix, out.data_ptr())
    return out


# --- norms, positions, activations --------------------------------------------------------------------------------


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tap: LayerTap | None = None,
) -> Tensor:
    """x [T, H], weight [H] → x / rms(x) * weight, [T, H]; `out` may be x.

    With a residual [T, H]: residual += x in place, and the residual is what is normalised. A tap stores hidden states.
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
    tapped = None if tap is None else tap_arguments(tap, num_tokens, hidden, x.dtype)
    rows = (x.data_ptr(), num_tokens, hidden)
    _C.rms_norm(rows, (weight.data_ptr(), 0, eps), residual_address, out.data_ptr(), tapped)
    return out


def tap_rows(x: Tensor, tap: LayerTap) -> None:
    """Stores hidden states x [T, H] as a norm that sees them would."""
    num_tokens, hidden = x.shape
    _check_f32(x, num_tokens, hidden)
    arguments = tap_arguments(tap, num_tokens, hidden, x.dtype)
    assert arguments is not None and not tap.of_output
    _C.tap_rows((x.data_ptr(), num_tokens, hidden), arguments)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """x [T, heads, D] normalised over D in place, weight [D]; x may be a slice of a fused row."""
    heads = _check_heads(x)
    _check_f32(weight, heads[3])
    _C.head_rms_norm(heads, weight.data_ptr(), eps)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, query_scales: Tensor | None = None) -> None:
    """Rotates q [T, NQ, D] and k [T, NKV, D] in place (both may be slices of a fused row), half-rotation style.

    positions int32 [T]; cos_sin float32 [P, R] holds R / 2 cosines, then R / 2 sines per position. R <= D: the first
    R dimensions of a head turn. Whole queries are then multiplied by query_scales float32 [P] at their position. A
    position outside [0, P) is an Error.
    """
    q_heads, k_heads = _check_heads(q), _check_heads(k)
    num_tokens, head_dim = q_heads[1], q_heads[3]
    num_positions, rotary_dim = cos_sin.shape
    assert k_heads[1] == num_tokens and k_heads[3] == head_dim, (q.shape, k.shape)
    _check_i32(positions, num_tokens)
    _check_f32(cos_sin, num_positions, rotary_dim)
    if query_scales is not None:
        _check_f32(query_scales, num_positions)
    scales = 0 if query_scales is None else query_scales.data_ptr()
    _C.rotary(q_heads, k_heads, positions.data_ptr(), (cos_sin.data_ptr(), num_positions, rotary_dim), scales)


# --- attention, cache ----------------------------------------------------------------------------------


def _head_rows(rows: Tensor, *shape: int) -> tuple[int, int, int]:
    """Float32 [T, heads, D], whose rows are dense and perhaps apart. Returns their address, T and their distance."""
    distance, head_stride, stride = rows.stride()
    assert rows.shape == shape, (tuple(rows.shape), shape)
    assert rows.dtype is _F32 and stride == 1 and (shape[1] == 1 or head_stride == shape[2]), rows.stride()
    return rows.data_ptr(), shape[0], distance


def write_kv(
    k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor, scales: KvScales = UNSCALED
) -> None:
    """Stores k, v f32 [T, NKV, D] (views of a fused qkv row are fine) in kv_cache [NB, L, 2, NKV, BS, D], f32, f16,
    bf16 or fp8; in fp8 divided by their scales and at most ±448, in f16 at most ±65504.

    slot_mapping int64 [T]: block * BS + offset; -1 is skipped, anything else outside the cache is an Error.
    """
    num_tokens = slot_mapping.shape[0]
    view = view_of(kv_cache)
    shape = (num_tokens, view.num_kv_heads, view.head_dim)
    assert slot_mapping.dtype is torch.int64 and slot_mapping.is_contiguous()
    to = (view.bound, layer, scales.key, scales.value)
    _C.write_kv(_head_rows(k, *shape), _head_rows(v, *shape), slot_mapping.data_ptr(), to)


def copy_blocks(kv_cache: Tensor, pairs: HostInts) -> None:
    """Copies blocks inside a cache, all layers: pairs [C, 2] of (source, destination).

    The copies have no order: a destination that occurs twice, or that is also a source, is an Error.
    """
    swap_blocks(kv_cache, kv_cache, pairs)


def swap_blocks(source_cache: Tensor, destination_cache: Tensor, pairs: HostInts) -> None:
    """Copies blocks from one cache to another of the same block shape: pairs [C, 2] of (source, destination)."""
    address, (num_pairs, two) = host_ints(pairs)
    assert two == 2 and source_cache.is_contiguous() and destination_cache.is_contiguous()
    assert source_cache.shape[1:] == destination_cache.shape[1:] and source_cache.dtype == destination_cache.dtype
    source = (source_cache.data_ptr(), source_cache.shape[0])
    destination = (destination_cache.data_ptr(), destination_cache.shape[0])
    _C.copy_blocks(source, destination, source_cache[0].nbytes, address, num_pairs)


class AttentionPlan(AttentionWork):
    """The work of one step's attention, found once and used by every layer (and by one call at a time).

    query_start [S + 1], seq_lens [S] (computed tokens after the step), block_tables [S, MB]. Query i of a sequence is
    at position seq_len - query_len + i; it sees all keys, or with `causal` those up to itself, or with `window` the
    last `window` of these. Sequences without queries are allowed. num_blocks is that of the cache.

    `bfloat16` allows products to be rounded to it, as those with weights of that type are: it is done on a chip with
    matrix units (`isa()` is "amx").
    """

    __slots__ = ("_plan", "_shape", "head_dim", "num_kv_heads", "num_q_heads", "num_tokens")

    def __init__(
        self,
        query_start: HostInts,
        seq_lens: HostInts,
        block_tables: HostInts,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        causal: bool = True,
        window: int = 0,
        bfloat16: bool = False,
    ) -> None:
        starts, (num_starts,) = host_ints(query_start)
        lens, (num_sequences,) = host_ints(seq_lens)
        tables, (num_tables, max_blocks) = host_ints(block_tables)
        assert num_starts == num_sequences + 1 and num_tables == num_sequences
        self._plan = _C.AttentionPlan(
            (starts, lens, tables, num_sequences, max_blocks),
            (num_q_heads, num_kv_heads, head_dim),
            (causal, window),
            block_size,
            num_blocks,
            bfloat16,
        )
        self.num_tokens = self._plan.num_tokens
        self._shape = (self.num_tokens, num_q_heads, head_dim)  # of queries and results
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    @property
    def num_items(self) -> int:
        """How many pieces each kv head's work was cut into."""
        return self._plan.num_items


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    scales: KvScales = UNSCALED,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q · Kᵀ) · V over the paged cache, as f32 [T, NQ, D].

    q f32 [T, NQ, D], a view of a fused qkv row is fine; kv_cache [NB, L, 2, NKV, BS, D], f32, f16, bf16 or fp8; K and V
    are what it holds times their scales. With a soft cap c > 0 a score s becomes c * tanh(s / c); with a bias f32
    [NQ, 2 R + 1] it becomes s + bias[head, d + R], d the key's position less the query's, within [-R, R]; a causal plan
    then needs a window, however wide, because without one sequences may share tiles. Sinks f32 [NQ] are one more score
    per head in the softmax, whose value is zero.
    Bit for bit, a row depends on its own q and on the keys it sees alone.
    """
    shape = plan._shape
    rows = _head_rows(q, *shape)
    if out is None:
        out = torch.empty(*shape)
    else:
        assert out.shape == shape and out.dtype is _F32 and out.is_contiguous()
    bias_address, reach = 0, 0
    if bias is not None:
        width = bias.shape[1]
        assert width % 2 == 1, bias.shape
        _check_f32(bias, plan.num_q_heads, width)
        bias_address, reach = bias.data_ptr(), width // 2
    of = (view_of(kv_cache).bound, layer, scales.key, scales.value)
    rule = (scale, soft_cap, bias_address, reach, _check_bias(sinks, plan.num_q_heads))
    _C.paged_attention(rows, out.data_ptr(), of, plan._plan, rule)
    return out
