"""Beam candidates and catalogues on a device against the slow reference and against the CPU."""

from __future__ import annotations

import math
import random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu
from bequest.engine.kernels.catalogue import CatalogueRule, PlacedCatalogue
from bequest.engine.kernels.cpu_beams import constrain_row
from bequest.engine.kernels.cuda_beams import DeviceCandidates, DeviceGroups, beam_candidates, workspace
from bequest.engine.kernels.cuda_sampler import CudaSampler
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import SamplingParams
from bequest.engine.types.catalogue import Catalogue
from tests.kernels import test_beams as cases
from tests.kernels.beam_reference import ReferenceGroup, check_group, expect

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]
FIELDS = ("score", "row", "token", "logprob")
CANARY = 77


def run(groups: list[ReferenceGroup], logits: Tensor, cumulative: npt.NDArray[np.float32]) -> DeviceCandidates:
    """Results between canary rows, from a workspace that says nothing."""
    packed, nodes, alive = cases.prepare(groups, logits.shape[1], DEVICE)
    num_rows = logits.shape[0]
    guarded = DeviceCandidates.empty(num_rows + 2, len(groups) + 2, packed.columns, DEVICE)
    for field in FIELDS:
        getattr(guarded, field).fill_(CANARY)
    guarded.bad.fill_(True)
    inner = DeviceCandidates(*(getattr(guarded, field)[1:-1] for field in (*FIELDS, "bad")))
    memory = workspace(num_rows, packed.num_slots, DEVICE).fill_(0xFF)
    beam_candidates(
        logits,
        torch.from_numpy(cumulative).to(DEVICE),
        DeviceGroups.copy(packed, DEVICE),
        memory,
        inner,
        torch.from_numpy(nodes).to(DEVICE),
    )
    torch.cuda.synchronize()
    del alive
    for field in FIELDS:
        values = getattr(guarded, field)
        assert (values[0] == CANARY).all() and (values[-1] == CANARY).all()
    assert guarded.bad[0] and guarded.bad[-1]
    return inner


def check(groups: list[ReferenceGroup], logits: Tensor, cumulative: npt.NDArray[np.float32]) -> DeviceCandidates:
    """logits on the host, of the dtype to test."""
    found = run(groups, logits.to(DEVICE), cumulative)
    score, row, token, logprob = (getattr(found, field).cpu().numpy() for field in FIELDS)
    bad = found.bad.cpu().numpy()
    begin = 0
    for g, group in enumerate(groups):
        rows = slice(begin, begin + group.num_rows)
        begin += group.num_rows
        expected = expect(group, logits[rows].float().numpy(), cumulative[rows])
        assert bad[rows].tolist() == (expected.bad & (group.k > 0)).tolist()
        check_group(group, expected, score[g], row[g], token[g], logprob[g])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("vocab", [1000, 1001])
def test_equals_the_reference(case: str, vocab: int, dtype: torch.dtype) -> None:
    groups = cases.CASES[case]
    num_rows = sum(group.num_rows for group in groups)
    check(groups, cases.make_logits(num_rows, vocab).to(dtype), cases.make_cumulative(num_rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "groups",
    [
        [ReferenceGroup(1, 64), ReferenceGroup(8, 16), ReferenceGroup(1, 2)],
        [ReferenceGroup(1, 300), ReferenceGroup(2, 1024)],
        [ReferenceGroup(1, 4096)],
        [ReferenceGroup(4, 8, allowed=range(5, 151_936, 7), forbidden=(12, 19), bias=((26, 9.0),))],
        [ReferenceGroup(4, 200, bias=[(t, 4.0) for t in range(0, 3000, 3)])],
    ],
)
def test_a_large_vocabulary(groups: list[ReferenceGroup], dtype: torch.dtype) -> None:
    num_rows = sum(group.num_rows for group in groups)
    check(groups, cases.make_logits(num_rows, 151_936).to(dtype), cases.make_cumulative(num_rows))


@pytest.mark.parametrize(("width", "k", "vocab"), [(1024, 2048, 300), (1024, 4096, 2000), (100, 200, 20_000)])
def test_wide_groups(width: int, k: int, vocab: int) -> None:
    check([ReferenceGroup(width, k)], cases.make_logits(width, vocab), cases.make_cumulative(width))


@pytest.mark.parametrize("k", [2, 64, 400, 4096])
def test_logits_in_the_worst_order(k: int) -> None:
    """Ascending: every token is better than all before it. Equal: none is. And a few values many times."""
    vocab = 50_000
    ascending = torch.arange(vocab) * 1e-3
    coarse = cases.make_logits(1, vocab)[0].round()
    logits = torch.stack([ascending, torch.zeros(vocab), ascending.flip(0), coarse, -torch.zeros(vocab)])
    check([ReferenceGroup(1, k) for _ in logits], logits, np.zeros(len(logits), np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties(dtype: torch.dtype) -> None:
    groups = [ReferenceGroup(1, 40), ReferenceGroup(6, 30), ReferenceGroup(3, 64, bias=((5, 0.25), (6, -0.25)))]
    logits = (cases.make_logits(10) * 4).round() / 4
    check(groups, logits.to(dtype), np.zeros(10, np.float32))


def test_bad_rows_fail_alone() -> None:
    logits = cases.make_logits(8)
    logits[1, 17] = math.nan
    logits[3] = -math.inf
    logits[4, 0] = math.inf
    logits[5, ::2] = -math.inf
    cumulative = cases.make_cumulative(8)
    cumulative[6] = math.nan
    cumulative[0] = -math.inf
    found = check([ReferenceGroup(4, 8), ReferenceGroup(4, 8)], logits, cumulative)
    assert found.bad.tolist() == [False, True, False, True, True, False, True, False]
    assert set(found.row[0].tolist()) == {2}


@pytest.mark.parametrize("seed", range(10))
def test_a_group_is_the_same_in_any_crowd_and_on_the_cpu(seed: int) -> None:
    groups = cases.random_groups(random.Random(seed))
    num_rows = sum(group.num_rows for group in groups)
    logits, cumulative = cases.make_logits(num_rows, seed=seed), cases.make_cumulative(num_rows, seed)
    together = check(groups, logits, cumulative)
    host = cases.run(groups, logits, cumulative)
    np.testing.assert_allclose(together.score.cpu().numpy(), host.score, rtol=1e-6)
    assert (together.token.cpu().numpy() == host.token).all()
    begin = 0
    for g, group in enumerate(groups):
        rows = slice(begin, begin + group.num_rows)
        begin += group.num_rows
        alone = run([group], logits[rows].to(DEVICE), cumulative[rows])
        for field in FIELDS:
            assert torch.equal(getattr(alone, field)[0, : group.k], getattr(together, field)[g, : group.k])


def test_a_padded_graph_serves_smaller_steps() -> None:
    rows, slots, num_groups, columns = 12, 200, 4, 16
    logits = torch.empty(rows, cases.V, device=DEVICE)
    cumulative = torch.zeros(rows, device=DEVICE)
    nodes = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    memory = workspace(rows, slots, DEVICE)
    out = DeviceCandidates.empty(rows, num_groups, columns, DEVICE)
    empty, _, _ = cases.prepare([ReferenceGroup(0, 0)] * num_groups, cases.V, DEVICE)
    static = DeviceGroups.copy(empty, DEVICE)
    beam_candidates(logits, cumulative, static, memory, out, nodes)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        beam_candidates(logits, cumulative, static, memory, out, nodes)
    for widths in ([4], [1, 3, 8], [2, 2, 2, 2]):
        groups = [ReferenceGroup(w, 2 * w) for w in widths]
        used = sum(widths)
        packed, _, _ = cases.prepare(groups + [ReferenceGroup(0, 0)] * (num_groups - len(groups)), cases.V, DEVICE)
        step = DeviceGroups.copy(packed, DEVICE)
        static.group_start.copy_(step.group_start)
        static.records.copy_(step.records)
        logits.fill_(math.nan)
        logits[:used] = cases.make_logits(used).to(DEVICE)
        graph.replay()
        expected = run(groups, logits[:used], np.zeros(used, np.float32))
        for g, group in enumerate(groups):
            for field in FIELDS:
                assert torch.equal(getattr(out, field)[g, : group.k], getattr(expected, field)[g, : group.k])
        assert (out.token[len(groups) :] == -1).all() and not out.bad.any()


# --- sampling in a catalogue

EOS = 999
ITEMS = [(1, 2, 3), (1, 2), (1, 4, 5), (7,), (8, 8, 8), (30, EOS), (31, 500, 998)]


def rule_on(device: torch.device) -> CatalogueRule:
    rows = np.array([[*item, *(-1,) * (3 - len(item))] for item in ITEMS], np.int32)
    return CatalogueRule(PlacedCatalogue(Catalogue(rows, cases.V), device), [EOS])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=9, top_k=2, logit_bias=((7, -2.0),)),
        SamplingParams(max_tokens=9, allowed_token_ids=(1, 2, 4, 5, EOS)),
    ],
)
def test_sampled_items_are_members_and_those_of_the_cpu(params: SamplingParams) -> None:
    num = 40
    device, host = CudaSampler(num, cases.V, DEVICE), cpu.Sampler(num, cases.V)
    on_device, on_host = rule_on(DEVICE), rule_on(torch.device("cpu"))
    begun = [(1, 4) if row % 8 == 0 else () for row in range(num)]
    for row in range(num):
        spec = row_spec(row, params, seed=row, prompt=(1, 2, 3), outputs=begun[row])
        device.open_row(spec, on_device)
        host.open_row(spec)
        constrain_row(host, row, on_host, begun[row])
    device.flush()
    rows = torch.arange(num, dtype=torch.int32)
    found = [list(tokens) for tokens in begun]
    ended = np.zeros(num, np.bool_)
    for step in range(5):
        logits = cases.make_logits(num, seed=step)
        positions = torch.full_like(rows, step)
        expected, expected_bad = host.sample(logits, rows, positions)
        tokens, bad = device.sample(logits.to(DEVICE), rows.to(DEVICE), positions.to(DEVICE))
        assert tokens.tolist() == expected.tolist() and bad.tolist() == expected_bad.tolist()
        ended |= expected_bad
        for row in np.flatnonzero(~ended):
            found[row].append(int(expected[row]))
    assert ended.all()
    assert {tuple(tokens) for tokens in found} <= {(*item, EOS) for item in ITEMS}
