"""In a graph decode reads what was in the cache before the step while the kernel ahead still runs, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cuda as ops
from bequest.engine.kernels import cuda_attention as cuda
from bequest.engine.kernels.kv_format import FP8
from tests.gpu.test_attention import DEVICE, LAYER, Case, make_step, workspace_of

pytestmark = pytest.mark.gpu

# (query_len, seq_len) of each sequence, the keys that it has in common with the one before it, and whether all are old.
STEPS = {
    "apart": (((1, 700), (1, 1), (1, 3000), (1, 17), (1, 640), (1, 32)), (), True),
    "many": (tuple((1, 512 + 4 * i) for i in range(64)), (), True),
    "a common prefix": (((1, 800), (1, 900), (1, 1000)), (0, 640, 640), True),
    "a block that another one fills": (((1, 704), (1, 800), (1, 300)), (0, 704, 0), False),
    "the same, the other way round": (((1, 800), (1, 704)), (0, 704), False),
    "filled by several queries": (((4, 704), (1, 800)), (0, 704), False),
    "several queries": (((4, 700), (8, 800), (1, 20), (3, 3)), (), True),
    "a prompt beside": (((1, 700), (90, 300), (1, 800)), (0, 0, 0), False),
}


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", STEPS)
def test_steps_in_a_graph(name: str, head_dim: int, kv_dtype: torch.dtype) -> None:
    """Each step writes keys and values and attends to them; all of them in one graph are as one by one."""
    lens, common, are_old = STEPS[name]
    case = Case(lens, head_dim=head_dim)
    step = make_step(case, common=common)
    step = replace(step, kv_cache=step.kv_cache.to(kv_dtype))
    workspace = workspace_of(case)
    work_list = torch.empty(workspace.list_len, dtype=torch.int32, pin_memory=True)
    workspace.write_list(step.query_start, step.seq_lens, step.block_tables, work_list)
    assert bool(work_list[8]) == are_old
    most = max(query_len for query_len, _ in lens)
    tables = torch.from_numpy(step.block_tables).to(DEVICE)
    plan = workspace.bind(work_list.to(DEVICE), tables, max_query_len=most)
    slots = written_slots(case, step.block_tables)
    new = torch.randn(12, 2, len(slots), case.num_kv_heads, case.head_dim, device=DEVICE).to(case.dtype)

    def steps() -> list[Tensor]:
        results = []
        for k, v in new:
            ops.write_kv(k, v, step.kv_cache, LAYER, slots)
            results.append(cuda.paged_attention(step.q, step.kv_cache, LAYER, plan, case.scale))
        return results

    apart = torch.stack(steps())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps()
    for _ in range(5):
        graph.replay()
        assert torch.equal(torch.stack(found), apart)


def written_slots(case: Case, tables: np.ndarray) -> Tensor:
    """[T] int64: of all tokens of the step."""
    places = [(s, p) for s, (query_len, n) in enumerate(case.lens) for p in range(n - query_len, n)]
    size = case.block_size
    slots = [int(tables[s, p // size]) * size + p % size for s, p in places]
    return torch.tensor(slots, dtype=torch.int64, device=DEVICE)
