"""Norms, rotary positions and gated activations against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap

CANARY = 12345.0
TOKENS = [0, 1, 2, 33]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("hidden", [1, 3, 15, 16, 17, 63, 64, 65, 576, 2049])
def test_rms_norm(hidden: int) -> None:
    weight = random(hidden, seed=1)
    for t in TOKENS:
        x = random(t, hidden, seed=2)
        expected = rms_reference(x, weight, 1e-5)
        guarded = torch.full((t + 2, hidden), CANARY)
        assert_close(kernels.rms_norm(x, weight, 1e-5, out=guarded[1:-1]), expected)
        assert (guarded[0] == CANARY).all() and (guarded[-1] == CANARY).all()
        assert kernels.rms_norm(x, weight, 1e-5, out=x) is x
        assert_close(x, expected)


@pytest.mark.parametrize("hidden", [1, 17, 576])
def test_rms_norm_adds_to_the_residual_first(hidden: int) -> None:
    weight = random(hidden, seed=1)
    for t in TOKENS:
        x, residual = random(t, hidden, seed=2), random(t, hidden, seed=3)
        total = x + residual
        before = x.clone()
        out = kernels.rms_norm(x, weight, 1e-6, residual=residual)
        assert torch.equal(residual, total) and torch.equal(x, before)
        assert torch.equal(out, kernels.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("hidden", [1, 17, 576])
def test_rms_norm_taps_what_it_is_asked_for(hidden: int) -> None:
    """Token 0 wants layers 1 and 70, token 1 nothing, token 2 layer 70, token 3 layers 0 and 127, around the ring."""
    wanted = [(1, 70), (), (70,), (0, 127)]
    masks = torch.tensor(
        [[sum(1 << b for b in w if b < 64), sum(1 << b - 64 for b in w if b >= 64)] for w in wanted[:3]]
    )
    masks = torch.cat([masks, torch.tensor([[1, -(2**63)]])])
    guarded = torch.full((8, hidden), CANARY)
    ring = guarded[1:7]
    table = HiddenTap(torch.tensor([0, -1, 2, 5], dtype=torch.int32), masks, ring)
    weight = random(hidden, seed=1)
    states = {}
    for layer in (0, 1, 2, 70, 127):
        x, residual = random(4, hidden, seed=layer), random(4, hidden, seed=layer + 1)
        apart = residual.clone()
        out = kernels.rms_norm(x, weight, 1e-5, residual, tap=LayerTap(table, layer, layer == 127))
        assert torch.equal(out, kernels.rms_norm(x, weight, 1e-5, apart)) and torch.equal(residual, apart)
        states[layer] = out if layer == 127 else residual
    # Token 3 begins in the last row of the ring: its second layer goes to row 0, over token 0's first.
    for row, (layer, token) in {0: (127, 3), 1: (70, 0), 2: (70, 2), 5: (0, 3)}.items():
        assert torch.equal(ring[row], states[layer][token]), row
    assert (ring[3:5] == CANARY).all() and (guarded[0] == CANARY).all() and (guarded[7] == CANARY).all()
    with pytest.raises(kernels.Error, match="tap"):
        kernels.rms_norm(x, weight, 1e-5, residual, tap=LayerTap(table, 128))


def test_rms_norm_of_small_and_of_broken_rows() -> None:
    weight = torch.ones(40)
    x = random(3, 40)
    x[0] = 0.0
    x[1, 39] = torch.nan
    out = kernels.rms_norm(x, weight, 1e-6)
    assert (out[0] == 0).all() and out[1].isnan().all() and not out[2].isnan().any()


def test_rms_norm_refuses_to_overwrite_the_residual() -> None:
    x, residual = random(2, 8), random(2, 8, seed=1)
    with pytest.raises(kernels.Error, match="residual"):
        kernels.rms_norm(x, torch.ones(8), 1e-6, residual=residual, out=residual)


@pytest.mark.parametrize(("nq", "nkv", "d"), [(9, 3, 64), (1, 1, 3), (2, 1, 128)])
def test_head_rms_norm_touches_its_slice_of_the_fused_row_alone(nq: int, nkv: int, d: int) -> None:
    weight = random(d, seed=1)
    for t in TOKENS:
        qkv = random(t, (nq + 2 * nkv) * d, seed=2)
        before = qkv.clone()
        kernels.head_rms_norm(qkv[:, nq * d : (nq + nkv) * d].view(t, nkv, d), weight, 1e-6)
        keys = before[:, nq * d : (nq + nkv) * d].view(t, nkv, d)
        assert_close(qkv[:, nq * d : (nq + nkv) * d].view(t, nkv, d), rms_reference(keys, weight, 1e-6))
        assert torch.equal(qkv[:, : nq * d], before[:, : nq * d])
        assert torch.equal(qkv[:, (nq + nkv) * d :], before[:, (nq + nkv) * d :])


def rotary_reference(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """x [T, heads, D] by complex multiplication: first half + i · second half, times cos + i · sin."""
    half = cos_sin.shape[1] // 2
    angles = cos_sin.double()[positions.long()]
    turn = torch.complex(angles[:, None, :half], angles[:, None, half:])
    head = torch.complex(x.double()[..., :half], x.double()[..., half : 2 * half]) * turn
    return torch.cat([head.real, head.imag, x.double()[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize(
    ("nq", "nkv", "d", "rotary_dim"), [(9, 3, 64, 64), (2, 1, 80, 20), (1, 1, 2, 2), (3, 2, 66, 66)]
)
def test_rotary_turns_queries_and_keys_of_the_fused_row(nq: int, nkv: int, d: int, rotary_dim: int) -> None:
    angles = torch.outer(torch.arange(50.0), random(rotary_dim // 2).exp())
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    for t in TOKENS:
        qkv = random(t, (nq + 2 * nkv) * d, seed=2)
        before = qkv.clone()
        positions = torch.randint(0, 50, (t,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
        q, k, _ = qkv.split([nq * d, nkv * d, nkv * d], dim=1)
        kernels.rotary(q.view(t, nq, d), k.view(t, nkv, d), positions, cos_sin)
        old_q, old_k, old_v = before.split([nq * d, nkv * d, nkv * d], dim=1)
        assert_close(q.reshape(t, nq, d), rotary_reference(old_q.reshape(t, nq, d), cos_sin, positions))
        assert_close(k.reshape(t, nkv, d), rotary_reference(old_k.reshape(t, nkv, d), cos_sin, positions))
        assert torch.equal(qkv[:, (nq + nkv) * d :], old_v)


def test_whole_queries_grow_with_their_position() -> None:
    """Those dimensions, too, that do not turn; keys do not grow."""
    cos_sin, scales = random(50, 4), random(50, seed=4)
    q, k = random(7, 3, 6, seed=2), random(7, 2, 6, seed=3)
    positions = torch.tensor([0, 1, 12, 13, 49, 1, 7], dtype=torch.int32)
    plain, same_k = q.clone(), k.clone()
    kernels.rotary(plain, same_k, positions, cos_sin)
    kernels.rotary(q, k, positions, cos_sin, scales)
    assert torch.equal(q, plain * scales[positions.long(), None, None]) and torch.equal(k, same_k)


def test_rotary_refuses_positions_outside_the_table() -> None:
    q, k = random(2, 1, 4), random(2, 1, 4)
    before = q.clone()
    for wrong in (-1, 8):
        with pytest.raises(kernels.Error, match=f"position {wrong} is outside"):
            kernels.rotary(q, k, torch.tensor([0, wrong], dtype=torch.int32), random(8, 4))
    assert torch.equal(q, before)


ACTIVATIONS = {
    "silu": (kernels.silu_mul, torch.nn.functional.silu),
    "erf": (lambda x: kernels.gelu_mul(x, tanh=False), torch.nn.functional.gelu),
    "tanh": (lambda x: kernels.gelu_mul(x, tanh=True), lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1536])
def test_gated_activations(name: str, size: int) -> None:
    ours, theirs = ACTIVATIONS[name]
    for t in TOKENS:
        gate_up = 3 * random(t, 2 * size)
        gate, up = gate_up.double().split(size, dim=1)
        assert_close(ours(gate_up), theirs(gate) * up)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activations_keep_their_relative_precision_and_bear_extremes(name: str) -> None:
    ours, theirs = ACTIVATIONS[name]
    gate = torch.cat(
        [torch.linspace(-5, 5, 4001), torch.tensor([-3e38, -200.0, 0.0, 200.0, 3e38, torch.inf, torch.nan])]
    )
    actual = ours(torch.cat([gate, torch.ones_like(gate)]).view(1, -1))[0]
    expected = theirs(gate.double())
    torch.testing.assert_close(
        actual[:4001].double(), expected[:4001], rtol=1e-5 if name == "tanh" else 2e-6, atol=1e-9
    )
    assert (
        actual[-7:].tolist()[:6] == pytest.approx([0, 0, 0, 200, 3e38, torch.inf], rel=1e-6, abs=1e-30)
        and actual[-1].isnan()
    )


@pytest.mark.parametrize("size", [1, 15, 16, 17, 63, 65, 384, 1001])
def test_layer_norm(size: int) -> None:
    weight, bias = random(size, seed=1), random(size, seed=2)
    for t in TOKENS:
        x = 1 + random(t, size)
        residual = random(t, size, seed=3)
        before = residual.clone()
        expected = torch.nn.functional.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
        assert_close(kernels.layer_norm(x, weight, bias, 1e-5), expected)
        added = (x + before).double()
        expected = torch.nn.functional.layer_norm(added, (size,), weight.double(), bias.double(), 1e-5)
        assert_close(kernels.layer_norm(x, weight, bias, 1e-5, residual), expected)
        assert torch.equal(residual, x + before)


def test_layer_norm_stores_what_a_tap_wants() -> None:
    """Token 0 wants layers 1 and 70, token 1 nothing, token 2 layer 1: the sums, or the results."""
    ring = torch.full((3, 24), torch.nan)
    layers = torch.tensor([[0b10, 1 << 6], [0, 0], [0b10, 0]])
    table = HiddenTap(torch.tensor([0, -1, 2], dtype=torch.int32), layers, ring)
    weight, bias, x = random(24, seed=1), random(24, seed=2), random(3, 24)
    residual = random(3, 24, seed=3)
    kernels.layer_norm(x, weight, bias, 1e-5, residual, LayerTap(table, 1))
    result = kernels.layer_norm(x, weight, bias, 1e-5, None, LayerTap(table, 70, of_output=True))
    assert torch.equal(ring[0], residual[0]) and torch.equal(ring[2], residual[2])
    assert torch.equal(ring[1], result[0])


def test_layer_norm_of_a_large_mean() -> None:
    """Summed in one pass the squares would cancel."""
    x = 1000 + random(4, 384)
    expected = torch.nn.functional.layer_norm(x.double(), (384,), eps=1e-5)
    actual = kernels.layer_norm(x, torch.ones(384), torch.zeros(384), 1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


PLAIN = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_activations(name: str) -> None:
    for shape in ((0, 8), (1, 1), (3, 5), (7, 16), (5, 1537), (9, 8192)):
        rows = torch.full((shape[0] + 2, shape[1]), 77.0)  # canaries around what is changed in place
        rows[1:-1] = 3 * random(*shape)
        x = rows[1:-1]
        expected = PLAIN[name](x.double())
        assert kernels.activate(x, name).data_ptr() == x.data_ptr()
        assert_close(x, expected)
        assert (rows[0] == 77).all() and (rows[-1] == 77).all()
    assert kernels.activate(torch.tensor([torch.nan]), name).isnan()


def test_gated_relu() -> None:
    gate_up = random(5, 34)
    gate, up = gate_up.split(17, dim=1)
    assert_close(kernels.gated_activation(gate_up, "relu"), (torch.relu(gate) * up).double())


def test_gated_clamped_swish() -> None:
    """On both sides of its limits."""
    gate_up = torch.cat([random(5, 34), 20 * random(5, 34, seed=3), torch.full((1, 34), torch.nan)])
    gate, up = gate_up.double().split(17, dim=1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    actual = kernels.gated_activation(gate_up, "clamped_swish")
    assert_close(actual[:-1], (gate * torch.sigmoid(1.702 * gate) * (up + 1))[:-1])
    assert actual[-1].isnan().all()


def test_rows_do_not_depend_on_their_batch() -> None:
    x, weight, bias = random(40, 576), random(576, seed=1), random(576, seed=2)
    kernels.set_num_threads(2)
    norm, gated = kernels.rms_norm(x, weight, 1e-6), kernels.silu_mul(x)
    layer_norm, plain = kernels.layer_norm(x, weight, bias, 1e-5), kernels.activate(x.clone(), "gelu")
    for t in (0, 7, 39):
        row = slice(t, t + 1)
        assert torch.equal(kernels.rms_norm(x[row], weight, 1e-6), norm[row])
        assert torch.equal(kernels.silu_mul(x[row]), gated[row])
        assert torch.equal(kernels.layer_norm(x[row], weight, bias, 1e-5), layer_norm[row])
        assert torch.equal(kernels.activate(x[row].clone(), "gelu"), plain[row])
