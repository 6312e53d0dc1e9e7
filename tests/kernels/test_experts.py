"""Experts on the CPU against slow references: the choice, the products of each expert, and their sums."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels import cpu_experts
from bequest.engine.kernels.cpu_experts import PackedExperts
from bequest.engine.types.scoring import Scoring

pytestmark = pytest.mark.usefixtures("two_threads")

TOKENS = [0, 1, 2, 3, 5, 16, 17, 33, 70]
needs_units = pytest.mark.skipif(not kernels.multiplies_tiles(), reason="this chip has no matrix units")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the choice ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rule:
    top_k: int
    scoring: Scoring = "softmax"
    bias: Tensor | None = None
    groups: tuple[int, int, int] = (1, 1, 1)
    renormalises: bool = False
    factor: float = 1.0

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rule = cpu_experts.routing_rule(
            self.top_k, self.scoring, self.bias, self.groups, self.renormalises, self.factor
        )
        return cpu_experts.route(logits, rule)


def slow_route(logits: list[float], rule: Rule) -> tuple[list[int], list[float]]:
    """Of one token, by definition."""
    values = torch.tensor(logits, dtype=torch.float64)
    scores = (values.softmax(0) if rule.scoring == "softmax" else values.sigmoid()).tolist()
    bias = [0.0] * len(scores) if rule.bias is None else rule.bias.tolist()
    ranked = [score + extra for score, extra in zip(scores, bias, strict=True)]
    num_groups, top_groups, best = rule.groups
    size = len(scores) // num_groups
    members = [range(group * size, (group + 1) * size) for group in range(num_groups)]
    of_groups = [sum(sorted((ranked[i] for i in group), reverse=True)[:best]) for group in members]
    kept = sorted(range(num_groups), key=lambda group: (-of_groups[group], group))[:top_groups]
    candidates = [i for group in kept for i in members[group]]
    ids = sorted(candidates, key=lambda i: (-ranked[i], i))[: rule.top_k]
    total = sum(scores[i] for i in ids) if rule.renormalises else 1.0
    return ids, [scores[i] / total * rule.factor for i in ids]


RULES = {
    "best": Rule(top_k=1),
    "softmax": Rule(top_k=4),
    "renormalised": Rule(top_k=8, renormalises=True, factor=2.5),
    "all": Rule(top_k=24, renormalises=True),
    "sigmoid": Rule(top_k=4, scoring="sigmoid"),
    "bias": Rule(top_k=4, scoring="sigmoid", bias=random(24, seed=5), renormalises=True, factor=1.5),
    "bias-softmax": Rule(top_k=3, bias=0.1 * random(24, seed=5)),
    "groups": Rule(top_k=6, groups=(6, 2, 1)),
    "groups-of-two": Rule(top_k=8, scoring="sigmoid", bias=random(24, seed=6), groups=(4, 2, 2), renormalises=True),
    "all-groups": Rule(top_k=5, groups=(4, 4, 2)),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33, 200])
def test_a_choice_is_that_of_its_definition(rule: Rule, num_tokens: int) -> None:
    logits = 2 * random(num_tokens, 24, seed=num_tokens)
    ids, weights = rule.route(logits)
    assert ids.shape == weights.shape == (num_tokens, rule.top_k)
    for token, row in enumerate(logits.tolist()):
        expected_ids, expected_weights = slow_route(row, rule)
        assert ids[token].tolist() == expected_ids
        torch.testing.assert_close(weights[token], torch.tensor(expected_weights), rtol=2e-6, atol=0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_scores_the_smaller_number_comes_first(scoring: Scoring) -> None:
    logits = torch.tensor([[0.0] * 7, [1.0, 3.0, 1.0, 3.0, 3.0, 0.0, 1.0]])
    ids, weights = Rule(top_k=5, scoring=scoring).route(logits)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [1, 3, 4, 0, 2]]
    assert len(weights[0].unique()) == 1 and len(weights[1].unique()) == 2


def test_equal_groups_are_taken_by_their_number() -> None:
    ids, _ = Rule(top_k=4, groups=(4, 2, 2)).route(torch.zeros(1, 8))
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_nan_stays_with_its_token(scoring: Scoring) -> None:
    logits = random(3, 8)
    rule = Rule(top_k=3, scoring=scoring, renormalises=True)
    expected = rule.route(logits)
    logits[1, 4] = torch.nan
    ids, weights = rule.route(logits)
    for row in (0, 2):
        assert torch.equal(ids[row], expected[0][row]) and torch.equal(weights[row], expected[1][row])
    assert len(set(ids[1].tolist())) == 3 and all(0 <= one < 8 for one in ids[1].tolist())
    if scoring == "softmax":
        assert weights[1].isnan().all()
    else:  # the other scores do not know of it
        assert 4 not in ids[1].tolist()


def test_scores_that_vanish_do_not_divide_by_zero() -> None:
    ids, weights = Rule(top_k=2, scoring="sigmoid", renormalises=True).route(torch.full((1, 4), -200.0))
    assert ids.tolist() == [[0, 1]] and weights.isfinite().all()


@pytest.mark.parametrize("num_experts", [1, 3, 15, 16, 17, 60, 128, 513])
def test_a_token_is_routed_alone_as_in_a_crowd(num_experts: int) -> None:
    logits = random(77, num_experts, seed=3)
    rule = Rule(top_k=min(num_experts, 6), renormalises=True)
    ids, weights = rule.route(logits)
    for row in range(77):
        one_id, one_weight = rule.route(logits[row : row + 1].clone())
        assert torch.equal(one_id[0], ids[row]) and torch.equal(one_weight[0], weights[row])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule(top_k=9), "more experts than there are"),
        (Rule(top_k=5, groups=(4, 2, 1)), "more experts than there are"),
        (Rule(top_k=2, groups=(3, 1, 1)), "groups of different sizes"),
        (Rule(top_k=2, groups=(8, 2, 2)), "groups too small"),
        (Rule(top_k=2, groups=(2, 3, 1)), "more groups than there are"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(rule: Rule, words: str) -> None:
    with pytest.raises(kernels.Error, match=words):
        rule.route(torch.zeros(1, 8))


# --- products -----------------------------------------------------------------------------------------------------

E, H, INNER = 7, 48, 40


def matrices(n: int, k: int, seed: int) -> Tensor:
    return 0.3 * random(E, n, k, seed=seed)


def packed(values: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> PackedExperts:
    return cpu_experts.pack_experts([[one] for one in values], len(values), bias, dtype)


def choices(num_tokens: int, kind: str) -> tuple[Tensor, Tensor]:
    """ids and weights [T, 3]"""
    if kind == "one":  # every token takes the same experts, and the others have none
        ids = torch.tensor([5, 0, 2], dtype=torch.int32).repeat(num_tokens, 1)
    else:
        ids = random(num_tokens, E, seed=num_tokens).argsort(1)[:, :3].int().contiguous()
    return ids, random(num_tokens, 3, seed=9).abs()


@pytest.mark.parametrize("kind", ["one", "any"])
@pytest.mark.parametrize("inner", [INNER, 32])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_each_expert(dtype: torch.dtype, has_bias: bool, inner: int, kind: str) -> None:
    """To the bit what `linear` gives a row alone, and near what float64 gives."""
    up, down = matrices(2 * inner, H, seed=1), matrices(H, inner, seed=2)
    up_bias, down_bias = (random(E, n, seed=4) if has_bias else None for n in (2 * inner, H))
    ups, downs = packed(up, dtype, up_bias), packed(down, dtype, down_bias)
    for num_tokens in TOKENS:
        ids, weights = choices(num_tokens, kind)
        x = random(num_tokens, H, seed=7)
        between = cpu_experts.expert_gated(x, ups, ids, weights, "silu")
        total = cpu_experts.expert_summed(between, downs, ids, weights)
        assert between.shape == (3 * num_tokens, inner) and total.shape == x.shape
        for row, expert in enumerate(ids.flatten().tolist()):
            token = row // 3
            one = _gated(x[token : token + 1], ups, expert, up_bias)
            assert torch.equal(one[0], between[row])
        expected = _slow(x, *(w.to(dtype).double() for w in (up, down)), up_bias, down_bias, ids, weights)
        tolerance = 2e-2 if kernels.multiplies_tiles() and dtype is torch.bfloat16 else 5e-5
        torch.testing.assert_close(total.double(), expected, rtol=tolerance, atol=tolerance)


def _gated(x: Tensor, ups: PackedExperts, expert: int, bias: Tensor | None) -> Tensor:
    weight, own = ups.each[expert], None if bias is None else bias[expert]
    if weight.can_gate:
        return kernels.gated_linear(x, weight, "silu", own)
    return kernels.gated_activation(kernels.linear(x, weight, own), "silu")


def _slow(
    x: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, ids: Tensor, weights: Tensor
) -> Tensor:
    """[T, H] float64, token by token."""
    total = torch.zeros(len(x), H, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            both = up[expert] @ x[token].double() + (0 if up_bias is None else up_bias[expert].double())
            gate, through = both.chunk(2)
            inner = torch.nn.functional.silu(gate) * through
            given = down[expert] @ inner + (0 if down_bias is None else down_bias[expert].double())
            total[token] += weight * given
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_multiplied_alone_as_in_a_crowd(dtype: torch.dtype) -> None:
    ups, downs = packed(matrices(2 * INNER, H, 1), dtype), packed(matrices(H, INNER, 2), dtype)
    ids, weights = choices(300, "any")
    x = random(300, H, seed=7)

    def run(rows: slice) -> Tensor:
        some, theirs = ids[rows].contiguous(), weights[rows].contiguous()
        between = cpu_experts.expert_gated(x[rows].contiguous(), ups, some, theirs, "gelu")
        return cpu_experts.expert_summed(between, downs, some, theirs)

    crowd = run(slice(None))
    for begin in (0, 1, 57, 299):
        for count in (1, 2, 40):
            rows = slice(begin, begin + count)
            assert torch.equal(run(rows), crowd[rows])


def test_only_experts_that_are_used_are_read() -> None:
    """Those without tokens may hold anything."""
    up, down = matrices(2 * INNER, H, seed=1), matrices(H, INNER, seed=2)
    ids, weights = choices(5, "one")
    x = random(5, H)

    def run() -> Tensor:
        ups, downs = packed(up, torch.float32), packed(down, torch.float32)
        return cpu_experts.expert_summed(cpu_experts.expert_gated(x, ups, ids, weights, "relu"), downs, ids, weights)

    expected = run()
    for unused in (1, 3, 4, 6):
        up[unused], down[unused] = torch.nan, torch.nan
    assert torch.equal(run(), expected)


def test_the_number_of_an_expert_is_checked() -> None:
    ups = packed(matrices(2 * INNER, H, 1), torch.float32)
    ids, weights = choices(2, "any")
    for wrong in (-1, E):
        ids[1, 2] = wrong
        with pytest.raises(kernels.Error, match="number of an expert"):
            cpu_experts.expert_gated(random(2, H), ups, ids, weights, "silu")


@pytest.mark.parametrize("width", [1, 7, 16, 33, 200])
def test_gated_rows_are_added(width: int) -> None:
    for num_tokens in TOKENS:
        out, rows, gates = (
            random(num_tokens, width),
            random(num_tokens, width, seed=1),
            3 * random(num_tokens, 1, seed=2),
        )
        expected = out.double() + gates.double().sigmoid() * rows.double()
        alone = [
            cpu_experts.add_gated_rows(*(t[i : i + 1].clone() for t in (out, rows, gates))) for i in range(num_tokens)
        ]
        total = cpu_experts.add_gated_rows(out, rows, gates)
        assert total is out
        torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
        for row, one in enumerate(alone):
            assert torch.equal(one[0], total[row])
