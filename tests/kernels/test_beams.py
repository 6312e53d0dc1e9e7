"""Beam candidates on the CPU against the slow reference, at the edges of widths, masks and ties."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bequest.engine.kernels import cpu
from bequest.engine.kernels.beams import BeamConstraint, BeamGroup, PackedGroups, pack_groups
from bequest.engine.kernels.catalogue import CatalogueRule, PlacedCatalogue
from bequest.engine.kernels.cpu_beams import BeamCandidates, beam_candidates
from bequest.engine.types.catalogue import Catalogue
from tests.kernels.beam_reference import ReferenceGroup, check_group, expect

V = 1000
CPU = torch.device("cpu")


def constraint_of(group: ReferenceGroup, vocab: int, device: torch.device = CPU) -> BeamConstraint | None:
    rule = None
    if group.items is not None:
        width = max(map(len, group.items))
        rows = np.array([[*item, *(-1,) * (width - len(item))] for item in group.items], np.int32)
        rule = CatalogueRule(PlacedCatalogue(Catalogue(rows, vocab), device), group.ends)
    if rule is None and group.allowed is None and not group.bias and not group.forbidden:
        return None
    return BeamConstraint(
        vocab,
        device,
        allowed_token_ids=group.allowed,
        logit_bias=group.bias,
        forbidden=group.forbidden,
        rule=rule,
    )


def prepare(
    groups: list[ReferenceGroup], vocab: int, device: torch.device = CPU
) -> tuple[PackedGroups, npt.NDArray[np.int32], list[BeamConstraint | None]]:
    """The step's records, the rows' nodes, and what has to stay alive."""
    constraints = [constraint_of(group, vocab, device) for group in groups]
    packed = pack_groups([BeamGroup(g.num_rows, g.k, c) for g, c in zip(groups, constraints, strict=True)])
    nodes: list[int] = []
    for group, constraint in zip(groups, constraints, strict=True):
        if group.items is None:
            nodes += [0] * group.num_rows
        else:
            assert constraint is not None and constraint.rule is not None
            nodes += [constraint.rule.catalogue.walk(prefix) for prefix in group.prefixes]
    return packed, np.array(nodes, np.int32), constraints


def make_logits(num: int, vocab: int = V, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def make_cumulative(num: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(-10, 2, num).astype(np.float32)


def run(groups: list[ReferenceGroup], logits: torch.Tensor, cumulative: npt.NDArray[np.float32]) -> BeamCandidates:
    packed, nodes, alive = prepare(groups, logits.shape[1])
    found = beam_candidates(logits, cumulative, packed, nodes)
    del alive
    return found


def check(groups: list[ReferenceGroup], logits: torch.Tensor, cumulative: npt.NDArray[np.float32]) -> BeamCandidates:
    found = run(groups, logits, cumulative)
    begin = 0
    for g, group in enumerate(groups):
        rows = slice(begin, begin + group.num_rows)
        begin += group.num_rows
        expected = expect(group, logits[rows].numpy(), cumulative[rows])
        assert found.bad[rows].tolist() == (expected.bad & (group.k > 0)).tolist()
        check_group(group, expected, found.score[g], found.row[g], found.token[g], found.logprob[g])
    return found


ITEMS = frozenset({(1, 2, 3), (1, 2, 4), (1, 2), (7, 999, 0), (7, 999), (8,), (500, 1, 1, 1)})
PREFIXES = [(), (1,), (1, 2), (1, 2, 3), (7, 999), (8,), (500, 1)]
CASES: dict[str, list[ReferenceGroup]] = {
    "width 1": [ReferenceGroup(1, 2)],
    "first step": [ReferenceGroup(1, 64)],
    "width 4": [ReferenceGroup(4, 8)],
    "width 32": [ReferenceGroup(32, 64)],
    "k above V": [ReferenceGroup(1, 2048), ReferenceGroup(3, 4096)],
    "k of everything": [ReferenceGroup(2, 2 * V)],
    "mixed": [ReferenceGroup(1, 8), ReferenceGroup(5, 10), ReferenceGroup(1, 2), ReferenceGroup(32, 96)],
    "skipped": [ReferenceGroup(3, 0), ReferenceGroup(2, 4), ReferenceGroup(0, 4)],
    "allowed": [ReferenceGroup(3, 6, allowed=(0, 31, 32, 500, V - 1))],
    "allowed, too few": [ReferenceGroup(2, 12, allowed=(3, 999))],
    "nothing allowed": [ReferenceGroup(2, 4, allowed=())],
    "forbidden": [ReferenceGroup(4, 8, forbidden=tuple(range(0, V, 2)))],
    "bias": [ReferenceGroup(4, 8, bias=((0, 5.0), (17, 9.0), (18, -50.0), (V - 1, 8.5)))],
    "all masks": [
        ReferenceGroup(4, 8, allowed=range(0, V, 3), bias=((0, 50.0), (1, 60.0), (3, 49.0)), forbidden=(0, 9))
    ],
    "catalogue": [ReferenceGroup(7, 14, items=ITEMS, ends=(2, 42), prefixes=PREFIXES)],
    "catalogue and masks": [
        ReferenceGroup(
            *(7, 14),
            items=ITEMS,
            ends=(2, 42, 999),
            prefixes=PREFIXES,
            allowed=(1, 2, 3, 7, 42, 999),
            bias=((3, 2.5), (5, 70.0)),
            forbidden=(42,),
        ),
        ReferenceGroup(2, 4),
    ],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vocab", [V, 1001])
def test_equals_the_reference(case: str, vocab: int) -> None:
    groups = CASES[case]
    num_rows = sum(group.num_rows for group in groups)
    for seed in range(3):
        check(groups, make_logits(num_rows, vocab, seed), make_cumulative(num_rows, seed))


def test_equals_a_step_of_transformers() -> None:
    """Log-softmax, processors that add or mask, cumulative scores, topk over all beams: as `generate` does it."""
    width, k, eos = 4, 8, 7
    logits, cumulative = make_logits(width), make_cumulative(width)
    scores = torch.log_softmax(logits, -1)
    scores[:, eos] = -math.inf
    scores[:, 11] += 6.0
    scores += torch.from_numpy(cumulative)[:, None]
    best, index = torch.topk(scores.flatten(), k)
    found = run([ReferenceGroup(width, k, bias=((11, 6.0),), forbidden=(eos,))], logits, cumulative)
    assert found.row[0].tolist() == (index // V).tolist() and found.token[0].tolist() == (index % V).tolist()
    np.testing.assert_allclose(found.score[0], best.numpy(), rtol=1e-6)


def test_widest_group() -> None:
    check([ReferenceGroup(1024, 2048)], make_logits(1024, 300), make_cumulative(1024))


@pytest.mark.parametrize("step", [0.25, 4.0])
def test_ties(step: float) -> None:
    """Logits on a coarse grid: most values come many times."""
    groups = [ReferenceGroup(1, 40), ReferenceGroup(6, 30), ReferenceGroup(3, 64, bias=((5, step), (6, -step)))]
    logits = (make_logits(10) / step).round() * step
    cumulative = np.zeros(10, np.float32)
    check(groups, logits, cumulative)
    check(groups, torch.zeros(10, V), cumulative)


def test_equal_rows_are_taken_in_order() -> None:
    logits = make_logits(1).expand(4, V).contiguous()
    found = check([ReferenceGroup(4, 8)], logits, np.zeros(4, np.float32))
    assert found.row[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_bad_rows_fail_alone() -> None:
    logits = make_logits(8)
    logits[1, 17] = math.nan
    logits[3] = -math.inf
    logits[4, 0] = math.inf
    logits[5, ::2] = -math.inf
    cumulative = make_cumulative(8)
    cumulative[6] = math.nan
    found = check([ReferenceGroup(4, 8), ReferenceGroup(4, 8)], logits, cumulative)
    assert found.bad.tolist() == [False, True, False, True, True, False, True, False]


def test_a_dead_row_gives_nothing() -> None:
    cumulative = np.array([-math.inf, -3.0], np.float32)
    found = check([ReferenceGroup(2, 4)], make_logits(2), cumulative)
    assert found.row[0].tolist() == [1, 1, 1, 1] and not found.bad.any()


def random_groups(rng: random.Random) -> list[ReferenceGroup]:
    groups = []
    for _ in range(rng.randint(1, 5)):
        rows = rng.choice([1, 1, 2, 5])
        fields: dict[str, Any] = {}
        if rng.random() < 0.3:
            fields["allowed"] = rng.sample(range(V), rng.choice([1, 5, 700]))
        if rng.random() < 0.3:
            fields["bias"] = [(t, rng.uniform(-9, 9)) for t in rng.sample(range(V), rng.choice([1, 30]))]
        if rng.random() < 0.3:
            fields["forbidden"] = rng.sample(range(V), rng.choice([1, 3]))
        if rng.random() < 0.3:
            fields |= {"items": ITEMS, "ends": (2, 42), "prefixes": [rng.choice(PREFIXES) for _ in range(rows)]}
        groups.append(ReferenceGroup(rows, rng.choice([1, 2, 7, 40]), **fields))
    return groups


@pytest.mark.parametrize("seed", range(20))
def test_a_group_is_the_same_in_any_crowd(seed: int) -> None:
    groups = random_groups(random.Random(seed))
    num_rows = sum(group.num_rows for group in groups)
    logits, cumulative = make_logits(num_rows, seed=seed), make_cumulative(num_rows, seed)
    together = check(groups, logits, cumulative)
    begin = 0
    for g, group in enumerate(groups):
        rows = slice(begin, begin + group.num_rows)
        begin += group.num_rows
        alone = run([group], logits[rows], cumulative[rows])
        for field in ("score", "row", "token", "logprob"):
            assert (getattr(alone, field)[0, : group.k] == getattr(together, field)[g, : group.k]).all()


def test_rows_may_be_apart() -> None:
    logits = make_logits(3, 2 * V)[:, :V]
    check([ReferenceGroup(3, 6)], logits, make_cumulative(3))


@pytest.mark.parametrize("nodes", [[-1], [100]])
def test_a_node_outside_the_catalogue_is_an_error(nodes: list[int]) -> None:
    packed, _, alive = prepare([ReferenceGroup(1, 2, items=ITEMS, prefixes=[()])], V)
    with pytest.raises(cpu.Error, match="node"):
        beam_candidates(make_logits(1), make_cumulative(1), packed, np.array(nodes, np.int32))
    del alive


def test_tokens_outside_the_vocabulary_are_errors() -> None:
    for fields in ({"allowed_token_ids": [V]}, {"forbidden": [-1]}, {"logit_bias": [(V, 1.0)]}):
        with pytest.raises(cpu.Error, match="vocabulary"):
            BeamConstraint(V, CPU, **fields)  # type: ignore[arg-type]
