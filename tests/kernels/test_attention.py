"""Paged attention against a slow float64 reference, at the edges of blocks, tiles and splits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cpu as kernels

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A step: (query_len, seq_len) per sequence, and the shape of the model."""

    lens: tuple[tuple[int, int], ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    bias_reach: int | None = None
    has_sinks: bool = False
    bfloat16: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def bias(self) -> Tensor | None:
        """[NQ, 2 R + 1], wide enough to change who gets the weight."""
        if self.bias_reach is None:
            return None
        generator = torch.Generator().manual_seed(99)
        return 3 * torch.randn(self.num_q_heads, 2 * self.bias_reach + 1, generator=generator)

    @property
    def sinks(self) -> Tensor | None:
        """[NQ], of which some take nearly all of the weight and some hardly any."""
        return torch.linspace(-6.0, 9.0, self.num_q_heads) if self.has_sinks else None


@dataclass(frozen=True)
class Step:
    """The tensors of a case. `keys`, `values`: what each sequence wrote, [seq_len, NKV, D] in the cache's dtype."""

    case: Case
    q: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    kv_cache: Tensor
    block_tables: np.ndarray

    @property
    def query_start(self) -> np.ndarray:
        return np.cumsum([0, *(query_len for query_len, _ in self.case.lens)], dtype=np.int32)

    @property
    def seq_lens(self) -> np.ndarray:
        return np.array([seq_len for _, seq_len in self.case.lens], dtype=np.int32)


LAYER, NUM_LAYERS = 1, 3


_POOL = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0))


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers, from a random place of those that were drawn before where there are enough: long sequences want
    millions, and take longer to draw than to attend to. Two sequences do not begin at the same one."""
    count = math.prod(shape)
    if count > len(_POOL) // 2:
        return torch.randn(shape, generator=generator)
    first = int(torch.randint(len(_POOL) - count, (1,), generator=generator))
    return _POOL[first : first + count].reshape(shape).clone()


def make_step(case: Case) -> Step:
    """Writes random keys and values through write_kv into shuffled blocks; every slot not written is NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    blocks_of = [-(-seq_len // case.block_size) for _, seq_len in case.lens]
    num_blocks = sum(blocks_of) + 3
    shape = (num_blocks, NUM_LAYERS, 2, case.num_kv_heads, case.block_size, case.head_dim)
    kv_cache = torch.full(shape, NAN, dtype=case.dtype)
    shuffled = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    block_tables = np.zeros((len(case.lens), max(blocks_of) + 1), dtype=np.int32)
    keys, values = [], []
    for s, (_, seq_len) in enumerate(case.lens):
        table = [shuffled.pop() for _ in range(blocks_of[s])]
        block_tables[s, : len(table)] = table
        k, v = drawn(generator, 2, seq_len, case.num_kv_heads, case.head_dim)
        positions = torch.arange(seq_len)
        slots = torch.tensor(table, dtype=torch.int64)[positions // case.block_size] if table else positions
        kernels.write_kv(k, v, kv_cache, LAYER, slots * case.block_size + positions % case.block_size)
        keys.append(k.to(case.dtype))
        values.append(v.to(case.dtype))
    num_tokens = sum(query_len for query_len, _ in case.lens)
    q = torch.randn(num_tokens, case.num_q_heads, case.head_dim, generator=generator)
    return Step(case, q, tuple(keys), tuple(values), kv_cache, block_tables)


def make_plan(step: Step) -> kernels.AttentionPlan:
    case = step.case
    return kernels.AttentionPlan(
        step.query_start,
        step.seq_lens,
        step.block_tables,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        num_blocks=step.kv_cache.shape[0],
        causal=case.causal,
        window=case.window,
        bfloat16=case.bfloat16,
    )


def attend(step: Step) -> Tensor:
    case = step.case
    return kernels.paged_attention(
        step.q, step.kv_cache, LAYER, make_plan(step), case.scale, case.soft_cap, bias=case.bias, sinks=case.sinks
    )


def reference(step: Step) -> Tensor:
    """One query, one head, one softmax at a time, in float64."""
    case, bias = step.case, step.case.bias
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    for s, (query_len, seq_len) in enumerate(case.lens):
        for i in range(query_len):
            position = seq_len - query_len + i
            end = position + 1 if case.causal else seq_len
            begin = max(0, end - case.window) if case.window else 0
            token = step.query_start[s] + i
            for head in range(case.num_q_heads):
                kv_head = head // (case.num_q_heads // case.num_kv_heads)
                k = step.keys[s][begin:end, kv_head].double()
                scores = k @ step.q[token, head].double() * case.scale
                if case.soft_cap:
                    scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
                if bias is not None:
                    reach = bias.shape[1] // 2
                    distances = torch.arange(begin, end) - position
                    scores += bias[head, distances.clamp(-reach, reach) + reach].double()
                if begin == end:
                    continue
                if case.sinks is not None:
                    scores = torch.cat((scores, case.sinks[head, None].double()))
                weights = torch.softmax(scores, 0)[: end - begin]
                out[token, head] = weights @ step.values[s][begin:end, kv_head].double()
    return out


def check(case: Case) -> None:
    step = make_step(case)
    torch.testing.assert_close(attend(step).double(), reference(step), rtol=2e-5, atol=2e-5)


EDGE_LENS = tuple((1, n) for n in (1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1100))


@pytest.mark.parametrize("lens", [EDGE_LENS, *(((n, n),) for n in (1, 7, 8, 9, 63, 64, 65, 200))])
def test_lengths(lens: tuple[tuple[int, int], ...]) -> None:
    check(Case(lens))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reach", [0, 1, 16, 63, 128, 600])
def test_bias_by_distance(reach: int, causal: bool) -> None:
    """Within the reach, at its edges, and clamped on both sides; few rows and many."""
    lens = ((1, 1), (1, 130), (1, 700), (70, 70), (12, 300), (2, 64), (0, 7))
    window = 1 << 28 if causal else 0
    shape = Case(lens, causal=causal, bias_reach=reach, window=window)
    check(shape)
    check(replace(shape, lens=lens[:3], num_q_heads=3, num_kv_heads=3, head_dim=17))


def test_cross_attention() -> None:
    """Queries of a decoder over keys of an encoder: more of these or of those, and none at all."""
    lens = ((1, 70), (20, 5), (1, 1), (3, 0), (64, 65), (1, 1500))
    check(Case(lens, causal=False, num_q_heads=6, num_kv_heads=6, head_dim=64, block_size=16))


def test_a_bias_beside_what_it_cannot_be_beside_is_refused() -> None:
    with pytest.raises(kernels.Error, match="no soft cap beside it"):
        attend(make_step(Case(((1, 3),), bias_reach=2, window=9, soft_cap=5.0)))
    with pytest.raises(kernels.Error, match="a bias needs a window"):
        attend(make_step(Case(((1, 3),), bias_reach=2)))


def test_mixed_step_with_prefill_chunks_decode_and_idle_sequences() -> None:
    check(Case(((0, 5), (1, 70), (33, 33), (0, 0), (17, 530), (1, 1), (100, 150), (0, 64))))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 1), (9, 3), (8, 1), (7, 1), (14, 2), (16, 4), (250, 1)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check(Case(((1, 70), (5, 69)), num_q_heads=heads[0], num_kv_heads=heads[1]))


@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 15, 16, 17, 24, 31, 33, 40, 64, 80, 96, 100, 128, 129, 192, 255, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check(Case(((1, 70), (5, 9)), head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    check(Case(((1, 2 * block_size + 1), (9, 130), (1, block_size)), block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("window", [1, 7, 8, 63, 64, 65, 200, 5000])
def test_windows(window: int) -> None:
    check(Case(((1, 1), (1, 600), (70, 70), (5, 530), (20, 140)), window=window))


@pytest.mark.parametrize("change", [{}, {"window": 9}, {"soft_cap": 3.0}, {"num_kv_heads": 6, "head_dim": 20}], ids=str)
def test_sinks(change: dict[str, Any]) -> None:
    """In one split and over several, of one query and of many."""
    check(replace(Case(((1, 70), (20, 80), (1, 1), (1, 1300), (30, 600)), num_q_heads=6, has_sinks=True), **change))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap: float, causal: bool) -> None:
    check(Case(((1, 70), (20, 80), (1, 1)), soft_cap=soft_cap, causal=causal, num_q_heads=6))


def test_without_causal_mask() -> None:
    check(Case(((1, 70), (20, 80), (10, 3), (65, 65)), causal=False))


def test_query_that_sees_no_key_gives_zeros() -> None:
    step = make_step(Case(((3, 0), (2, 5)), causal=False))
    out = attend(step)
    assert torch.equal(out[:3], torch.zeros(3, 4, 16)) and out[3:].abs().min() > 0


def test_large_scores_do_not_overflow() -> None:
    step = make_step(Case(((5, 300),)))
    step = replace(step, q=step.q * 1e4)
    torch.testing.assert_close(attend(step).double(), reference(step), rtol=1e-3, atol=1e-3)


def test_shared_blocks() -> None:
    """Two sequences over the same blocks, one of them over a prefix, as after a fork."""
    step = make_step(Case(((3, 20), (2, 12), (4, 20))))
    tables = step.block_tables.copy()
    tables[1, :2] = tables[0, :2]
    tables[2] = tables[0]
    keys = (step.keys[0], step.keys[0][:12], step.keys[0])
    values = (step.values[0], step.values[0][:12], step.values[0])
    shared = replace(step, block_tables=tables, keys=keys, values=values)
    torch.testing.assert_close(attend(shared).double(), reference(shared), rtol=2e-5, atol=2e-5)


def test_queries_in_fused_rows_and_output_between_canaries() -> None:
    step = make_step(Case(((5, 70), (1, 9))))
    num_tokens, num_q_heads, head_dim = step.q.shape
    fused = torch.full((num_tokens, num_q_heads + 4, head_dim), NAN)
    fused[:, :num_q_heads] = step.q
    room = torch.full((num_tokens + 2, num_q_heads, head_dim), 7.0)
    out = kernels.paged_attention(
        fused[:, :num_q_heads], step.kv_cache, LAYER, make_plan(step), step.case.scale, out=room[1:-1]
    )
    assert torch.equal(out, attend(step)) and out.data_ptr() == room[1].data_ptr()
    assert (room[0] == 7.0).all() and (room[-1] == 7.0).all()


def test_nan_in_a_sequence_stays_in_it() -> None:
    step = make_step(Case(((2, 70), (1, 40))))
    clean = attend(step)
    step.q[1, 2] = NAN
    dirty = attend(step)
    assert dirty[1, 2].isnan().all()
    dirty[1, 2] = clean[1, 2]
    assert torch.equal(clean, dirty)


def test_empty_step() -> None:
    assert attend(make_step(Case(((0, 5),)))).shape == (0, 4, 16)
    one = make_step(Case(((0, 5),), num_q_heads=1, num_kv_heads=1))
    nothing = torch.zeros(3, 1, 16)[torch.zeros(0, dtype=torch.int64)]  # of one head torch says a distance of 0
    assert attend(replace(one, q=nothing)).shape == (0, 1, 16)


def plan_with(**changes: object) -> kernels.AttentionPlan:
    arguments: dict[str, object] = {
        "query_start": np.array([0, 2], np.int32),
        "seq_lens": np.array([9], np.int32),
        "block_tables": np.array([[1, 2]], np.int32),
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "block_size": 8,
        "num_blocks": 3,
    }
    return kernels.AttentionPlan(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"block_tables": np.array([[1, 3]], np.int32)},
        {"block_tables": np.array([[-1, 1]], np.int32)},
        {"block_tables": np.array([[1]], np.int32)},
        {"seq_lens": np.array([1], np.int32)},
        {"seq_lens": np.array([-1], np.int32)},
        {"query_start": np.array([1, 2], np.int32)},
        {"query_start": np.array([0, -1], np.int32)},
        {"num_kv_heads": 3},
        {"window": 4, "causal": False},
        {"window": -1},
    ],
)
def test_invalid_plans_are_errors(changes: dict[str, object]) -> None:
    plan_with()
    with pytest.raises(_C.Error):
        plan_with(**changes)


def test_plan_for_another_cache_is_an_error() -> None:
    step = make_step(Case(((2, 9),)))
    other = torch.zeros(9, NUM_LAYERS, 2, 2, 8, 15)
    with pytest.raises(_C.Error, match="another shape"):
        kernels.paged_attention(step.q, other, LAYER, make_plan(step), 1.0)
    with pytest.raises(_C.Error, match="another shape"):
        kernels.paged_attention(step.q, step.kv_cache[:2], LAYER, make_plan(step), 1.0)
    with pytest.raises(_C.Error, match="layer"):
        kernels.paged_attention(step.q, step.kv_cache, NUM_LAYERS, make_plan(step), 1.0)
