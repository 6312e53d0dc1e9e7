"""The attention of a step's only token in one launch, against the three launches that it stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cuda as ops
from bequest.engine.kernels import cuda_attention as attention
from bequest.engine.kernels.kv_format import FP8, UNSCALED, KvScales

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LAYER, NUM_LAYERS = 1, 3
CANARY = 7.0


@dataclass(frozen=True)
class Case:
    """A token at the end of a sequence of seq_len tokens; 0: padding."""

    seq_len: int
    num_q_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    rotary_dim: int | None = None  # None: the whole head; 0: no rotation
    norm: bool = True
    window: int = 0
    kv_dtype: torch.dtype = torch.bfloat16
    scales: KvScales = UNSCALED
    has_sinks: bool = False
    stored: bool = True  # False: the token's key and value are in the cache, and it has no slot
    scales_queries: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def sinks(self) -> Tensor | None:
        return torch.linspace(-6.0, 9.0, self.num_q_heads, device=DEVICE) if self.has_sinks else None

    def query_scales(self, cos_sin: Tensor | None) -> Tensor | None:
        if not self.scales_queries or cos_sin is None:
            return None
        return torch.linspace(0.5, 2.5, len(cos_sin), device=DEVICE)


@dataclass(frozen=True)
class Step:
    qkv: Tensor  # [1, (NQ + 2 NKV) D]
    kv_cache: Tensor
    block_tables: Tensor  # [1, MB]
    slots: Tensor
    positions: Tensor
    cos_sin: Tensor | None
    norm: ops.QkNorm | None
    plan: attention.CudaAttentionPlan


def make_step(case: Case, seed: int = 0) -> Step:
    """Blocks in shuffled order; every slot that the token does not see is NaN, the token's own too if it stores."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    num_blocks = -(-case.seq_len // case.block_size)
    shape = (num_blocks + 3, NUM_LAYERS, 2, case.num_kv_heads, case.block_size, case.head_dim)
    kv_cache = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE).to(case.kv_dtype)
    table = np.random.default_rng(seed).permutation(np.arange(1, num_blocks + 3))[:num_blocks].astype(np.int32)
    cached = case.seq_len - case.stored if case.seq_len else 0
    places = torch.arange(cached, device=DEVICE)
    blocks = torch.from_numpy(table).to(DEVICE).long()[places // case.block_size]
    kv = torch.randn(cached, 2, case.num_kv_heads, case.head_dim, generator=generator, device=DEVICE)
    # As bytes, because fp8 cannot be indexed.
    kv_cache.view(torch.uint8)[blocks, LAYER, :, :, places % case.block_size] = kv.to(case.kv_dtype).view(torch.uint8)
    position = max(0, case.seq_len - 1)
    slot = -1
    if case.seq_len and case.stored:
        slot = int(table[position // case.block_size]) * case.block_size + position % case.block_size
    rotary_dim = case.head_dim if case.rotary_dim is None else case.rotary_dim
    cos_sin = torch.randn(position + 1, rotary_dim, generator=generator, device=DEVICE) if rotary_dim else None
    weights = torch.randn(2, case.head_dim, generator=generator, device=DEVICE).bfloat16()
    width = (case.num_q_heads + 2 * case.num_kv_heads) * case.head_dim
    workspace = attention.CudaAttentionWorkspace(
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        max_sequences=1,
        max_tokens=1,
        window=case.window,
        block_size=case.block_size,
    )
    tables = np.zeros((1, num_blocks + 1), np.int32)
    tables[0, :num_blocks] = table
    lens = np.array([case.seq_len], np.int32)
    work_list = torch.empty(workspace.list_len, dtype=torch.int32)
    workspace.write_list(np.array([0, 1], np.int32), lens, tables, work_list)
    device_tables = torch.from_numpy(tables).to(DEVICE)
    return Step(
        torch.randn(1, width, generator=generator, device=DEVICE).bfloat16(),
        kv_cache,
        device_tables,
        torch.tensor([slot], device=DEVICE),
        torch.tensor([position], dtype=torch.int32, device=DEVICE),
        cos_sin,
        ops.QkNorm(weights[0], weights[1], 1e-6) if case.norm else None,
        workspace.bind(work_list.to(DEVICE), device_tables, max_query_len=1, max_tokens=1),
    )


def apart(case: Case, step: Step) -> tuple[Tensor, Tensor]:
    """(result [1, NQ, D], cache) by prepare_qkv, decode and merge."""
    cache = step.kv_cache.clone()
    q = ops.prepare_qkv(
        step.qkv.clone(),
        case.num_q_heads,
        cache,
        LAYER,
        step.slots,
        step.positions,
        step.cos_sin,
        step.norm,
        case.scales,
        case.query_scales(step.cos_sin),
    )
    out = torch.full(q.shape, CANARY, dtype=q.dtype, device=DEVICE)
    attention.paged_attention(q, cache, LAYER, step.plan, case.scale, out=out, scales=case.scales, sinks=case.sinks)
    return out, cache


def together(case: Case, step: Step, qkv: Tensor, cache: Tensor) -> Tensor:
    return attention.attend_token(
        qkv,
        cache,
        LAYER,
        step.plan,
        case.scale,
        step.slots,
        step.positions,
        step.cos_sin,
        step.norm,
        case.scales,
        case.sinks,
        case.query_scales(step.cos_sin),
    )


def check(case: Case, seed: int = 0) -> None:
    step = make_step(case, seed)
    assert step.plan.single_token
    expected, expected_cache = apart(case, step)
    qkv, cache = step.qkv.clone(), step.kv_cache.clone()
    out = together(case, step, qkv, cache)
    assert torch.equal(qkv, step.qkv)
    assert torch.equal(cache.view(torch.uint8), expected_cache.view(torch.uint8))
    if case.seq_len == 0:
        return
    assert not out.isnan().any()
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert error < 6e-3, error


LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 1040, 2048, 2049, 3071, 3073, 4097, 9000)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_lengths(seq_len: int, kv_dtype: torch.dtype) -> None:
    check(Case(seq_len, kv_dtype=kv_dtype, scales=KvScales(0.5, 2.0) if kv_dtype is FP8 else UNSCALED))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (14, 2), (16, 1), (5, 1), (32, 8), (32, 32), (40, 40), (64, 4)])
def test_heads(heads: tuple[int, int], head_dim: int, kv_dtype: torch.dtype) -> None:
    check(Case(777, heads[0], heads[1], head_dim, kv_dtype=kv_dtype))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("seq_len", [1, 33, 1025, 4097])
@pytest.mark.parametrize("window", [0, 128])
def test_sinks(window: int, seq_len: int, kv_dtype: torch.dtype) -> None:
    heads = {"num_q_heads": 64, "head_dim": 64, "norm": False}
    check(Case(seq_len, kv_dtype=kv_dtype, window=window, has_sinks=True, **heads))  # type: ignore[arg-type]


def test_shapes_that_are_not_served() -> None:
    """More heads than there is room for clusters, or more queries to a head than a tile has rows."""
    assert not make_step(Case(9, num_q_heads=72, num_kv_heads=72)).plan.single_token
    assert not make_step(Case(9, num_q_heads=34, num_kv_heads=2)).plan.single_token


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("seq_len", [1, 129, 2000])
def test_block_sizes(seq_len: int, block_size: int) -> None:
    check(Case(seq_len, block_size=block_size))


@pytest.mark.parametrize("rotary_dim", [0, 16, 64, 126, 128])
@pytest.mark.parametrize("norm", [True, False])
def test_rotations_and_norms(norm: bool, rotary_dim: int) -> None:
    check(Case(300, rotary_dim=rotary_dim, norm=norm))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq_len", [1, 1500])
def test_queries_that_are_scaled(seq_len: int, head_dim: int, kv_dtype: torch.dtype) -> None:
    case = Case(seq_len, 32, 8, head_dim, norm=False, kv_dtype=kv_dtype, scales_queries=True)
    check(case)
    step = make_step(case)
    plain, scaled = (
        together(each, step, step.qkv, step.kv_cache.clone()) for each in (replace(case, scales_queries=False), case)
    )
    assert seq_len == 1 or not torch.equal(plain, scaled)


@pytest.mark.parametrize("seq_len", [1, 99, 100, 101, 117, 3000])
@pytest.mark.parametrize("window", [1, 16, 100])
def test_windows(window: int, seq_len: int) -> None:
    check(Case(seq_len, window=window))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("seq_len", [1, 64, 1500])
def test_a_token_that_is_only_read(seq_len: int, kv_dtype: torch.dtype) -> None:
    check(Case(seq_len, stored=False, kv_dtype=kv_dtype))


def test_a_graph_of_one_token_after_another() -> None:
    """Each replay finds the key that the one before it stored; results as of launches one by one."""
    case = Case(40)
    step = make_step(Case(160))
    workspace, first = step.plan.workspace, case.seq_len
    work_list = torch.empty(workspace.list_len, dtype=torch.int32)
    tables = step.block_tables.cpu().numpy()
    blocks = step.block_tables[0].long()
    cache = step.kv_cache.clone()
    qkv = step.qkv.clone()
    graph = torch.cuda.CUDAGraph()
    together(case, step, qkv, cache.clone())
    with torch.cuda.graph(graph):
        out = together(case, step, qkv, cache)
    eager_cache = step.kv_cache.clone()
    generator = torch.Generator(DEVICE).manual_seed(5)
    for position in range(first, 150):
        lens = np.array([position + 1], np.int32)
        workspace.write_list(np.array([0, 1], np.int32), lens, tables, work_list)
        step.plan.work_list.copy_(work_list)
        step.positions.fill_(position)
        step.slots.copy_(blocks[position // 16] * 16 + position % 16)
        qkv.copy_(torch.randn(qkv.shape, generator=generator, device=DEVICE))
        graph.replay()
        assert torch.equal(out, together(case, step, qkv, eager_cache))
    assert torch.equal(cache.view(torch.uint8), eager_cache.view(torch.uint8))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_small(head_dim: int) -> None:
    """Small enough for compute-sanitizer."""
    for seq_len in (1, 40, 1500):
        check(Case(seq_len, num_q_heads=4, num_kv_heads=2, head_dim=head_dim))
        check(Case(seq_len, num_q_heads=4, num_kv_heads=2, head_dim=head_dim, kv_dtype=FP8))
