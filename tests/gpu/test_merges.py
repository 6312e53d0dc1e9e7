"""The merge of cut tiles: a plan that launches it without need, or not at all, gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu.test_attention import DEVICE, Case, check_rows, make_step, run, workspace_of
from tests.gpu.test_shared_prefix import check_left, sharers

pytestmark = pytest.mark.gpu

MANY = tuple((1, int(n)) for n in np.random.default_rng(0).integers(1, 3000, 200))
CASES = {
    "one": (((1, 65536),), 0),
    "few": (((1, 20000), (1, 1), (1, 300), (1, 9000)), 0),
    "even": (((1, 1024),) * 32, 0),
    "many": (MANY, 0),
    "several queries": (((2, 5000), (4, 700), (3, 3), (1, 12000)), 0),
    "nothing to merge": (((1, 40),) * 5, 0),
    "a shared prefix": (sharers(12, 4096), 4096),
    "a long one": (sharers(32, 4096), 4096),
    "a short one": (sharers(33, 704), 704),
}


@pytest.mark.parametrize("heads", [(4, 4), (32, 8), (14, 2), (16, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_it_does_not_matter_what_else_a_plan_is_made_for(name: str, head_dim: int, heads: tuple[int, int]) -> None:
    lens, common = CASES[name]
    if max(query_len for query_len, _ in lens) * heads[0] // heads[1] > 16:
        lens = tuple((1, seq_len) for _, seq_len in lens)  # else they were prefill tiles
    case = Case(lens, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    step = make_step(case, common=[common] * len(lens) if common else ())
    workspace = workspace_of(case)
    work_list = torch.empty(workspace.list_len, dtype=torch.int32, pin_memory=True)
    counts = workspace.write_list(step.query_start, step.seq_lens, step.block_tables, work_list)
    if counts.prefill_items:
        pytest.skip("the prefix is read by prefill tiles")
    work_list, tables = work_list.to(DEVICE), torch.from_numpy(step.block_tables).to(DEVICE)
    plans = [workspace.bind(work_list, tables, max_query_len=most) for most in (1, 1000)]
    if counts.merges == 0:
        plans.append(workspace.bind(work_list, tables, max_query_len=1, merges=False))
    else:
        assert name != "nothing to merge"
    first = run(case, step, plans[0]).clone()
    check_rows(case, step, first)
    for plan in plans * 3:
        workspace.states.fill_(float("nan"))
        workspace.scales.fill_(float("nan"))
        assert torch.equal(run(case, step, plan), first)
    check_left(workspace)
