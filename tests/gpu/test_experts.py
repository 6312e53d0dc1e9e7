"""Experts on a GPU: the choice, its plan and the products, each against a slow reference in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.kernels import cuda_experts as experts
from bequest.engine.kernels.cuda_experts import ExpertChoice, ExpertMatrices, RoutingRule
from tests.gpu.test_ops import DEVICE, guarded, randn

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
PLAIN = RoutingRule(
    top_k=2, scoring="softmax", bias=None, num_groups=1, top_groups=1, group_best=1, renormalises=False, factor=1.0
)


# --- the choice -----------------------------------------------------------------------------------------------------


def reference_scores(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """What experts count and what they are chosen by, [T, E] float64."""
    wide = logits.double().cpu()
    scores = wide.softmax(-1) if rule.scoring == "softmax" else wide.sigmoid()
    ranked = scores if rule.bias is None else scores + rule.bias.double().cpu()
    if rule.num_groups > 1:
        groups = ranked.unflatten(1, (rule.num_groups, -1))
        best = groups.topk(rule.group_best, -1).values.sum(-1)
        left = best.sort(dim=-1, descending=True, stable=True).indices[:, rule.top_groups :]
        ranked = groups.scatter(1, left[:, :, None].expand(-1, -1, groups.shape[2]), -torch.inf).flatten(1)
    return scores, ranked


def check_choice(logits: Tensor, rule: RoutingRule) -> ExpertChoice:
    num_read = torch.full((1,), 7, device=DEVICE)
    choice = experts.route(logits, rule, num_read)
    # What counts NaN is read by nobody.
    assert num_read.item() - 7 == choice.ids[~choice.weights.isnan()].unique().numel()
    scores, ranked = reference_scores(logits, rule)
    ids = choice.ids.long().cpu()
    assert ids.shape == (len(logits), rule.top_k) and ((ids >= 0) & (ids < logits.shape[1])).all()
    assert all(len(set(row)) == rule.top_k for row in ids.tolist())
    # Scores that float32 cannot tell apart may change places.
    best = ranked.sort(dim=-1, descending=True, stable=True).values[:, : rule.top_k]
    torch.testing.assert_close(ranked.gather(1, ids), best, rtol=1e-5, atol=1e-9)
    weights = scores.gather(1, ids)
    if rule.renormalises:
        weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(choice.weights.double().cpu(), weights * rule.factor, rtol=2e-5, atol=1e-9)
    check_plan(choice)
    return choice


@dataclass
class Plan:
    """csrc/ops/cuda/expert_plan.h"""

    runs: list[list[int]]  # of each tile: expert, first pair, pairs, first tile
    order: list[int]
    tile_rows: int


def read_plan(choice: ExpertChoice) -> Plan:
    num_tokens, top_k = choice.ids.shape
    pairs = num_tokens * top_k
    most = min(num_tokens, 2 * pairs // choice.num_experts + 6)
    tile_rows = next(size for size in (8, 16, 32, 64, 128, 256) if size >= min(most, 256))
    most_tiles = min(pairs, choice.num_experts) + pairs // tile_rows
    words = choice.plan.view(torch.int32).tolist()
    assert len(words) == 4 + 4 * most_tiles + pairs and words[0] <= most_tiles
    runs = [words[4 + 4 * tile : 8 + 4 * tile] for tile in range(words[0])]
    return Plan(runs, words[4 + 4 * most_tiles :], tile_rows)


def check_plan(choice: ExpertChoice) -> None:
    if choice.ids.numel() == 0:
        return
    plan, flat = read_plan(choice), choice.ids.flatten().cpu()
    kept = ~choice.weights.flatten().isnan().cpu()
    order = flat.sort(stable=True).indices
    assert plan.order[: int(kept.sum())] == order[kept[order]].tolist()
    flat = flat[kept]
    expected, first = [], 0
    for expert, count in enumerate(torch.bincount(flat, minlength=choice.num_experts).tolist()):
        tiles = -(-count // plan.tile_rows)
        expected += [[expert, first, count, len(expected)]] * tiles
        first += count
    assert plan.runs == expected


SIZES = [(1, 1), (2, 2), (7, 3), (64, 6), (100, 32), (128, 8), (256, 8), (512, 10), (1000, 4), (1024, 32)]


@pytest.mark.parametrize(("num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 32, 33, 2100])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_softmax_routing(num_experts: int, top_k: int, num_tokens: int, dtype: torch.dtype) -> None:
    logits = randn(num_tokens, num_experts, dtype=dtype, seed=num_experts, scale=2.0)
    check_choice(logits, replace(PLAIN, top_k=top_k))
    check_choice(logits, replace(PLAIN, top_k=top_k, renormalises=True, factor=2.5))


@pytest.mark.parametrize(("num_groups", "top_groups", "group_best"), [(1, 1, 1), (8, 4, 2), (8, 1, 1), (32, 3, 2)])
@pytest.mark.parametrize("num_tokens", [1, 31, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_sigmoid_routing_by_groups(
    num_groups: int, top_groups: int, group_best: int, num_tokens: int, with_bias: bool
) -> None:
    logits = randn(num_tokens, 256, seed=1)
    bias = randn(256, seed=2, scale=0.1) if with_bias else None
    rule = RoutingRule(
        top_k=8,
        scoring="sigmoid",
        bias=bias,
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=group_best,
        renormalises=True,
        factor=2.5,
    )
    check_choice(logits, rule)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_of_equal_experts_the_smaller_comes_first(num_tokens: int) -> None:
    logits = torch.zeros(num_tokens, 200, device=DEVICE)
    logits[1, 150] = logits[1, 77] = logits[2, 33] = 1.0
    choice = check_choice(logits, replace(PLAIN, top_k=4))
    assert choice.ids[:3].tolist() == [[0, 1, 2, 3], [77, 150, 0, 1], [33, 0, 1, 2]]


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_nan_is_chosen_last_and_stays_in_its_row(num_tokens: int) -> None:
    logits = randn(num_tokens, 64, seed=3)
    sane = experts.route(logits, PLAIN)
    logits[0] = float("nan")
    num_read = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    choice = experts.route(logits, PLAIN, num_read)
    assert num_read.item() == choice.ids[1:].unique().numel()
    assert choice.ids[0].tolist() == [0, 1] and choice.weights[0].isnan().all()
    assert torch.equal(choice.ids[1:], sane.ids[1:]) and torch.equal(choice.weights[1:], sane.weights[1:])
    check_plan(choice)  # no expert is read for it
    sigmoid = replace(PLAIN, scoring="sigmoid")
    logits[0] = -5.0
    logits[0, :62] = float("nan")
    assert experts.route(logits, sigmoid).ids[0].tolist() == [62, 63]


# --- the products ---------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """Random matrices of E experts with H and I, and random rows."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    dtype: torch.dtype = BF16
    with_bias: bool = False

    def __post_init__(self) -> None:
        self.up = self.matrices(2 * self.inner, self.hidden, seed=11)
        self.down = self.matrices(self.hidden, self.inner, seed=12)

    def matrices(self, outputs: int, depth: int, seed: int) -> ExpertMatrices:
        weight = randn(self.num_experts, outputs, depth, dtype=self.dtype, seed=seed, scale=depth**-0.5)
        return ExpertMatrices(weight, randn(self.num_experts, outputs, seed=seed + 5) if self.with_bias else None)

    def rows(self, num_tokens: int) -> tuple[Tensor, ExpertChoice]:
        x = randn(num_tokens, self.hidden, dtype=self.dtype, seed=13)
        logits = randn(num_tokens, self.num_experts, seed=14, scale=2.0)
        return x, experts.route(logits, replace(PLAIN, top_k=self.top_k, renormalises=True))


def products(x: Tensor, matrices: ExpertMatrices, choice: ExpertChoice, pairs_of_row: int) -> Tensor:
    """[T K, N] float64"""
    out = torch.empty(choice.ids.numel(), matrices.weight.shape[1], dtype=torch.float64, device=DEVICE)
    flat = choice.ids.flatten()
    for expert in flat.unique().tolist():
        pairs = (flat == expert).nonzero().flatten()
        out[pairs] = x[pairs // pairs_of_row].double() @ matrices.weight[expert].double().T
        if matrices.bias is not None:
            out[pairs] += matrices.bias[expert].double()
    return out


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def gated_by(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "clamped_swish":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def reference_gated(x: Tensor, layer: Layer, choice: ExpertChoice, activation: str = "silu") -> Tensor:
    gate, up = products(x, layer.up, choice, layer.top_k).to(x.dtype).double().chunk(2, dim=1)
    return gated_by(activation, gate, up)


def reference_summed(x: Tensor, layer: Layer, choice: ExpertChoice) -> Tensor:
    each = products(x, layer.down, choice, 1).to(x.dtype).double().view(*choice.ids.shape, layer.hidden)
    return (each * choice.weights.double()[:, :, None]).sum(1)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Row by row, up to the rounding of operands and results."""
    tolerance = 8e-3 if actual.dtype is BF16 else 1e-5
    assert actual.shape == expected.shape
    error, size = (actual.double() - expected).norm(dim=1), expected.norm(dim=1)
    assert (error <= tolerance * size + 1e-9).all(), (error / size).max().item()


def check_layer(layer: Layer, num_tokens: int, activation: str = "silu") -> None:
    x, choice = layer.rows(num_tokens)
    inner, check_inner = guarded(num_tokens * layer.top_k, layer.inner, dtype=layer.dtype)
    experts.gated(x, layer.up, choice, activation, inner)
    assert_near(inner, reference_gated(x, layer, choice, activation))
    check_inner()
    out, check_out = guarded(num_tokens, layer.hidden, dtype=layer.dtype)
    experts.summed(inner, layer.down, choice, out)
    assert_near(out, reference_summed(inner, layer, choice))
    check_out()


# Sizes of less than a panel, of part of one, of an odd number of panels, and of blocks that the outputs do not fill.
SHAPES = [
    (4, 2, 64, 32),
    (8, 2, 8, 8),
    (8, 8, 200, 88),
    (3, 1, 192, 136),
    (16, 4, 320, 64),
    (60, 4, 256, 176),
    (128, 8, 256, 96),
]
COUNTS = [1, 2, 7, 9, 33, 64, 200, 700, 1100]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [0, *COUNTS])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(shape: tuple[int, int, int, int], num_tokens: int, with_bias: bool) -> None:
    check_layer(Layer(*shape, with_bias=with_bias), num_tokens)


@pytest.mark.parametrize("shape", [*SHAPES[:4], (5, 2, 50, 27)])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_products_in_float32(shape: tuple[int, int, int, int], num_tokens: int) -> None:
    check_layer(Layer(*shape, dtype=F32, with_bias=num_tokens == 40), num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_sizes_that_are_no_multiples_of_eight(num_tokens: int) -> None:
    check_layer(Layer(6, 2, 52, 27, with_bias=True), num_tokens)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swish"])
def test_activations(activation: str) -> None:
    check_layer(Layer(8, 2, 128, 64), 20, activation)


@pytest.mark.parametrize(
    ("shape", "num_tokens"),
    [((128, 8, 2048, 768), 1), ((128, 8, 2048, 768), 48), ((256, 8, 2048, 512), 300), ((8, 2, 4096, 14336), 9)],
)
def test_real_shapes(shape: tuple[int, int, int, int], num_tokens: int) -> None:
    check_layer(Layer(*shape), num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 17, 128, 129, 256, 257, 600])
def test_one_expert_gets_all(num_tokens: int) -> None:
    layer = Layer(32, 1, 256, 128)
    x = randn(num_tokens, 256, dtype=BF16, seed=1)
    logits = torch.zeros(num_tokens, 32, device=DEVICE)
    logits[:, 31] = 1.0
    choice = experts.route(logits, replace(PLAIN, top_k=1))
    assert (choice.ids == 31).all()
    inner = experts.gated(x, layer.up, choice, "silu")
    assert_near(inner, reference_gated(x, layer, choice))
    assert_near(experts.summed(inner, layer.down, choice), reference_summed(inner, layer, choice))


def forward(layer: Layer, x: Tensor, logits: Tensor) -> Tensor:
    choice = experts.route(logits, replace(PLAIN, top_k=layer.top_k, renormalises=True))
    return experts.summed(experts.gated(x, layer.up, choice, "silu"), layer.down, choice)


@pytest.mark.parametrize("shape", [(128, 8, 512, 256), (8, 2, 320, 192), (6, 2, 52, 27)])
def test_rows_do_not_depend_on_the_batch(shape: tuple[int, int, int, int]) -> None:
    """Whatever the tiles are that other rows lead to."""
    layer = Layer(*shape)
    x, logits = randn(900, shape[2], dtype=BF16, seed=1), randn(900, shape[0], dtype=BF16, seed=2, scale=2.0)
    whole = forward(layer, x, logits)
    for count in (1, 2, 8, 9, 31, 33, 100, 130, 257, 512, 899):
        assert torch.equal(forward(layer, x[-count:], logits[-count:].contiguous()), whole[-count:]), count


@pytest.mark.parametrize("num_tokens", [3, 40, 300])
def test_nan_stays_in_its_row(num_tokens: int) -> None:
    layer = Layer(16, 2, 128, 64)
    x, logits = randn(num_tokens, 128, dtype=BF16, seed=1), randn(num_tokens, 16, seed=2)
    clean = forward(layer, x, logits)
    x[1] = float("nan")
    spoilt = forward(layer, x, logits)
    assert spoilt[1].isnan().all()
    others = torch.arange(num_tokens, device=DEVICE) != 1
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("num_tokens", [3, 40, 300])
def test_a_row_without_a_choice_is_nan(num_tokens: int) -> None:
    """Also where all are such rows."""
    layer = Layer(16, 2, 128, 64)
    x, logits = randn(num_tokens, 128, dtype=BF16, seed=1), randn(num_tokens, 16, seed=2)
    clean = forward(layer, x, logits)
    logits[1] = float("nan")
    spoilt = forward(layer, x, logits)
    others = torch.arange(num_tokens, device=DEVICE) != 1
    assert spoilt[1].isnan().all() and torch.equal(spoilt[others], clean[others])
    assert forward(layer, x, torch.full_like(logits, float("nan"))).isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 16, 100])
def test_a_graph_serves_other_choices(num_tokens: int) -> None:
    layer = Layer(64, 4, 256, 128)
    x, logits = randn(num_tokens, 256, dtype=BF16, seed=1), randn(num_tokens, 64, seed=2)
    forward(layer, x, logits)
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.empty(0)
    with torch.cuda.graph(graph):
        out = forward(layer, x, logits)
    for seed in (3, 4):
        x.copy_(randn(num_tokens, 256, dtype=BF16, seed=seed))
        logits.copy_(randn(num_tokens, 64, seed=seed + 10, scale=3.0))
        graph.replay()
        assert torch.equal(out, forward(layer, x, logits))


@pytest.mark.parametrize("num_tokens", [1, 4, 20, 200])
def test_kernels_that_overlap_wait_for_each_other(num_tokens: int) -> None:
    """Layers after one another without a pause give what they give one by one."""
    layers = [Layer(32, 4, 256, 128), Layer(48, 4, 256, 192)]
    logits = [randn(num_tokens, layer.num_experts, seed=i) for i, layer in enumerate(layers)]
    start = randn(num_tokens, 256, dtype=BF16, seed=5)

    def run(apart: bool) -> Tensor:
        x = start
        for _ in range(4):
            for layer, of_layer in zip(layers, logits, strict=True):
                choice = experts.route(of_layer + x[:, :1].float(), replace(PLAIN, top_k=4))
                if apart:
                    torch.cuda.synchronize()
                inner = experts.gated(x, layer.up, choice, "silu")
                if apart:
                    torch.cuda.synchronize()
                x = x + experts.summed(inner, layer.down, choice)
        return x

    first = run(apart=True)
    for _ in range(30):
        assert torch.equal(run(apart=False), first)


@pytest.mark.parametrize(
    ("num_tokens", "with_bias"), [(1, True), (10, False), (20, False), (50, True), (120, True), (300, False)]
)
def test_small(num_tokens: int, with_bias: bool) -> None:
    """Each kind of tile once, for the sanitizers."""
    check_layer(Layer(4, 2, 136, 40, with_bias=with_bias), num_tokens)
    logits = randn(num_tokens, 96, seed=1)
    check_choice(logits, replace(PLAIN, top_k=8, num_groups=4, top_groups=2))
