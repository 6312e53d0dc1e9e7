"""A query's result is a function of its own q and of the keys it sees, to the last bit."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bequest.engine import _C
from bequest.engine.kernels import cpu as kernels
from tests.forked import run_tests
from tests.kernels.test_attention import LAYER, Case, Step, attend, make_plan, make_step


def rows_of(step: Step, s: int, begin: int, end: int) -> Step:
    """Queries [begin, end) of sequence s as a step of their own, over the same cache."""
    query_len, seq_len = step.case.lens[s]
    first = int(step.query_start[s])
    case = replace(step.case, lens=((end - begin, seq_len - query_len + end),))
    return replace(
        step,
        case=case,
        q=step.q[first + begin : first + end],
        keys=(step.keys[s],),
        values=(step.values[s],),
        block_tables=step.block_tables[s : s + 1].copy(),
    )


VARIANTS = [
    {},
    {"dtype": torch.bfloat16, "num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 16},
    {"dtype": torch.float16, "num_q_heads": 2, "num_kv_heads": 2, "head_dim": 64, "block_size": 16},
    {"window": 100, "head_dim": 40},
    {"soft_cap": 20.0, "head_dim": 17, "num_q_heads": 1, "num_kv_heads": 1},
    {"bias_reach": 130, "window": 1 << 28, "num_q_heads": 3, "num_kv_heads": 3, "head_dim": 64},
    # Where the chip multiplies tiles of bfloat16: in place, copied and packed, few rows and many.
    {"bfloat16": True, "dtype": torch.bfloat16, "num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 16},
    {"bfloat16": True, "dtype": torch.float16, "head_dim": 48},
    {"bfloat16": True, "window": 100, "num_q_heads": 5, "num_kv_heads": 1, "head_dim": 40},
    {"bfloat16": True, "bias_reach": 130, "window": 1 << 28, "num_q_heads": 3, "num_kv_heads": 3, "head_dim": 64},
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_a_prefill(variant: dict[str, object], chunk: int) -> None:
    length = 1100
    step = make_step(Case(((length, length),), **variant))  # type: ignore[arg-type]
    whole = attend(step)
    begins = range(0, length, chunk) if chunk > 1 else [*range(0, length, 37), length - 1]
    for begin in begins:
        end = min(length, begin + chunk)
        assert torch.equal(attend(rows_of(step, 0, begin, end)), whole[begin:end])


@pytest.mark.parametrize("variant", VARIANTS)
def test_alone_and_in_a_crowd(variant: dict[str, object]) -> None:
    lens = ((1, 700), (1, 3), (90, 90), (13, 600), (1, 64), (0, 10), (5, 1030), *((1, 20 + i) for i in range(20)))
    step = make_step(Case(lens, **variant))  # type: ignore[arg-type]
    crowd = attend(step)
    for s, (query_len, _) in enumerate(lens):
        first = int(step.query_start[s])
        if query_len:
            assert torch.equal(attend(rows_of(step, s, 0, query_len)), crowd[first : first + query_len])


def share_front(step: Step, common: list[int]) -> Step:
    """The step with the first common[s] keys of sequence s in the blocks of the one before it."""
    tables = step.block_tables.copy()
    for s in range(1, len(tables)):
        front = common[s] // step.case.block_size
        tables[s, :front] = tables[s - 1, :front]
    return replace(step, block_tables=tables)


@functools.lru_cache(maxsize=1)
def crowd_with_prefixes(variant: int) -> tuple[Step, Step]:
    """The same sequences over keys of their own, and with those of a common prefix in common blocks."""
    prefixes = [512] * 3 + [1300] * 100 + [600, 600, 511, 512, 1024]
    lens = (*((1, n + 1 + 7 * i % 90) for i, n in enumerate(prefixes)), (6, 1400), (1, 1400), (1, 1400))
    common = [0, *map(min, itertools.pairwise(prefixes)), 1000, 1300, 1399]
    apart = make_step(Case(lens, **VARIANTS[variant]))  # type: ignore[arg-type]
    return apart, share_front(apart, common)


# Both numbers of threads of a variant in turn: they share its step.
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_alone_and_among_those_that_share_a_prefix(variant: int, threads: int) -> None:
    before = _C.num_threads()
    try:
        _C.set_num_threads(threads)
        apart, step = crowd_with_prefixes(variant)
        together = attend(step)
        if "window" not in VARIANTS[variant]:
            assert make_plan(step).num_items != make_plan(apart).num_items, "nothing was shared"
        for s, (query_len, _) in enumerate(step.case.lens):
            first = int(step.query_start[s])
            assert torch.equal(attend(rows_of(step, s, 0, query_len)), together[first : first + query_len])
    finally:
        _C.set_num_threads(before)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("lens", [((1, 5000),), ((3, 4000), (1, 1)), ((300, 1300), (1, 2000))])
def test_threads(lens: tuple[tuple[int, int], ...], bfloat16: bool) -> None:
    """More threads split long keys; the splits merge to the same bits."""
    step = make_step(Case(lens, num_q_heads=3, num_kv_heads=1, bfloat16=bfloat16))
    before = _C.num_threads()
    try:
        _C.set_num_threads(1)
        alone = attend(step)
        pieces = make_plan(step).num_items
        for threads in (2, 5):
            _C.set_num_threads(threads)
            assert make_plan(step).num_items > pieces, "the keys were not split: nothing is tested"
            assert torch.equal(attend(step), alone)
    finally:
        _C.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 30])
@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32, 100])
def test_block_sizes(block_size: int, queries: int, dtype: torch.dtype) -> None:
    def at(size: int) -> torch.Tensor:
        # One sequence in order: the same random numbers, whatever the shuffling of blocks drew.
        bfloat16 = dtype == torch.bfloat16
        case = Case(((queries, 600),), block_size=size, head_dim=32, dtype=dtype, bfloat16=bfloat16)
        step = make_step(case)
        generator = torch.Generator().manual_seed(1)
        k, v = torch.randn(2, 600, 2, 32, generator=generator)
        positions = torch.arange(600)
        slots = torch.from_numpy(step.block_tables[0]).long()[positions // size] * size + positions % size
        kernels.write_kv(k, v, step.kv_cache, LAYER, slots)
        return attend(replace(step, q=torch.randn(queries, 4, 32, generator=generator)))

    assert torch.equal(at(block_size), at(64))


def test_plan_is_reused_by_layers_and_calls() -> None:
    step = make_step(Case(((40, 90), (1, 600))))
    plan = make_plan(step)
    first = kernels.paged_attention(step.q, step.kv_cache, LAYER, plan, step.case.scale)
    step.kv_cache[:, 0] = step.kv_cache[:, LAYER]
    assert torch.equal(kernels.paged_attention(step.q, step.kv_cache, 0, plan, step.case.scale), first)


@pytest.mark.skipif(_C.isa() not in ("avx512", "amx"), reason="the chip's widest set is what the suite runs anyway")
def test_narrower_instruction_set() -> None:
    """The kernel tests once more with AVX2 in a process of its own."""
    folder = Path(__file__).parent
    tests = ("test_attention.py", "test_kv.py::test_write", "test_sampling.py", "test_sampling_logprobs.py")
    selection = "lengths or windows or soft_cap or 17 or 40 or test_write or features or against"
    command = ["-x", "-k", selection, *(str(folder / test) for test in tests)]
    done = run_tests(command, BEQUEST_ISA="avx2")
    assert done.returncode == 0, done.stdout + done.stderr
