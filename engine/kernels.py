"""Typed functions over the extension: shapes are documented and asserted here, the work is in csrc.

The only importer of engine._C. Tensors are passed as data pointers and sizes; the GIL is released meanwhile.
Dims: T tokens, S sequences, NQ/NKV heads, D head dim, NB blocks, L layers, BS tokens per block, MB blocks per row,
N sampled rows, V vocabulary, K alternatives. Host arrays (lengths, tables, rows) are int32, numpy or torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import _C
from engine.types import BoolArray, FloatArray, IntArray, RowSpec

# --- attention, cache, sampling ----------------------------------------------------------------------------------

_KV_DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # csrc/core/dtype.h

HostInts = npt.NDArray[np.int32] | Tensor


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _logit_stride(logits: Tensor) -> int:
    """Elements between the rows of logits f32 [N, V]."""
    stride = logits.stride()
    assert logits.dtype == torch.float32 and stride[1] == 1
    return stride[0]


def _host_ints(array: HostInts) -> tuple[int, tuple[int, ...]]:
    """Address and shape of a contiguous int32 host array."""
    if isinstance(array, Tensor):
        assert array.dtype == torch.int32 and array.is_contiguous() and array.device.type == "cpu"
        return array.data_ptr(), tuple(array.shape)
    assert array.dtype == np.int32 and array.flags.c_contiguous
    return _address(array), array.shape


def _kv_sizes(kv_cache: Tensor) -> tuple[int, int, int, int, int]:
    """(NB, L, NKV, BS, D) of a cache [NB, L, 2, NKV, BS, D]."""
    num_blocks, num_layers, two, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert two == 2 and kv_cache.is_contiguous()
    return num_blocks, num_layers, num_kv_heads, block_size, head_dim


def _row_stride(rows: Tensor) -> int:
    """Elements between the rows of x [T, heads, D], whose rows are dense."""
    stride = rows.stride()
    assert rows.dtype == torch.float32 and stride[2] == 1 and stride[1] == rows.shape[2]
    return stride[0]


def write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Stores k, v f32 [T, NKV, D] (views of a fused qkv row are fine) in kv_cache [NB, L, 2, NKV, BS, D], f32 or bf16.

    slot_mapping int64 [T]: block * BS + offset; -1 is skipped, anything else outside the cache is an Error.
    """
    num_tokens = slot_mapping.shape[0]
    sizes = _kv_sizes(kv_cache)
    assert k.shape == v.shape == (num_tokens, sizes[2], sizes[4]) and slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    _C.write_kv(
        k.data_ptr(),
        _row_stride(k),
        v.data_ptr(),
        _row_stride(v),
        slot_mapping.data_ptr(),
        num_tokens,
        kv_cache.data_ptr(),
        _KV_DTYPES[kv_cache.dtype],
        sizes,
        layer,
    )


def copy_blocks(kv_cache: Tensor, pairs: HostInts) -> None:
    """Copies blocks inside a cache, all layers: pairs [C, 2] of (source, destination).

    The copies have no order: a destination that occurs twice, or that is also a source, is an Error.
    """
    swap_blocks(kv_cache, kv_cache, pairs)


def swap_blocks(source_cache: Tensor, destination_cache: Tensor, pairs: HostInts) -> None:
    """Copies blocks from one cache to another of the same block shape: pairs [C, 2] of (source, destination)."""
    address, (num_pairs, two) = _host_ints(pairs)
    assert two == 2 and source_cache.is_contiguous() and destination_cache.is_contiguous()
    assert source_cache.shape[1:] == destination_cache.shape[1:] and source_cache.dtype == destination_cache.dtype
    _C.copy_blocks(
        source_cache.data_ptr(),
        source_cache.shape[0],
        destination_cache.data_ptr(),
        destination_cache.shape[0],
        source_cache[0].nbytes,
        address,
        num_pairs,
    )


class AttentionPlan:
    """The work of one step's attention, found once and used by every layer (and by one call at a time).

    query_start [S + 1], seq_lens [S] (computed tokens after the step), block_tables [S, MB]. Query i of a sequence is
    at position seq_len - query_len + i; it sees all keys, or with `causal` those up to itself, or with `window` the
    last `window` of these. Sequences without queries are allowed.
    """

    __slots__ = ("_plan", "head_dim", "num_kv_heads", "num_q_heads", "num_tokens")

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
        causal: bool = True,
        window: int = 0,
    ) -> None:
        starts, (num_starts,) = _host_ints(query_start)
        lens, (num_sequences,) = _host_ints(seq_lens)
        tables, (num_tables, max_blocks) = _host_ints(block_tables)
        assert num_starts == num_sequences + 1 and num_tables == num_sequences
        self._plan = _C.AttentionPlan(
            starts,
            lens,
            tables,
            num_sequences,
            max_blocks,
            num_q_heads,
            num_kv_heads,
            head_dim,
            block_size,
            causal,
            window,
        )
        self.num_tokens = self._plan.num_tokens
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
) -> Tensor:
    """softmax(scale * q · Kᵀ) · V over the paged cache, as f32 [T, NQ, D].

    q f32 [T, NQ, D], a view of a fused qkv row is fine; kv_cache [NB, L, 2, NKV, BS, D], f32 or bf16. With a soft cap
    c > 0 a score s becomes c * tanh(s / c). Bit for bit, a row depends on its own q and on the keys it sees alone.
    """
    shape = (plan.num_tokens, plan.num_q_heads, plan.head_dim)
    assert q.shape == shape
    if out is None:
        out = torch.empty(shape, dtype=torch.float32)
    assert out.shape == shape and out.dtype == torch.float32 and out.is_contiguous()
    _C.paged_attention(
        q.data_ptr(),
        _row_stride(q),
        out.data_ptr(),
        kv_cache.data_ptr(),
        _KV_DTYPES[kv_cache.dtype],
        _kv_sizes(kv_cache),
        layer,
        scale,
        soft_cap,
        plan._plan,
    )
    return out


class Sampler:
    """Chooses tokens for `num_rows` sampler rows, each opened with a sequence's parameters and history.

    Masks and bias, penalties, temperature, min_p, top_k, top_p, draw. A row's token depends on its own logits,
    parameters, history and position alone, bit for bit.
    """

    __slots__ = ("_sampler", "_vocab_size")

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._sampler = _C.Sampler(num_rows, vocab_size)
        self._vocab_size = vocab_size

    def open_row(self, spec: RowSpec) -> None:
        params = spec.params
        held_back = (*spec.eos_token_ids, *params.stop_token_ids) if params.min_tokens else ()
        self._sampler.open_row(
            spec.row,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            spec.seed,
            spec.choice,
            params.min_tokens,
            params.logit_bias,
            params.allowed_token_ids,
            params.bad_words,
            held_back,
            spec.prompt_token_ids,
            spec.output_token_ids,
        )

    def close_row(self, row: int) -> None:
        self._sampler.close_row(row)

    def resolve(self, input_ids: IntArray) -> IntArray:
        """A copy of input_ids [T] in which -(row + 1) is replaced by the last token of sampler row `row`."""
        resolved = input_ids.copy()
        address, (count,) = _host_ints(resolved)
        self._sampler.resolve(address, count)
        return resolved

    def sample(self, logits: Tensor, rows: HostInts, positions: HostInts) -> tuple[IntArray, BoolArray]:
        """Tokens [N] for logits f32 [N, V] of distinct rows [N], and which of them are bad.

        positions [N] are those of the sampled tokens; they key the random numbers. Bad: NaN or +inf in the logits, or
        nothing left to sample; the token is 0 and the row stays as it was.
        """
        address, (num,) = _host_ints(rows)
        positions_address, positions_shape = _host_ints(positions)
        assert logits.shape == (num, self._vocab_size) and positions_shape == (num,)
        tokens = np.empty(num, np.int32)
        bad = np.empty(num, np.bool_)
        self._sampler.sample(
            logits.data_ptr(), _logit_stride(logits), address, positions_address, num, _address(tokens), _address(bad)
        )
        return tokens, bad


def logprobs(logits: Tensor, chosen: HostInts, top: int) -> tuple[FloatArray, IntArray, IntArray, FloatArray]:
    """Log-softmax of logits f32 [N, V]: of the chosen tokens [N], their ranks [N], the `top` best ids and values [N, K].

    Rank is 1 + the number of greater logits; equal ones are listed by lower id. A row with NaN gives NaN.
    """
    num, vocab_size = logits.shape
    chosen_address, chosen_shape = _host_ints(chosen)
    assert chosen_shape == (num,)
    chosen_logprob = np.empty(num, np.float32)
    rank = np.empty(num, np.int32)
    top_ids = np.empty((num, top), np.int32)
    top_logprob = np.empty((num, top), np.float32)
    _C.logprobs(
        logits.data_ptr(),
        _logit_stride(logits),
        num,
        vocab_size,
        chosen_address,
        top,
        _address(chosen_logprob),
        _address(rank),
        _address(top_ids),
        _address(top_logprob),
    )
    return chosen_logprob, rank, top_ids, top_logprob
