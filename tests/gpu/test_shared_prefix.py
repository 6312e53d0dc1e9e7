"""Sequences that share their first blocks: one read for all of them must give each what it gets by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bequest.engine.kernels import cuda_attention
from tests.gpu.test_attention import DEVICE, LAYER, Case, check_rows, make_step, run, workspace_of

pytestmark = pytest.mark.gpu


def sharers(count: int, keys: int, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """Sequences of one query with `keys` keys in common and 1 to 100 of their own."""
    own = np.random.default_rng(seed).integers(1, 100, count)
    return tuple((1, keys + int(n)) for n in own)


def check_shared(case: Case, common: list[int]) -> None:
    step = make_step(case, common=common)
    workspace = workspace_of(case)
    plan = workspace.plan(step.query_start, step.seq_lens, step.block_tables)
    check_rows(case, step, run(case, step, plan))
    check_left(workspace)


def check_left(workspace: cuda_attention.CudaAttentionWorkspace) -> None:
    """Counters and mailbox are as they were."""
    assert not workspace.tickets.any() and (workspace.mail == -1).all()


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("keys", [63, 64, 127, 128, 129, 192, 704, 720, 2047, 2048, 2200])
@pytest.mark.parametrize("count", [2, 3, 5, 33])
def test_lengths_and_counts(count: int, keys: int, block_size: int) -> None:
    case = Case(sharers(count, keys), num_q_heads=32, num_kv_heads=16, block_size=block_size)
    check_shared(case, [keys] * count)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (14, 2), (16, 2), (16, 1), (64, 2)], ids=str)
@pytest.mark.parametrize("keys", [704, 4096])
def test_heads(keys: int, heads: tuple[int, int], head_dim: int) -> None:
    case = Case(sharers(40, keys), num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    check_shared(case, [keys] * 40)


@pytest.mark.parametrize(
    "change", [{"window": 100}, {"soft_cap": 3.0}, {"has_sinks": True}, {"causal": False}, {"dtype": torch.float32}]
)
def test_masks_caps_and_dtypes(change: dict[str, object]) -> None:
    case = Case(sharers(20, 2500), num_q_heads=32, num_kv_heads=16, **change)  # type: ignore[arg-type]
    check_shared(case, [2500] * 20)


def test_groups_beside_others() -> None:
    """Two groups under one beginning, a prompt, a stranger, padding, and a group on a long prefix."""
    groups = (sharers(32, 704, 1), sharers(8, 960, 2), ((90, 300), (1, 5000), (1, 0), (3, 800)), sharers(40, 9000, 3))
    lens = tuple(pair for group in groups for pair in group)
    common = [704] * 32 + [128] + [960] * 7 + [0, 0, 0, 0] + [0] + [9000] * 39
    check_shared(Case(lens, num_q_heads=32, num_kv_heads=8), common)


@pytest.mark.parametrize("seed", range(6))
def test_random_sharing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lens = [(1, int(rng.integers(1, 4000))) for _ in range(100)]
    lens = [(1, n) if rng.random() < 0.9 else (int(rng.integers(1, 40)), n + 40) for _, n in lens]
    check_shared(
        Case(tuple(lens), num_q_heads=16, num_kv_heads=8),
        [int(rng.choice([0, 128, 700, 3000])) // 16 * 16 for _ in lens],
    )


def test_thousands_of_sharers() -> None:
    check_shared(Case(sharers(1500, 704), num_q_heads=16, num_kv_heads=8), [704] * 1500)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("change", [{}, {"soft_cap": 3.0}, {"has_sinks": True}, {"block_size": 64}], ids=str)
def test_many_tails_beside_others(change: dict[str, object], head_dim: int) -> None:
    """Warps attend to short tails and join states; a few queries each, strangers, a prompt and a long tail do not."""
    lens = (*sharers(300, 704), *[(6, 710)] * 8, (1, 3000), (1, 0), (40, 900), (1, 1704))
    case = Case(lens, num_q_heads=16, num_kv_heads=8, head_dim=head_dim, **change)  # type: ignore[arg-type]
    check_shared(case, [704] * 300 + [0] * 12)


@pytest.mark.parametrize(
    ("count", "keys", "own"),
    [
        (300, 704, 9),
        (1100, 704, 70),
        (32, 704, 40),
        (8, 704, 200),
        (64, 320, 100),
        (33, 640, 128),
        (33, 1024, 130),
        (32, 2048, 7),
        (40, 9000, 3),
    ],
)
def test_it_does_not_matter_who_is_first(count: int, keys: int, own: int) -> None:
    """Rows that wait for the states of others: the same bits each time."""
    case = Case(((1, keys + own),) * count, num_q_heads=32, num_kv_heads=8)
    step = make_step(case, common=[keys] * count)
    workspace = workspace_of(case)
    plan = workspace.plan(step.query_start, step.seq_lens, step.block_tables)
    first = run(case, step, plan).clone()
    check_rows(case, step, first)
    for _ in range(20):
        workspace.states.fill_(float("nan"))
        workspace.scales.fill_(float("nan"))
        assert torch.equal(run(case, step, plan), first)
    check_left(workspace)


@pytest.mark.parametrize("most", [1, 64])
def test_a_graph_serves_steps_with_and_without_groups(most: int) -> None:
    """One graph, captured on an empty list. `most`: queries of a sequence that the graph is made for."""
    slots = 40
    shape = Case(((1, 1),), num_q_heads=16, num_kv_heads=8)
    workspace = workspace_of(shape, slots, slots)
    work_list = torch.empty(workspace.list_len, dtype=torch.int32, pin_memory=True)
    empty = np.zeros(slots + 1, np.int32)
    workspace.write_list(empty, empty[:-1].copy(), np.zeros((slots, 1), np.int32), work_list)
    device_list = work_list.to(DEVICE)
    tables = torch.zeros(slots, 400, dtype=torch.int32, device=DEVICE)
    q = torch.zeros(slots, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    out = torch.zeros_like(q)
    cache = torch.full((14_000, 3, 2, 8, 16, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    plan = workspace.bind(device_list, tables, max_query_len=most)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_attention.paged_attention(q, cache, LAYER, plan, shape.scale, out=out)
    for seed, (count, keys) in enumerate([(40, 704), (1, 700), (13, 0), (33, 1500 if most == 1 else 5000), (2, 128)]):
        case = Case(sharers(count, keys, seed), num_q_heads=16, num_kv_heads=8, seed=seed)
        step = make_step(case, common=[keys] * count)
        cache[: step.kv_cache.shape[0]] = step.kv_cache
        tables.zero_()
        tables[:count, : step.block_tables.shape[1]] = torch.from_numpy(step.block_tables).to(DEVICE)
        q[:count] = step.q
        counts = workspace.write_list(step.query_start, step.seq_lens, step.block_tables, work_list)
        assert counts.prefill_items == 0 or most > 1
        device_list.copy_(work_list)
        out.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        check_rows(case, step, out[:count])
        assert (out[count:] == 7).all()
    check_left(workspace)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_small(head_dim: int) -> None:
    """Small enough for compute-sanitizer."""
    for count in (16, 130):  # in decode and in prefill tiles
        case = Case(sharers(count, 256), num_q_heads=64, num_kv_heads=32, head_dim=head_dim)
        check_shared(case, [256] * count)
