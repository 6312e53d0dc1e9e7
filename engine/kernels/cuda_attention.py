"""Paged attention on a GPU: the functions of engine.kernels over the CUDA part of the extension.

A `CudaAttentionWorkspace` is made once: it knows the model's shape and the largest step, owns the scratch of partial
softmax states and writes work lists. A `CudaAttentionPlan` is one step's work: a list and block tables in device
memory. Eagerly a plan is made per step; for a graph it is bound once to fixed buffers, whose content the runner
replaces between replays. Calls that share a workspace must be in one stream order.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.kernels.cuda import QkNorm, address_of, head_norm, rotation
from bequest.engine.kernels.cuda_linear import Float8Rows, float8_like
from bequest.engine.kernels.host_arrays import HostInts, host_ints
from bequest.engine.kernels.kv_format import FP8, KV_DTYPE_CODES, UNSCALED, KvScales
from bequest.engine.kernels.kv_view import view_of
from bequest.engine.kernels.streams import current_stream

BROAD_HEAD = 512  # csrc/attention/cuda/work_list.h: a head_dim with kernels of its own
MOST_ROUNDED = 16384  # csrc/attention/cuda/attention.h: columns of results


class WorkCounts(msgspec.Struct, frozen=True):
    """What a work list holds. A plan without items of a kind, or without merges, spares that launch."""

    decode_items: int
    prefill_items: int
    merges: int

    def __add__(self, other: WorkCounts) -> WorkCounts:
        return WorkCounts(
            self.decode_items + other.decode_items,
            self.prefill_items + other.prefill_items,
            self.merges + other.merges,
        )


class CudaAttentionWorkspace:
    """What is fixed about attention when an engine starts; see AttentionPlan for `causal` and `window`.

    `dtype` is that of queries and results; the cache has the same, or is fp8: `kv_dtype`, which how work is cut depends
    on, but no result beyond its last bits. bf16 serves head_dim 64, 128, 256 and, without fp8, 512, and
    block sizes that are powers of two from 8 on; float32 any head_dim up to 512. `max_sequences` and `max_tokens` bound
    one step; they size the list and nothing else. With a `block_size` sequences that share their first blocks read them
    once, if they are causal, bf16, without a window and of a head_dim below 512.
    """

    __slots__ = (
        "_block_size",
        "_work",
        "device",
        "dtype",
        "head_dim",
        "mail",
        "num_kv_heads",
        "num_q_heads",
        "scales",
        "states",
        "tickets",
    )

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_sequences: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        causal: bool = True,
        window: int = 0,
        block_size: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        self.device = torch.device(device)
        is_broad = head_dim >= BROAD_HEAD
        self._block_size = None if is_broad else block_size
        self.dtype = dtype
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._work = _C.AttentionWork(
            (num_q_heads, num_kv_heads, head_dim),
            (causal, window),
            KV_DTYPE_CODES[dtype],
            max_sequences,
            max_tokens,
            (
                multiprocessors,
                _C.cuda_prefill_blocks_per_sm(head_dim, KV_DTYPE_CODES[kv_dtype or dtype]),
                _C.cuda_has_wide_tiles() and not is_broad,
            ),
        )
        rows = self._work.state_rows
        self.states = torch.empty(rows, num_kv_heads, head_dim, dtype=torch.float32, device=self.device)
        self.scales = torch.empty(rows, num_kv_heads, 2, dtype=torch.float32, device=self.device)
        self.tickets = torch.zeros(self._work.ticket_ints, dtype=torch.int32, device=self.device)
        self.mail = torch.full((self._work.mail_ints,), -1, dtype=torch.int32, device=self.device)
        self._use_scratch()

    def share_scratch(self, other: CudaAttentionWorkspace) -> None:
        """Takes the scratch of a workspace of larger steps for its own. Calls of both must be in one stream order."""
        assert self.states.shape[0] <= other.states.shape[0] and self.states.shape[1:] == other.states.shape[1:]
        assert self.tickets.numel() <= other.tickets.numel() and self.mail.numel() <= other.mail.numel()
        self.states, self.scales, self.tickets, self.mail = other.states, other.scales, other.tickets, other.mail
        self._use_scratch()

    def _use_scratch(self) -> None:
        scratch = (self.states, self.scales, self.tickets, self.mail)
        self._work.use_scratch(*(tensor.data_ptr() for tensor in scratch))

    @property
    def list_len(self) -> int:
        """int32 that a work list takes."""
        return self._work.size

    def write_list(
        self, query_start: HostInts, seq_lens: HostInts, block_tables: HostInts, work_list: HostInts
    ) -> WorkCounts:
        """Writes the list of a step to `work_list` [list_len], host memory (a view of pinned staging).

        query_start [S + 1], seq_lens [S]: computed tokens after the step; a sequence of 0 tokens is padding.
        block_tables [S, MB]. Where it is causal they are all sequences that write keys in the step.
        """
        starts, (num_starts,) = host_ints(query_start)
        lens, (num_sequences,) = host_ints(seq_lens)
        tables, (num_tables, max_blocks) = host_ints(block_tables)
        buffer, (list_len,) = host_ints(work_list)
        assert num_starts == num_sequences + 1 == num_tables + 1 and list_len == self.list_len
        if self._block_size is None:
            tables = 0
        rows = (starts, lens, tables, num_sequences, max_blocks)
        return WorkCounts(*self._work.write(rows, self._block_size or 1, buffer))

    def plan(self, query_start: HostInts, seq_lens: HostInts, block_tables: HostInts) -> CudaAttentionPlan:
        """The plan of one eager step. block_tables [S, MB]."""
        work_list = torch.empty(self.list_len, dtype=torch.int32, pin_memory=True)
        counts = self.write_list(query_start, seq_lens, block_tables, work_list)
        tables = torch.as_tensor(block_tables).pin_memory()
        return CudaAttentionPlan(
            self,
            work_list.to(self.device, non_blocking=True),
            tables.to(self.device, non_blocking=True),
            decode=counts.decode_items > 0,
            prefill=counts.prefill_items > 0,
            max_merges=counts.merges,
        )

    def bind(
        self,
        work_list: Tensor,
        block_tables: Tensor,
        *,
        max_query_len: int,
        max_tokens: int | None = None,
        merges: bool = True,
    ) -> CudaAttentionPlan:
        """The plan of all steps of a graph, over device buffers: work_list int32 [list_len], block_tables [S, MB].

        Before a replay the buffers must hold a list of a step in which no sequence has more queries than max_query_len,
        and all together no more than max_tokens, where that is said; and nothing to merge, if not `merges`.
        """
        decode = self._work.decode_tokens > 0
        prefill = self.dtype == torch.bfloat16 and max_query_len > self._work.few_tokens
        decode_merges, prefill_merges = self._work.max_merges
        if max_tokens is not None:
            decode_merges = min(decode_merges, max_tokens)
        max_merges = decode * decode_merges + prefill * prefill_merges if merges else 0
        single_token = max_tokens == 1 and not prefill and _C.cuda_can_attend_token(self._work)
        assert not single_token or _has_whole_row(block_tables), "attend_token reads ahead in its row"
        return CudaAttentionPlan(
            self,
            work_list,
            block_tables,
            decode=decode,
            prefill=prefill,
            max_merges=max_merges,
            single_token=single_token,
        )


def _has_whole_row(tables: Tensor) -> bool:
    """Whether what is allocated reaches as far as the begin of one more row."""
    behind = tables.untyped_storage().nbytes() // tables.element_size() - tables.storage_offset()
    return behind >= tables.stride(0)


class CudaAttentionPlan(AttentionWork):
    """The work of one step's attention in device memory, used by every layer.

    `single_token`: the step has no more than one, and `attend_token` serves it.
    """

    __slots__ = ("_step", "block_tables", "single_token", "work_list", "workspace")

    def __init__(
        self,
        workspace: CudaAttentionWorkspace,
        work_list: Tensor,
        block_tables: Tensor,
        *,
        decode: bool,
        prefill: bool,
        max_merges: int,
        single_token: bool = False,
    ) -> None:
        for tensor in (work_list, block_tables):  # tables may be columns of a wider array
            assert tensor.dtype == torch.int32 and tensor.is_cuda
            assert tensor.numel() == 0 or tensor.stride(-1) == 1, tensor.stride()
        assert work_list.shape == (workspace.list_len,) and work_list.data_ptr() % 16 == 0 and block_tables.dim() == 2
        self.workspace = workspace
        self.work_list = work_list
        self.block_tables = block_tables
        self.single_token = single_token
        self._step = _C.CudaStep(
            workspace._work,
            block_tables.data_ptr(),
            block_tables.stride(0),
            work_list.data_ptr(),
            (decode, prefill, max_merges),
        )


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    plan: CudaAttentionPlan,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    scales: KvScales = UNSCALED,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q · Kᵀ) · V over the paged cache, [T, NQ, D] in q's dtype.

    q [T, NQ, D], a view of a fused qkv row is fine; kv_cache [NB, L, 2, NKV, BS, D]; both of the workspace's dtype, or
    the cache fp8. K and V are what the cache holds times their scales. With a soft cap c > 0 a score s becomes
    c * tanh(s / c); with a bias float32 [NQ, 2 R + 1] it becomes s + bias[head, d + R], d the key's position less the
    query's, within [-R, R]; where it is causal the workspace then needs a window, however wide. Sinks float32 [NQ] are
    one more score per head in the softmax, whose value is zero.
    Rows of `out` that belong to no sequence stay as they are.
    A graph that this is captured in must not write keys and values of tokens before those of the step: they are read
    while the kernel ahead still runs.
    """
    workspace = plan.workspace
    out = _attended(q, workspace, out)
    cache = _cache_arguments(q, kv_cache, layer, plan, scales)
    rule = _score_arguments(scale, soft_cap, bias, sinks, workspace)
    _C.cuda_paged_attention(plan._step, _query_arguments(q), out.data_ptr(), cache, rule, current_stream())
    return out


def rounded_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    plan: CudaAttentionPlan,
    scale: float,
    soft_cap: float = 0.0,
    bias: Tensor | None = None,
    scales: KvScales = UNSCALED,
    sinks: Tensor | None = None,
) -> Float8Rows:
    """`float8_rows` of what `paged_attention` gives, [T, NQ D], in one launch less. Rows of no sequence mean nothing.

    REQUIRES: bfloat16, NQ D <= MOST_ROUNDED
    """
    workspace = plan.workspace
    rows = _attended(q, workspace, None).flatten(1)
    to = float8_like(rows)
    cache = _cache_arguments(q, kv_cache, layer, plan, scales)
    rule = _score_arguments(scale, soft_cap, bias, sinks, workspace)
    out = (rows.data_ptr(), to.codes.data_ptr(), to.scales.data_ptr())
    _C.cuda_paged_attention_float8(plan._step, _query_arguments(q), out, cache, rule, current_stream())
    return to


def _query_arguments(q: Tensor) -> tuple[int, int, int, int, int]:
    return (q.data_ptr(), *q.shape, q.stride(0))


def _cache_arguments(
    q: Tensor, kv_cache: Tensor, layer: int, plan: CudaAttentionPlan, scales: KvScales
) -> tuple[_C.KvCacheView, int, float, float]:
    workspace, view = plan.workspace, view_of(kv_cache)
    assert view.num_kv_heads == workspace.num_kv_heads and view.head_dim == workspace.head_dim
    assert kv_cache.dtype in (q.dtype, FP8)
    return view.bound, layer, scales.key, scales.value


def _score_arguments(
    scale: float, soft_cap: float, bias: Tensor | None, sinks: Tensor | None, workspace: CudaAttentionWorkspace
) -> tuple[float, float, int, int, int]:
    num_heads = workspace.num_q_heads
    return scale, soft_cap, *_bias_arguments(bias, num_heads), _sinks_address(sinks, num_heads)


def _attended(q: Tensor, workspace: CudaAttentionWorkspace, out: Tensor | None) -> Tensor:
    """Where the results of these queries go: [T, NQ, D]."""
    shape = (q.shape[0], workspace.num_q_heads, workspace.head_dim)
    assert q.shape == shape and q.dtype == workspace.dtype
    assert q.stride(2) == 1 and q.stride(1) == workspace.head_dim
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    assert out.shape == shape and out.dtype == q.dtype and out.is_contiguous()
    return out


def _bias_arguments(bias: Tensor | None, num_q_heads: int) -> tuple[int, int]:
    """The address of a bias [NQ, 2 R + 1], and R; zeros where there is none."""
    if bias is None:
        return 0, 0
    assert bias.dtype == torch.float32 and bias.is_cuda and bias.is_contiguous()
    assert bias.shape[0] == num_q_heads and bias.shape[1] % 2 == 1, bias.shape
    return bias.data_ptr(), bias.shape[1] // 2


def _sinks_address(sinks: Tensor | None, num_q_heads: int) -> int:
    return 0 if sinks is None else address_of(sinks, torch.float32, num_q_heads)


def attend_token(
    qkv: Tensor,
    kv_cache: Tensor,
    layer: int,
    plan: CudaAttentionPlan,
    scale: float,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    norm: QkNorm | None = None,
    scales: KvScales = UNSCALED,
    sinks: Tensor | None = None,
    query_scales: Tensor | None = None,
) -> Tensor:
    """`prepare_qkv` and `paged_attention` of a step's only token in one launch, [1, NQ, D]; qkv stays as it is.

    qkv [1, (NQ + 2 NKV) D], slot_mapping int64 [1], positions int32 [1]: the token's place in its sequence. A graph
    that this is captured in must not write this layer's keys and values in another way.
    """
    workspace = plan.workspace
    num_heads, head_dim = workspace.num_q_heads, workspace.head_dim
    view = view_of(kv_cache)
    assert plan.single_token and kv_cache.is_cuda and kv_cache.dtype in (torch.bfloat16, FP8)
    assert view.num_kv_heads == workspace.num_kv_heads and view.head_dim == head_dim
    out = torch.empty(1, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    preparation = (
        head_norm(norm, torch.bfloat16, head_dim),
        rotation(positions, cos_sin, 1, query_scales),
        address_of(slot_mapping, torch.int64, 1),
        (view.bound, layer, scales.key, scales.value),
    )
    _C.cuda_attend_token(
        plan._step,
        address_of(qkv, torch.bfloat16, 1, (num_heads + 2 * view.num_kv_heads) * head_dim),
        out.data_ptr(),
        (scale, 0.0, 0, 0, _sinks_address(sinks, num_heads)),
        preparation,
        current_stream(),
    )
    return out
