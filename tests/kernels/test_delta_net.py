"""The CPU's kernel of the gated delta rule: against a slow reference, and the same bits however tokens are cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as published

from bequest.engine.kernels import cpu
from bequest.engine.kernels.cpu_delta_net import delta_net, sigmoid_gate
from bequest.engine.kernels.delta_net import DeltaRule, RecurrentStep
from bequest.engine.types.recurrent import DeltaSizes
from tests.kernels.delta_net_reference import SlowSequence, make_rows, make_rule

SIZES = {
    "published": DeltaSizes(key_heads=2, value_heads=4, key_dim=128, value_dim=128, conv_width=4),
    "odd": DeltaSizes(key_heads=3, value_heads=3, key_dim=5, value_dim=7, conv_width=2),
    "strips": DeltaSizes(key_heads=1, value_heads=3, key_dim=24, value_dim=64 + 16 + 3, conv_width=4),
    "no-past": DeltaSizes(key_heads=1, value_heads=2, key_dim=8, value_dim=8, conv_width=1),
}
NUM_SLOTS = 7


@pytest.fixture(params=SIZES)
def rule(request: pytest.FixtureRequest) -> DeltaRule:
    return make_rule(SIZES[request.param])


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def empty_states(rule: DeltaRule, num_layers: int = 1) -> Tensor:
    return torch.full((NUM_SLOTS, num_layers, rule.sizes.state_size), torch.nan)


def run_step(rule: DeltaRule, states: Tensor, chunks: list[tuple[Tensor, int, dict[int, int]]]) -> list[Tensor]:
    """Of each chunk: its rows, the slot it goes on from, and the slots of states behind tokens of it."""
    counts = [len(rows) for rows, _, _ in chunks]
    query_start = ints([0, *torch.tensor(counts).cumsum(0).tolist()])
    slots = ints([kept.get(t, -1) for rows, _, kept in chunks for t in range(len(rows))])
    starts = ints([start for _, start, _ in chunks])
    out = delta_net(torch.cat([rows for rows, _, _ in chunks]), rule, RecurrentStep(states, query_start, starts, slots))
    return list(out.split(counts))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-5, error


@pytest.mark.parametrize("length", [1, 2, 3, 5, 70])
def test_against_the_slow_reference(rule: DeltaRule, length: int) -> None:
    rows, states, slow = make_rows(rule.sizes, length), empty_states(rule), SlowSequence(rule)
    (out,) = run_step(rule, states, [(rows, -1, {length - 1: 3})])
    assert_near(out, slow.step(rows))
    assert slow.state is not None
    assert_near(states[3, 0], slow.state)
    assert states[[0, 1, 2, 4, 5, 6]].isnan().all()  # nothing else was written


def test_the_published_function() -> None:
    rule = make_rule(SIZES["published"])
    n, rows = rule.sizes, make_rows(rule.sizes, 100)
    taps = rule.taps.T.contiguous()
    mixed, z, b, a = rows.split([n.channels, n.value_size, n.value_heads, n.value_heads], dim=1)
    mixed = published.causal_conv1d_fn(mixed.T[None], taps, activation="silu")[0].T
    q, k, v = mixed.split([n.key_size, n.key_size, n.value_size], dim=1)
    heads = [part.reshape(1, len(rows), -1, n.key_dim).repeat_interleave(2, 2) for part in (q, k)]
    decay = rule.decay * torch.nn.functional.softplus(a + rule.step_bias)
    gathered, state = published.torch_chunk_gated_delta_rule(
        *heads,
        v.reshape(1, len(rows), -1, n.value_dim),
        g=decay[None],
        beta=b.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = published.Qwen3NextRMSNormGated(n.value_dim, rule.eps)
    norm.weight.data = rule.norm
    with torch.no_grad():
        expected = norm(gathered.reshape(-1, n.value_dim), z.reshape(-1, n.value_dim)).view(len(rows), -1)
    states = empty_states(rule)
    (out,) = run_step(rule, states, [(rows, -1, {99: 0})])
    assert_near(out, expected.double())
    assert_near(states[0, 0, : state.numel()].view_as(state[0]), state[0].double())


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_cuts_change_no_bit(rule: DeltaRule, chunk: int) -> None:
    """In place, and from one slot to another."""
    rows, whole, in_place, moving = make_rows(rule.sizes, 71), *(empty_states(rule) for _ in range(3))
    (expected,) = run_step(rule, whole, [(rows, -1, {70: 0})])
    first, second, slot = [], [], -1
    for begin in range(0, 71, chunk):
        part = rows[begin : begin + chunk]
        first += run_step(rule, in_place, [(part, -1 if begin == 0 else 5, {len(part) - 1: 5})])
        to = 1 if slot == 2 else 2
        second += run_step(rule, moving, [(part, slot, {len(part) - 1: to})])
        slot = to
    assert torch.equal(torch.cat(first), expected) and torch.equal(torch.cat(second), expected)
    assert torch.equal(in_place[5], whole[0]) and torch.equal(moving[slot], whole[0])


def test_states_behind_tokens_in_the_middle(rule: DeltaRule) -> None:
    """Even where the last one replaces the state that the chunk goes on from."""
    rows, states, plain = make_rows(rule.sizes, 20), empty_states(rule), empty_states(rule)
    run_step(rule, states, [(rows[:9], -1, {8: 4})])
    (out,) = run_step(rule, states, [(rows[9:], 4, {0: 1, 1: 2, 5: 3, 10: 4})])
    for end, slot in ((10, 1), (11, 2), (15, 3), (20, 4)):
        (expected,) = run_step(rule, plain, [(rows[:end], -1, {end - 1: 0})])
        assert torch.equal(states[slot], plain[0])
    assert torch.equal(out, expected[9:])


def test_a_crowd_changes_no_bit(rule: DeltaRule) -> None:
    """Two that go on from the same state, one that begins, one without a token, and two threads."""
    parts = [make_rows(rule.sizes, count, seed) for seed, count in enumerate((9, 4, 1, 17))]
    states, alone = empty_states(rule), empty_states(rule)
    run_step(rule, states, [(parts[0], -1, {8: 0})])
    before, nothing = states[0].clone(), parts[0][:0]
    threads = cpu.num_threads()
    cpu.set_num_threads(2)
    outs = run_step(
        rule, states, [(parts[1], 0, {3: 1}), (nothing, 0, {}), (parts[2], 0, {0: 2}), (parts[3], -1, {16: 3})]
    )
    cpu.set_num_threads(threads)
    assert torch.equal(states[0], before) and len(outs[1]) == 0
    alone[0] = before
    for number, start, slot in ((0, 0, 1), (2, 0, 2), (3, -1, 3)):
        rows = parts[{0: 1, 2: 2, 3: 3}[number]]
        (expected,) = run_step(rule, alone, [(rows, start, {len(rows) - 1: 6})])
        assert torch.equal(outs[number], expected) and torch.equal(states[slot], alone[6])


def test_layers_lie_side_by_side() -> None:
    sizes = SIZES["odd"]
    rows, states = make_rows(sizes, 6), empty_states(make_rule(sizes), num_layers=3)
    rule = make_rule(sizes, num_layers=3, layer=1)
    (out,) = run_step(rule, states, [(rows, -1, {5: 2})])
    assert_near(out, SlowSequence(rule).step(rows))
    assert states[2, 0].isnan().all() and states[2, 2].isnan().all() and not states[2, 1].isnan().any()


def test_no_rows() -> None:
    rule = make_rule(SIZES["odd"])
    states = empty_states(rule)
    step = RecurrentStep(states, ints([0]), ints([]), ints([]))
    assert delta_net(make_rows(rule.sizes, 0), rule, step).shape == (0, rule.sizes.value_size)


def test_a_slot_that_is_not_there() -> None:
    rule, rows = make_rule(SIZES["odd"]), make_rows(SIZES["odd"], 2)
    for start, slot in ((NUM_SLOTS, 0), (-2, 0), (-1, NUM_SLOTS)):
        with pytest.raises(cpu.Error, match="outside the table"):
            run_step(rule, empty_states(rule), [(rows, start, {1: slot})])


def test_strong_decays_and_nan_stay_where_they_are() -> None:
    """A decay that forgets everything, and a sequence with NaN beside one without."""
    rule = make_rule(SIZES["published"])
    n, rows = rule.sizes, make_rows(rule.sizes, 8)
    rows[4, -n.value_heads :] = 90.0
    (out,) = run_step(rule, empty_states(rule), [(rows, -1, {7: 0})])
    assert_near(out, SlowSequence(rule).step(rows))
    bad = rows.clone()
    bad[0, 0] = torch.nan
    outs = run_step(rule, empty_states(rule), [(bad, -1, {7: 1}), (rows, -1, {7: 0})])
    assert outs[0].isnan().any() and torch.equal(outs[1], out)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 17), (2, 8200)])
def test_sigmoid_gate(shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(3)
    x, gate = (4.0 * torch.randn(shape, generator=random) for _ in range(2))
    expected = x.double() * torch.sigmoid(gate.double())
    assert sigmoid_gate(x, gate) is x
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-7)
