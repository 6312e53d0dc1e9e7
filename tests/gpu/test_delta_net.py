"""The GPU's kernels of the gated delta rule: against the slow reference, and the same bits however tokens are cut and
whichever kernel they pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels.delta_net import DeltaRule, RecurrentStep
from bequest.engine.types.recurrent import DeltaSizes
from tests.kernels.delta_net_reference import SlowSequence, make_rows, make_rule

pytestmark = pytest.mark.gpu

SIZES = {
    "published": DeltaSizes(key_heads=2, value_heads=4, key_dim=128, value_dim=128, conv_width=4),
    "many-heads": DeltaSizes(key_heads=3, value_heads=12, key_dim=128, value_dim=128, conv_width=4),
    "narrow-values": DeltaSizes(key_heads=1, value_heads=2, key_dim=128, value_dim=64, conv_width=4),
    "odd": DeltaSizes(key_heads=3, value_heads=3, key_dim=5, value_dim=7, conv_width=2),
    "wide-keys": DeltaSizes(key_heads=1, value_heads=3, key_dim=96, value_dim=40, conv_width=4),
}
NUM_SLOTS = 7
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def on_device(rule: DeltaRule) -> DeltaRule:
    return DeltaRule(
        sizes=rule.sizes,
        taps=rule.taps.cuda(),
        decay=rule.decay.cuda(),
        step_bias=rule.step_bias.cuda(),
        norm=rule.norm.cuda(),
        eps=rule.eps,
        state_layer=rule.state_layer,
    )


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def empty_states(rule: DeltaRule) -> Tensor:
    return torch.full((NUM_SLOTS, 1, rule.sizes.state_size), torch.nan, device="cuda")


def run_step(
    rule: DeltaRule,
    states: Tensor,
    chunks: list[tuple[Tensor, int, dict[int, int]]],
    padding: int = 0,
    *,
    one_each: bool = False,
) -> list[Tensor]:
    """Of each chunk: its rows, the slot it goes on from, and the slots of states behind tokens of it; with so many rows
    and sequences of padding. `one_each`: the kernel for chunks of one row"""
    from bequest.engine.kernels.cuda_delta_net import delta_net

    counts = [len(rows) for rows, _, _ in chunks]
    ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
    slots = [kept.get(t, -1) for rows, _, kept in chunks for t in range(len(rows))]
    starts = [start for _, start, _ in chunks]
    rows = torch.cat([rows.cuda() for rows, _, _ in chunks])
    rows = torch.cat([rows, rows.new_full((padding, rows.shape[1]), torch.nan)])
    step = RecurrentStep(
        states,
        ints(ends + [ends[-1]] * padding),
        ints(starts + [0] * padding),
        ints(slots + [-1] * padding),
        one_each=one_each,
    )
    out = delta_net(rows, on_device(rule), step)
    assert not out[ends[-1] :].any()  # zeros, not NaN
    return list(out[: ends[-1]].split(counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 70])
@pytest.mark.parametrize("name", SIZES)
def test_against_the_slow_reference(name: str, length: int, dtype: torch.dtype) -> None:
    rule = make_rule(SIZES[name])
    rows, states, slow = make_rows(rule.sizes, length).to(dtype), empty_states(rule), SlowSequence(rule)
    (out,) = run_step(rule, states, [(rows, -1, {length - 1: 3})], padding=2)
    expected = slow.step(rows.float())
    assert (out.double().cpu() - expected).abs().max() / expected.abs().max() < TOLERANCES[dtype]
    assert slow.state is not None
    assert (states[3, 0].double().cpu() - slow.state).abs().max() / slow.state.abs().max() < 1e-4
    assert states[[0, 1, 2, 4, 5, 6]].isnan().all()  # nothing else was written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", SIZES)
def test_cuts_and_crowds_change_no_bit(name: str, chunk: int, dtype: torch.dtype) -> None:
    rule = make_rule(SIZES[name])
    rows = make_rows(rule.sizes, 71).to(dtype)
    whole, cut = empty_states(rule), empty_states(rule)
    (expected,) = run_step(rule, whole, [(rows, -1, {70: 0})])
    outs, slot = [], -1
    for begin in range(0, 71, chunk):
        part, to = rows[begin : begin + chunk], 1 if slot == 2 else 2
        other = (rows[:5], -1, {4: 5})
        outs.append(run_step(rule, cut, [other, (part, slot, {len(part) - 1: to})], padding=3)[1])
        slot = to
    assert torch.equal(torch.cat(outs), expected) and torch.equal(cut[slot], whole[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SIZES)
def test_one_token_at_a_time_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    """By the kernel for steps in which no sequence has more than one token, beside two other sequences. Of 12 heads
    there is room for two blocks each, but not beside three sequences of padding: then a head has one."""
    rule = make_rule(SIZES[name])
    rows = make_rows(rule.sizes, 37).to(dtype)
    whole, alone = empty_states(rule), empty_states(rule)
    (expected,) = run_step(rule, whole, [(rows, -1, {36: 0})])
    outs, slot = [], -1
    for t in range(37):
        to = 1 if slot == 2 else 2
        chunks = [(rows[3:4], -1, {0: 5}), (rows[t : t + 1], slot, {0: to}), (rows[5:6], -1, {0: 6})]
        outs.append(run_step(rule, alone, chunks, padding=t % 4, one_each=True)[1])
        slot = to
    assert torch.equal(torch.cat(outs), expected) and torch.equal(alone[slot], whole[0])


def test_more_sequences_than_are_scanned_at_once() -> None:
    rule = make_rule(SIZES["published"])
    rows, lengths = make_rows(rule.sizes, 40), [1 + i % 9 for i in range(150)]
    states = torch.full((150, 1, rule.sizes.state_size), torch.nan, device="cuda")
    chunks = [(rows[i % 30 : i % 30 + length], -1, {length - 1: i}) for i, length in enumerate(lengths)]
    outs = run_step(rule, states, chunks, padding=5)
    for i in (0, 63, 64, 127, 128, 149):
        alone = empty_states(rule)
        (expected,) = run_step(rule, alone, [(chunks[i][0], -1, {lengths[i] - 1: 0})])
        assert torch.equal(outs[i], expected) and torch.equal(states[i], alone[0])


@pytest.mark.parametrize("name", SIZES)
def test_states_behind_tokens_in_the_middle(name: str) -> None:
    rule = make_rule(SIZES[name])
    rows, states, plain = make_rows(rule.sizes, 20), empty_states(rule), empty_states(rule)
    run_step(rule, states, [(rows[:9], -1, {8: 4})])
    run_step(rule, states, [(rows[9:], 4, {0: 1, 1: 2, 5: 3, 10: 5})])
    for end, slot in ((9, 4), (10, 1), (11, 2), (15, 3), (20, 5)):
        run_step(rule, plain, [(rows[:end], -1, {end - 1: 0})])
        assert torch.equal(states[slot], plain[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 17, 4096])
def test_sigmoid_gate(count: int, dtype: torch.dtype) -> None:
    from bequest.engine.kernels.cuda_delta_net import sigmoid_gate

    random = torch.Generator().manual_seed(3)
    x, gate = ((4.0 * torch.randn(2, count, generator=random)).to(dtype) for _ in range(2))
    expected = x.double() * torch.sigmoid(gate.double())
    result = sigmoid_gate(x.cuda(), gate.cuda()).double().cpu()
    torch.testing.assert_close(result, expected, rtol=1e-5 if dtype is torch.float32 else 8e-3, atol=1e-6)
