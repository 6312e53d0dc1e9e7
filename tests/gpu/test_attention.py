"""Paged attention on a GPU against a float32 reference, at the edges of blocks, tiles, units and splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cuda as ops
from bequest.engine.kernels import cuda_attention as cuda
from bequest.engine.kernels.cuda_linear import linear

pytestmark = pytest.mark.gpu

NAN = float("nan")
LAYER, NUM_LAYERS = 1, 3
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """A step: (query_len, seq_len) per sequence, and the shape of the model."""

    lens: tuple[tuple[int, int], ...]
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    bias_reach: int | None = None
    has_sinks: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def bias(self) -> Tensor | None:
        """[NQ, 2 R + 1], wide enough to change who gets the weight."""
        if self.bias_reach is None:
            return None
        generator = torch.Generator(DEVICE).manual_seed(99)
        return 2 * torch.randn(self.num_q_heads, 2 * self.bias_reach + 1, generator=generator, device=DEVICE)

    @property
    def sinks(self) -> Tensor | None:
        """[NQ], of which some take nearly all of the weight and some hardly any."""
        return torch.linspace(-6.0, 9.0, self.num_q_heads, device=DEVICE) if self.has_sinks else None

    @property
    def num_tokens(self) -> int:
        return sum(query_len for query_len, _ in self.lens)


@dataclass(frozen=True)
class Step:
    """The tensors of a case. keys, values: what each sequence sees, [seq_len, NKV, D]."""

    q: Tensor  # [T, NQ, D], a view of wider rows
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    kv_cache: Tensor
    query_start: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray


def make_step(case: Case, *, shared_table: bool = False, common: Sequence[int] = ()) -> Step:
    """Random keys and values in shuffled blocks; every slot no sequence sees is NaN, unused table entries point there.

    With `shared_table` all sequences read the blocks of the longest; with `common` sequence s has its first common[s]
    keys, rounded down to whole blocks, in common with the one before it.
    """
    generator = torch.Generator(DEVICE).manual_seed(case.seed)
    blocks_of = [-(-seq_len // case.block_size) for _, seq_len in case.lens]
    longest = max(range(len(case.lens)), key=lambda s: case.lens[s][1]) if case.lens else 0
    num_blocks = sum(blocks_of) + 3
    shape = (num_blocks, NUM_LAYERS, 2, case.num_kv_heads, case.block_size, case.head_dim)
    kv_cache = torch.full(shape, NAN, dtype=case.dtype, device=DEVICE)
    shuffled = np.random.default_rng(case.seed).permutation(np.arange(1, num_blocks)).astype(np.int32)
    block_tables = np.zeros((len(case.lens), max(blocks_of, default=0) + 1), dtype=np.int32)
    starts = np.cumsum([0, *blocks_of])
    keys, values = [], []
    for s in range(len(case.lens)):
        owner = longest if shared_table else s
        table = shuffled[starts[owner] : starts[owner] + blocks_of[s]]
        block_tables[s, : len(table)] = table
        if s > 0 and common:
            front = common[s] // case.block_size
            block_tables[s, :front] = block_tables[s - 1, :front]
    for s in [longest] if shared_table and case.lens else range(len(case.lens)):
        seq_len = case.lens[s][1]
        kv = torch.randn(2, case.num_kv_heads, seq_len, case.head_dim, generator=generator, device=DEVICE)
        table = torch.from_numpy(block_tables[s, : blocks_of[s]]).to(DEVICE).long()
        positions = torch.arange(seq_len, device=DEVICE)
        blocks, offsets = table[positions // case.block_size], positions % case.block_size
        # advanced indices first: [seq_len, 2, NKV, D]
        kv_cache[blocks, LAYER, :, :, offsets] = kv.permute(2, 0, 1, 3).to(case.dtype)
    for s, (_, seq_len) in enumerate(case.lens):
        table = torch.from_numpy(block_tables[s, : blocks_of[s]]).to(DEVICE).long()
        rows = kv_cache[table, LAYER].permute(1, 0, 3, 2, 4).reshape(2, -1, case.num_kv_heads, case.head_dim)
        keys.append(rows[0, :seq_len])
        values.append(rows[1, :seq_len])
    wide = torch.randn(
        case.num_tokens, case.num_q_heads + 2 * case.num_kv_heads, case.head_dim, generator=generator, device=DEVICE
    ).to(case.dtype)
    query_start = np.cumsum([0, *(query_len for query_len, _ in case.lens)], dtype=np.int32)
    seq_lens = np.array([seq_len for _, seq_len in case.lens], dtype=np.int32)
    q = wide[:, : case.num_q_heads]
    return Step(q, tuple(keys), tuple(values), kv_cache, query_start, seq_lens, block_tables)


def reference(case: Case, step: Step) -> Tensor:
    """float32, one sequence at a time, whole score matrices. [T, NQ, D]"""
    out = torch.full((case.num_tokens, case.num_q_heads, case.head_dim), NAN, device=DEVICE)
    group = case.num_q_heads // case.num_kv_heads
    for s, (query_len, seq_len) in enumerate(case.lens):
        if seq_len == 0 or query_len == 0:
            continue
        rows = slice(int(step.query_start[s]), int(step.query_start[s + 1]))
        k = step.keys[s].float().repeat_interleave(group, 1)
        v = step.values[s].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", step.q[rows].float(), k) * case.scale
        if case.soft_cap:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        query = torch.arange(seq_len - query_len, seq_len, device=DEVICE)[:, None]
        key = torch.arange(seq_len, device=DEVICE)[None]
        if case.bias is not None:
            reach = case.bias_reach
            scores += case.bias[:, (key - query).clamp(-reach, reach) + reach]
        seen = (key <= query) | (not case.causal)
        if case.window:
            seen &= key > query - case.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if case.sinks is not None:
            scores = torch.cat((scores, case.sinks[:, None, None].expand(-1, query_len, 1)), -1)
        weights = torch.softmax(scores, -1)[..., :seq_len]
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def workspace_of(case: Case, max_sequences: int = 0, max_tokens: int = 0) -> cuda.CudaAttentionWorkspace:
    workspace = cuda.CudaAttentionWorkspace(
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        max_sequences=max_sequences or len(case.lens),
        max_tokens=max_tokens or case.num_tokens,
        dtype=case.dtype,
        causal=case.causal,
        window=case.window,
        block_size=case.block_size,
    )
    workspace.states.fill_(NAN)
    workspace.scales.fill_(NAN)
    return workspace


def run(case: Case, step: Step, plan: cuda.CudaAttentionPlan | None = None) -> Tensor:
    """The kernel's output [T, NQ, D], its canary rows checked."""
    guarded = torch.full((case.num_tokens + 2, case.num_q_heads, case.head_dim), 7.0, dtype=case.dtype, device=DEVICE)
    plan = plan or workspace_of(case).plan(step.query_start, step.seq_lens, step.block_tables)
    out = guarded[1:-1]
    cuda.paged_attention(
        step.q, step.kv_cache, LAYER, plan, case.scale, case.soft_cap, out, case.bias, sinks=case.sinks
    )
    torch.cuda.synchronize()
    assert (guarded[0] == 7).all() and (guarded[-1] == 7).all()
    return out


def check_rows(case: Case, step: Step, out: Tensor) -> None:
    expected = reference(case, step)
    wanted = ~expected.isnan().any(-1).any(-1)
    assert (out[~wanted] == 7).all(), "a row of no sequence was written"
    if not wanted.any():
        return
    out, expected = out[wanted].float(), expected[wanted]
    assert not out.isnan().any()
    error = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < (1.5e-2 if case.dtype == torch.bfloat16 else 1e-5), error.max()
    average = (out - expected).norm() / expected.norm()
    assert average < (6e-3 if case.dtype == torch.bfloat16 else 2e-6), average


def check(case: Case, *, shared_table: bool = False) -> None:
    step = make_step(case, shared_table=shared_table)
    check_rows(case, step, run(case, step))


EDGES = (1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 300)
DECODE = tuple((1, n) for n in EDGES)
PREFILL = tuple((n, n) for n in EDGES)
MIXED = ((1, 500), (70, 70), (0, 40), (33, 500), (1, 1), (2, 40), (5, 130), (200, 1000), (1, 0), (0, 0))
SMALL = ((1, 17), (9, 40), (1, 70), (40, 70))
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("lens", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_block_sizes(lens: tuple[tuple[int, int], ...], block_size: int, dtype: torch.dtype) -> None:
    check(Case(lens, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("lens", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize(
    "heads", [(4, 4), (4, 2), (6, 2), (5, 1), (12, 2), (14, 2), (16, 2), (16, 1), (64, 2)], ids=str
)
def test_heads(lens: tuple[tuple[int, int], ...], head_dim: int, heads: tuple[int, int]) -> None:
    check(Case(lens, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim))


# Prefixes around the ends of a prefill tile's keys (128) and of half of one.
PREFIXES = (0, 1, 15, 16, 31, 47, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 257, 640)


@pytest.mark.parametrize(
    "change",
    [{}, {"window": 70}, {"window": 129}, {"causal": False}, {"soft_cap": 3.0}, {"has_sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("query_len", [3, 5, 8, 9, 17, 32, 64, 65, 129])
@pytest.mark.parametrize("heads", [(4, 1, 128), (2, 2, 64), (96, 1, 128)], ids=str)
def test_prefixes_around_tile_ends(heads: tuple[int, int, int], query_len: int, change: dict[str, float]) -> None:
    """Chunks behind a cached prefix: the diagonal and the end of the keys at every place of a tile."""
    shape = Case(
        tuple((query_len, prefix + query_len) for prefix in PREFIXES),
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
    )
    check(replace(shape, **change))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "change",
    [{"window": 1}, {"window": 16}, {"window": 100}, {"soft_cap": 3.0}, {"causal": False}, {"has_sinks": True}],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_and_caps(change: dict[str, float], head_dim: int, dtype: torch.dtype) -> None:
    check(replace(Case(MIXED, head_dim=head_dim, dtype=dtype), **change))


@pytest.mark.parametrize("query_len", [1, 2, 33, 200])
@pytest.mark.parametrize("change", [{}, {"window": 70}, {"causal": False}, {"has_sinks": True}], ids=str)
def test_heads_of_512_around_tile_ends(query_len: int, change: dict[str, float]) -> None:
    lens = tuple((query_len, prefix + query_len) for prefix in PREFIXES)
    check(replace(Case(lens, num_q_heads=16, num_kv_heads=2, head_dim=512), **change))


@pytest.mark.parametrize("change", [{"soft_cap": 3.0}, {"bias_reach": 2, "window": 99}], ids=str)
def test_heads_of_512_refuse_caps_and_biases(change: dict[str, float]) -> None:
    with pytest.raises(RuntimeError, match="heads of 512"):
        check(replace(Case(SMALL, head_dim=512), **change))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reach", [0, 1, 17, 64, 128, 2000])
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128), (4, 2, 256)], ids=str)
def test_bias_by_distance(reach: int, causal: bool, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    queries, keys, head_dim = heads
    shape = {"num_q_heads": queries, "num_kv_heads": keys, "head_dim": head_dim}
    lens = MIXED if causal else (*MIXED, (30, 5), (4, 3))  # a decoder may have more queries than an encoder keys
    window = 1 << 28 if causal else 0  # one that nobody reaches: causal attention with a bias has to have one
    check(Case(lens, causal=causal, bias_reach=reach, dtype=dtype, window=window, **shape))


@pytest.mark.parametrize("head_dim", [20, 80, 200, 300, 512])
def test_float32_takes_any_head_dim(head_dim: int) -> None:
    check(Case(MIXED, head_dim=head_dim, block_size=5, dtype=torch.float32))


@pytest.mark.parametrize(
    "lens",
    [
        ((1, 65536), (1, 1), (1, 300), (1, 9000)),
        ((40, 30000), (1, 20000), (3, 3)),
        ((1, 1024),),
        tuple((1, 10 + 37 * i) for i in range(300)),
        ((1500, 1500), (700, 2900)),
    ],
    ids=lambda lens: f"{len(lens)}-{lens[0]}",
)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(8, 128), (4, 512)])
def test_long_and_many(lens: tuple[tuple[int, int], ...], num_kv_heads: int, head_dim: int) -> None:
    check(Case(lens, num_q_heads=32, num_kv_heads=num_kv_heads, head_dim=head_dim))


def test_large_scores_move_the_reference() -> None:
    """Later keys with ever larger scores: the lazily rescaled accumulators must follow."""
    case = Case(((1, 3000), (64, 3000)))
    step = make_step(case)
    step.kv_cache[:, LAYER, 0] *= torch.linspace(0.1, 20, step.kv_cache.shape[0], device=DEVICE)[:, None, None, None]
    keys = []
    for s in range(2):
        table = torch.from_numpy(step.block_tables[s]).to(DEVICE).long()
        rows = step.kv_cache[table, LAYER, 0].permute(0, 2, 1, 3).reshape(-1, case.num_kv_heads, case.head_dim)
        keys.append(rows[:3000])
    step = replace(step, keys=tuple(keys))
    check_rows(case, step, run(case, step))


def test_shared_blocks() -> None:
    check(Case(((1, 900), (1, 400), (20, 620), (1, 16))), shared_table=True)


def test_no_rows() -> None:
    case = Case(((0, 0), (0, 30)))
    assert run(case, make_step(case)).shape[0] == 0
    empty = Case(())
    workspace_of(empty, 1, 1).plan(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32))


def test_float32_row_depends_on_nothing_else() -> None:
    case = Case(((1, 700), (40, 300), (1, 90), (1, 33)), dtype=torch.float32)
    step = make_step(case)
    together = run(case, step)
    for s, lens in enumerate(case.lens):
        rows = slice(int(step.query_start[s]), int(step.query_start[s + 1]))
        alone = replace(case, lens=(lens,))
        single = replace(
            step,
            q=step.q[rows],
            query_start=np.array([0, lens[0]], np.int32),
            seq_lens=step.seq_lens[s : s + 1].copy(),
            block_tables=step.block_tables[s : s + 1].copy(),
        )
        assert torch.equal(run(alone, single), together[rows])


def test_repeated_calls_share_a_workspace() -> None:
    """More prefill items than thread blocks: each call must leave the ticket counter as it found it."""
    case = Case(((2500, 2500), (1, 900), (300, 4000)), num_q_heads=32, num_kv_heads=8)
    step = make_step(case)
    plan = workspace_of(case).plan(step.query_start, step.seq_lens, step.block_tables)
    first = run(case, step, plan)
    check_rows(case, step, first)
    for _ in range(3):
        assert torch.equal(run(case, step, plan), first)


def test_overlapping_kernels_keep_their_order() -> None:
    """It starts while the last keys are still being written, and what reads its output starts while it is merged."""
    case = Case(((1, 700), (1, 1), (1, 3000), (1, 17), (1, 640)))
    step = make_step(case)
    plan = workspace_of(case).plan(step.query_start, step.seq_lens, step.block_tables)
    last = step.seq_lens - 1
    blocks = step.block_tables[np.arange(len(last)), last // case.block_size]
    slots = torch.from_numpy(blocks.astype(np.int64) * case.block_size + last % case.block_size).to(DEVICE)
    new = torch.randn(20, 2, len(last), case.num_kv_heads, case.head_dim, device=DEVICE).to(case.dtype)
    weight = torch.randn(1024, case.num_q_heads * case.head_dim, device=DEVICE).to(case.dtype)

    def steps(synchronize: bool) -> list[Tensor]:
        results = []
        for k, v in new:
            out = torch.empty(case.num_tokens, case.num_q_heads, case.head_dim, dtype=case.dtype, device=DEVICE)
            for kernel in (
                lambda k=k, v=v: ops.write_kv(k, v, step.kv_cache, LAYER, slots),
                lambda out=out: cuda.paged_attention(step.q, step.kv_cache, LAYER, plan, case.scale, out=out),
                lambda out=out: results.append(linear(out.flatten(1), weight)),
            ):
                kernel()
                if synchronize:
                    torch.cuda.synchronize()
        return results

    apart = torch.stack(steps(synchronize=True))
    for _ in range(5):
        assert torch.equal(torch.stack(steps(synchronize=False)), apart)


DECODE_STEPS = tuple(
    tuple((int(n > 0), n) for n in lens) for lens in [(1, 700, 17000, 3, 64), range(1, 25), (16000,), (5, 0, 900)]
)
MIXED_STEPS = (((200, 200), (1, 900), (30, 8000)), ((1, 40), (1, 3000)), ((256, 16000),), ((0, 0), (2, 2)))


@pytest.mark.parametrize(
    ("heads", "max_tokens", "steps"),
    [
        ((8, 2, 128), 24, DECODE_STEPS),
        ((64, 2, 128), 24, DECODE_STEPS),
        ((8, 2, 128), 256, MIXED_STEPS),
        ((8, 2, 512), 24, DECODE_STEPS),
        ((8, 2, 512), 256, MIXED_STEPS),
    ],
    ids=["decode", "decode-many-heads", "mixed", "decode-512", "mixed-512"],
)
def test_graph_replays_with_other_lengths(
    heads: tuple[int, int, int], max_tokens: int, steps: tuple[tuple[tuple[int, int], ...], ...]
) -> None:
    """One graph, captured on an empty list, serves steps of other lengths and of fewer sequences, as eager does."""
    slots = 24
    shape = Case(((1, 1),), num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
    workspace = workspace_of(shape, slots, max_tokens)
    work_list = torch.empty(workspace.list_len, dtype=torch.int32, pin_memory=True)
    empty = np.zeros(slots + 1, np.int32)
    workspace.write_list(empty, empty[:-1].copy(), np.zeros((slots, 1), np.int32), work_list)
    device_list = work_list.to(DEVICE)
    tables = torch.zeros(slots, 1100, dtype=torch.int32, device=DEVICE)
    q = torch.zeros(max_tokens, heads[0], heads[2], dtype=torch.bfloat16, device=DEVICE)
    out = torch.zeros_like(q)
    cache = torch.full((1200, NUM_LAYERS, 2, heads[1], 16, heads[2]), NAN, dtype=torch.bfloat16, device=DEVICE)
    plan = workspace.bind(device_list, tables, max_query_len=1 if max_tokens == slots else max_tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.paged_attention(q, cache, LAYER, plan, shape.scale, out=out)
    for seed, lens in enumerate(steps):
        case = replace(shape, lens=lens, seed=seed)
        step = make_step(case)
        cache.fill_(NAN)
        cache[: step.kv_cache.shape[0]] = step.kv_cache
        tables.zero_()
        tables[: len(lens), : step.block_tables.shape[1]] = torch.from_numpy(step.block_tables).to(DEVICE)
        q[: case.num_tokens] = step.q
        query_start = np.full(slots + 1, case.num_tokens, np.int32)
        query_start[: len(step.query_start)] = step.query_start
        seq_lens = np.zeros(slots, np.int32)
        seq_lens[: len(lens)] = step.seq_lens
        workspace.write_list(query_start, seq_lens, tables.cpu(), work_list)
        device_list.copy_(work_list)
        out.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        check_rows(case, step, out[: case.num_tokens])
        assert (out[case.num_tokens :] == 7).all()
        eager = workspace.plan(query_start, seq_lens, tables.cpu())
        assert torch.equal(run(case, step, eager), out[: case.num_tokens])


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small(head_dim: int, dtype: torch.dtype) -> None:
    """Small enough for compute-sanitizer."""
    check(Case(SMALL, head_dim=head_dim, dtype=dtype))
