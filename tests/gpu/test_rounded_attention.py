"""Attention that rounds what it gathers: the bits of attention and of rounding its result, one behind the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine.backends.cuda.ops import CudaOps
from bequest.engine.backends.cuda.weights import DenseWeight
from bequest.engine.kernels import cuda_attention as cuda
from bequest.engine.kernels import cuda_linear
from bequest.engine.layers.parts import Heads
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.stream import Stream
from tests.gpu.test_attention import DEVICE, LAYER, MIXED, SMALL, Case, Step, make_step, workspace_of
from tests.gpu.test_fp8_cache import fp8_step
from tests.gpu.test_merges import CASES
from tests.gpu.test_ops import randn
from tests.gpu.test_quantised import product

pytestmark = pytest.mark.gpu


def check(case: Case, step: Step) -> None:
    workspace = workspace_of(case)
    plan = workspace.plan(step.query_start, step.seq_lens, step.block_tables)
    arguments = (step.q, step.kv_cache, LAYER, plan, case.scale, case.soft_cap)
    expected = cuda_linear.float8_rows(cuda.paged_attention(*arguments, sinks=case.sinks).flatten(1))
    covered = torch.cat([torch.full((query_len,), seq_len > 0) for query_len, seq_len in case.lens])
    for _ in range(3):
        workspace.states.fill_(float("nan"))
        workspace.scales.fill_(float("nan"))
        found = cuda.rounded_attention(*arguments, sinks=case.sinks)
        assert torch.equal(found.codes.view(torch.uint8)[covered], expected.codes.view(torch.uint8)[covered])
        assert torch.equal(found.scales[covered], expected.scales[covered])


@pytest.mark.parametrize("heads", [(4, 4, 64), (32, 8, 128), (14, 2, 128), (16, 1, 256), (128, 8, 128)], ids=str)
@pytest.mark.parametrize("name", [*CASES, "mixed"])
def test_cuts(name: str, heads: tuple[int, int, int]) -> None:
    lens, common = CASES.get(name, (MIXED, 0))
    case = Case(lens, *heads, has_sinks=heads[1] == 2)
    check(case, make_step(case, common=[common] * len(lens) if common else ()))


@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 64)], ids=str)
def test_fp8_cache(heads: tuple[int, int, int]) -> None:
    lens = tuple((1, int(n)) for n in np.random.default_rng(0).integers(500, 800, 64))
    case = Case(lens, *heads)
    check(case, fp8_step(case))


def test_rows_that_are_too_wide() -> None:
    case = Case(((1, 5),), num_q_heads=136, num_kv_heads=8)
    step = make_step(case)
    plan = workspace_of(case).plan(step.query_start, step.seq_lens, step.block_tables)
    with pytest.raises(RuntimeError, match="too wide"):
        cuda.rounded_attention(step.q, step.kv_cache, LAYER, plan, case.scale)


def slots_of(case: Case, step: Step) -> Tensor:
    """[S] int64: of the last tokens."""
    last = step.seq_lens - 1
    blocks = step.block_tables[np.arange(len(last)), last // case.block_size].astype(np.int64)
    return torch.from_numpy(blocks * case.block_size + last % case.block_size).to(DEVICE)


@pytest.mark.parametrize("num_tokens", [8, 40, 64, 100, 130])
def test_the_product_behind_it(num_tokens: int) -> None:
    """Rounded by attention where the product is of rows in float8 and our own, and else before it: the same bits."""
    case = Case(tuple((1, 300 + 7 * i) for i in range(num_tokens)))
    step = make_step(case)
    width = case.num_q_heads * case.head_dim
    codes = product(512, width, True, 3)
    weight = DenseWeight(codes.weight, codes.bias, CudaOps(), codes.scales)
    assert cuda_linear.takes_float8_tiles(num_tokens, weight.matrix) == (32 < num_tokens <= 128)
    plan = workspace_of(case).plan(step.query_start, step.seq_lens, step.block_tables)
    of_layer = LayerStep(
        positions=torch.from_numpy(step.seq_lens - 1).to(DEVICE),
        slot_mapping=(slots_of(case, step),),
        kv_cache=step.kv_cache,
        attention=(plan,),
    )
    heads = Heads(num_heads=case.num_q_heads, scale=case.scale, cache_layer=LAYER)
    qkv = randn(num_tokens, width + 2 * case.num_kv_heads * case.head_dim, dtype=torch.bfloat16, seed=1)
    total = randn(num_tokens, 512, dtype=torch.bfloat16, seed=2)
    one, other = (Stream(weight.ops, total.clone()) for _ in range(2))
    weight.attend_to(one, qkv.clone(), heads, of_layer)
    weight.add_to(other, weight.ops.attend(qkv.clone(), heads, of_layer))
    assert torch.equal(one.state(), other.state())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_small(head_dim: int) -> None:
    """Small enough for compute-sanitizer."""
    case = Case((*SMALL, (1, 700)), head_dim=head_dim)
    check(case, make_step(case))
