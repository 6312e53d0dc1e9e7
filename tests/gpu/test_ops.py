"""CUDA ops against float32 torch at their edges: sizes, alignments, skipped rows, canaries, graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.backends.cuda.uploads import Uploads
from bequest.engine.kernels import cuda as ops
from bequest.engine.kernels.hidden_tap import HiddenTap, LayerTap
from bequest.engine.kernels.kv_format import FP8

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16]
DEVICE = "cuda"
CANARY = 77.0


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def guarded(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Callable[[], None]]:
    """An uninitialised tensor between canary rows, and a check that they are alive."""
    rows = torch.full((shape[0] + 2, *shape[1:]), CANARY, dtype=dtype, device=DEVICE)
    rows[1:-1] = float("nan")

    def check() -> None:
        assert (rows[0] == CANARY).all() and (rows[-1] == CANARY).all()

    return rows[1:-1], check


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-2 if actual.dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def replay(run: Callable[[], None]) -> None:
    """Captures run() in a graph and replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()


# --- norm -----------------------------------------------------------------------------------------------------------


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 64, 100, 576, 1000, 1024, 1032, 2048, 4096, 5120, 8191, 8192])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 5, 257])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype: torch.dtype, hidden: int, num_tokens: int, with_residual: bool) -> None:
    x = randn(num_tokens, hidden, dtype=dtype)
    weight = randn(hidden, dtype=dtype, seed=1)
    residual = randn(num_tokens, hidden, dtype=dtype, seed=2) if with_residual else None
    out, check = guarded(num_tokens, hidden, dtype=dtype)
    summed = x + residual if residual is not None else x
    ops.rms_norm(x, weight, 1e-5, residual, out)
    assert_close(out, reference_norm(summed, weight, 1e-5))
    if residual is not None:
        assert torch.equal(residual, summed)
    check()


def test_what_is_added_to_a_weight_keeps_its_bits() -> None:
    """1 + w has more bits than bfloat16: 1 + 2^-9 would be 1."""
    x = torch.full((2, 64), 3.0, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.full((64,), 2.0**-9, dtype=torch.bfloat16, device=DEVICE)
    rows = torch.tensor([[1.0, 300.0]] * 32, device=DEVICE).flatten().to(torch.bfloat16)[None]
    for values in (x, rows):
        expected = reference_norm(values, weight.float() + 1, 0.0).to(torch.bfloat16)
        torch.testing.assert_close(ops.rms_norm(values, weight, 0.0, offset=1.0), expected, rtol=2**-8, atol=0)
    scaled = randn(5, 64, dtype=torch.float32)
    small = randn(64, seed=1, scale=2.0**-9)
    assert_close(ops.rms_norm(scaled, small, 1e-6, offset=1.0), reference_norm(scaled, small + 1, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "width"), [(0, 64), (64, 128), (3, 61), (0, 2048)])
def test_norm_of_columns_leaves_the_others(dtype: torch.dtype, first: int, width: int) -> None:
    rows = randn(5, first + width + 32, dtype=dtype)
    weight, expected = randn(width, dtype=dtype, seed=1), rows.clone()
    part = slice(first, first + width)
    expected[:, part] = reference_norm(rows[:, part], weight.float() + 0.5, 1e-5).to(dtype)
    ops.norm_in_place(rows[:, part], weight, 1e-5, 0.5)
    assert_close(rows, expected)
    others = [column for column in range(rows.shape[1]) if not first <= column < first + width]
    assert torch.equal(rows[:, others], expected[:, others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [7, 64, 1000, 8192])
def test_rows_that_no_norm_sees_are_tapped(dtype: torch.dtype, hidden: int) -> None:
    x = randn(4, hidden, dtype=dtype)
    ring = torch.zeros(6, hidden, dtype=dtype, device=DEVICE)
    wanted = torch.tensor([[0b101, 0], [0b110, 0], [0b100, 0], [0b100, 0]], device=DEVICE)
    tap = LayerTap(HiddenTap(int32(0, 2, -1, 5), wanted, ring), 2)
    ops.tap_rows(x, tap)
    expected = torch.zeros_like(ring)
    expected[1], expected[3], expected[5] = x[0], x[1], x[3]
    assert torch.equal(ring, expected)


def test_rms_norm_in_place_and_large() -> None:
    x = randn(3, 16384, dtype=torch.bfloat16)
    expected = reference_norm(x, torch.ones(16384, device=DEVICE), 1e-6)
    ops.rms_norm(x, torch.ones(16384, dtype=torch.bfloat16, device=DEVICE), 1e-6, out=x)
    assert_close(x, expected)
    with pytest.raises(_C.Error, match="too long"):
        ops.rms_norm(randn(1, 16392, dtype=torch.bfloat16), randn(16392, dtype=torch.bfloat16), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 64, 100, 384, 1000, 1024, 1032, 2048, 4096, 8192])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 5, 257])
@pytest.mark.parametrize("with_residual", [False, True])
def test_layer_norm(dtype: torch.dtype, hidden: int, num_tokens: int, with_residual: bool) -> None:
    x = 1 + randn(num_tokens, hidden, dtype=dtype)
    weight, bias = (randn(hidden, dtype=dtype, seed=seed) for seed in (1, 3))
    residual = randn(num_tokens, hidden, dtype=dtype, seed=2) if with_residual else None
    summed = x + residual if residual is not None else x
    out = ops.layer_norm(x, weight, bias, 1e-5, residual)
    assert_close(out, torch.nn.functional.layer_norm(summed.float(), (hidden,), weight.float(), bias.float(), 1e-5))
    assert residual is None or torch.equal(residual, summed)
    if num_tokens > 1:
        alone = ops.layer_norm(summed[1:2].contiguous(), weight, bias, 1e-5)
        assert torch.equal(alone, out[1:2]), "a row's bits depend on its batch"


def test_layer_norm_of_large_rows() -> None:
    x = randn(3, 16384, dtype=torch.bfloat16)
    one, zero = (torch.full((16384,), value, dtype=torch.bfloat16, device=DEVICE) for value in (1.0, 0.0))
    assert_close(ops.layer_norm(x, one, zero, 1e-5), torch.nn.functional.layer_norm(x.float(), (16384,), eps=1e-5))
    with pytest.raises(_C.Error, match="too long"):
        ops.layer_norm(
            randn(1, 16392, dtype=torch.bfloat16), *(randn(16392, dtype=torch.bfloat16) for _ in range(2)), 1e-5
        )


@pytest.mark.parametrize("hidden", [1024, 4096])
def test_rms_norm_of_a_row_does_not_depend_on_the_batch(hidden: int) -> None:
    x, weight = randn(300, hidden, dtype=torch.bfloat16), randn(hidden, dtype=torch.bfloat16)
    together = ops.rms_norm(x, weight, 1e-5)
    assert all(torch.equal(ops.rms_norm(x[i : i + 1], weight, 1e-5), together[i : i + 1]) for i in (0, 7, 299))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [96, 4096])
@pytest.mark.parametrize("centred", [False, True], ids=["rms_norm", "layer_norm"])
def test_hidden_tap(dtype: torch.dtype, hidden: int, centred: bool) -> None:
    """Token 0 wants layers 1 and 70, token 1 nothing, token 2 layer 70, token 3 layers 0 and 127, around the ring."""
    layers = [(1, 70), (), (70,), (0, 127)]
    first_rows = [0, -1, 2, 5]
    words = [
        [sum(1 << b for b in wanted if b < 64), sum(1 << (b - 64) for b in wanted if b >= 64)] for wanted in layers
    ]
    masks = np.array(words, np.uint64).view(np.int64)
    ring, check = guarded(6, hidden, dtype=dtype)
    tap = HiddenTap(int32(*first_rows), torch.from_numpy(masks).to(DEVICE), ring)
    weight = randn(hidden, dtype=dtype)
    states = {}
    for layer in (0, 1, 2, 70, 127):
        x, residual = randn(4, hidden, dtype=dtype, seed=layer), randn(4, hidden, dtype=dtype, seed=layer + 1)
        here = LayerTap(tap, layer, layer == 127)
        if centred:
            out = ops.layer_norm(x, weight, weight, 1e-5, residual, here)
        else:
            out = ops.rms_norm(x, weight, 1e-5, residual, tap=here)
        states[layer] = out if layer == 127 else residual
    # Token 3 begins in the last row of the ring: its second layer goes to row 0, over token 0's first.
    for row, (layer, token) in {0: (127, 3), 1: (70, 0), 2: (70, 2), 5: (0, 3)}.items():
        assert torch.equal(ring[row], states[layer][token]), row
    assert ring[3:5].isnan().all()
    check()


# --- queries, keys and values -----------------------------------------------------------------------------------------


def reference_rotary(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D]"""
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()][:, None].float().chunk(2, dim=-1)
    first, second, rest = x.float().split((rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim), dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def reference_head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return reference_norm(x, weight, eps).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "head_dim,rotary_dim", [(128, 128), (64, 64), (256, 64), (16, 16), (80, 32), (96, 96), (128, 6), (8, 0)]
)
@pytest.mark.parametrize("num_tokens,heads,kv_heads", [(0, 4, 2), (1, 32, 8), (19, 3, 1), (600, 5, 5)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_prepare_qkv(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, num_tokens: int, heads: int, kv_heads: int, with_norm: bool
) -> None:
    block_size, num_layers, layer = 16, 3, 1
    num_blocks = max(4, -(-num_tokens // block_size) + 2)
    cache = torch.full((num_blocks, num_layers, 2, kv_heads, block_size, head_dim), CANARY, dtype=dtype, device=DEVICE)
    shuffled = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(3))[:num_tokens]
    shuffled[::5] = -1
    slots = shuffled.to(DEVICE)
    qkv = randn(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    before = qkv.clone()
    positions = torch.randint(0, 100, (num_tokens,), dtype=torch.int32, device=DEVICE)
    cos_sin = randn(100, rotary_dim) if rotary_dim else None
    weights = randn(head_dim, dtype=dtype, seed=5), randn(head_dim, dtype=dtype, seed=6)
    norm = ops.QkNorm(*weights, 1e-6) if with_norm else None
    q = ops.prepare_qkv(qkv, heads, cache, layer, slots, positions, cos_sin, norm)

    parts = before.view(num_tokens, heads + 2 * kv_heads, head_dim)
    expected = [parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]]
    if with_norm:
        expected[:2] = [reference_head_norm(x, w, 1e-6) for x, w in zip(expected[:2], weights, strict=True)]
    if cos_sin is not None:
        expected[:2] = [reference_rotary(x, positions, cos_sin) for x in expected[:2]]
    assert_close(q, expected[0])
    assert torch.equal(qkv.view(parts.shape)[:, heads:], parts[:, heads:])
    keys_values = cache[:, layer].permute(0, 3, 1, 2, 4).reshape(num_blocks * block_size, 2, kv_heads, head_dim)
    stored = slots >= 0
    assert_close(keys_values[slots[stored], 0], expected[1][stored])
    assert torch.equal(keys_values[slots[stored], 1], expected[2][stored])
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool, device=DEVICE)
    untouched[slots[stored]] = False
    assert (keys_values[untouched] == CANARY).all() and (cache[:, [0, 2]] == CANARY).all()


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dtype,stored", [(torch.bfloat16,) * 2, (torch.bfloat16, FP8), (torch.float32,) * 2], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("heads,kv_heads", [(32, 8), (16, 8), (5, 1)])
def test_many_tokens_have_the_bits_of_few(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, stored: torch.dtype, with_norm: bool
) -> None:
    """Whole heads of many tokens are turned by a kernel of their own."""
    num_tokens = 300
    qkv = randn(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weights = randn(head_dim, dtype=dtype, seed=5), randn(head_dim, dtype=dtype, seed=6)
    norm = ops.QkNorm(*weights, 1e-6, 1.0) if with_norm else None
    slots = torch.randperm(320, generator=torch.Generator().manual_seed(3))[:num_tokens].to(DEVICE)
    slots[::7] = -1
    positions = torch.randint(0, 100, (num_tokens,), dtype=torch.int32, device=DEVICE)
    cos_sin = randn(100, head_dim)

    def prepared(size: int) -> tuple[Tensor, Tensor]:
        rows, cache = qkv.clone(), torch.zeros(20, 2, 2, kv_heads, 16, head_dim, device=DEVICE).to(stored)
        for i in range(0, num_tokens, size):
            part = slice(i, i + size)
            ops.prepare_qkv(rows[part], heads, cache, 1, slots[part], positions[part], cos_sin, norm)
        return rows.view(torch.int16), cache.view(torch.uint8)

    for found, expected in zip(prepared(num_tokens), prepared(100), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim,rotary_dim", [(128, 128), (64, 16), (80, 80), (256, 256)])
@pytest.mark.parametrize("num_tokens", [1, 19, 600])
def test_queries_that_are_scaled(dtype: torch.dtype, head_dim: int, rotary_dim: int, num_tokens: int) -> None:
    """By a power of two at each position: then bits tell that nothing else changed."""
    heads, kv_heads = 6, 2
    cache = torch.full((num_tokens // 16 + 2, 1, 2, kv_heads, 16, head_dim), CANARY, dtype=dtype, device=DEVICE)
    qkv = randn(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    slots = torch.arange(num_tokens, device=DEVICE)
    positions = torch.randint(0, 100, (num_tokens,), dtype=torch.int32, device=DEVICE)
    scales = 2.0 ** torch.randint(-3, 4, (100,), device=DEVICE).float()
    plain, scaled = cache.clone(), cache.clone()
    turned = ops.prepare_qkv(qkv.clone(), heads, plain, 0, slots, positions, randn(100, rotary_dim))
    q = ops.prepare_qkv(qkv.clone(), heads, scaled, 0, slots, positions, randn(100, rotary_dim), query_scales=scales)
    assert torch.equal(q, turned * scales[positions.long(), None, None].to(dtype))
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_prepare_qkv(dtype: torch.dtype) -> None:
    fused = randn(7, 6, 64, dtype=dtype)
    before = fused.clone()
    positions, cos_sin, weight = int32(*range(7)), randn(9, 48), randn(64, dtype=dtype)
    ops.head_rms_norm(fused[:, 1:3], weight, 1e-5)
    assert_close(fused[:, 1:3], reference_head_norm(before[:, 1:3], weight, 1e-5))
    fused = before.clone()
    ops.rotary(fused[:, :4], fused[:, 4:5], positions, cos_sin)
    assert_close(fused[:, :5], reference_rotary(before[:, :5], positions, cos_sin))
    assert torch.equal(fused[:, 5], before[:, 5])
    cache = torch.zeros(2, 1, 2, 2, 16, 64, dtype=dtype, device=DEVICE)
    slots = torch.tensor([17, -1, 0, 31, 16, 2, 3], device=DEVICE)
    ops.write_kv(before[:, :2], before[:, 2:4], cache, 0, slots)
    assert torch.equal(cache[1, 0, 0, :, 1], before[0, :2]) and torch.equal(cache[1, 0, 1, :, 15], before[3, 2:4])
    assert (cache[0, 0, :, :, 1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens,heads", [(1, 16), (7, 3), (300, 16)])
@pytest.mark.parametrize("head_dim", [80, 48, 72])
def test_rotation_of_heads_that_no_warp_divides(dtype: torch.dtype, num_tokens: int, heads: int, head_dim: int) -> None:
    fused = randn(num_tokens, 3, heads, head_dim, dtype=dtype)
    before = fused.clone()
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32, device=DEVICE)
    cos_sin = randn(50, head_dim)
    ops.rotary(fused[:, 0], fused[:, 1], positions, cos_sin)
    for part in range(2):
        assert_close(fused[:, part], reference_rotary(before[:, part], positions, cos_sin))
    assert torch.equal(fused[:, 2], before[:, 2])


# --- activations, embedding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
@pytest.mark.parametrize("intermediate", [1, 5, 1536, 3072, 14336])
def test_gated_activations(dtype: torch.dtype, num_tokens: int, intermediate: int) -> None:
    gate_up = randn(num_tokens, 2 * intermediate, dtype=dtype, scale=6.0)
    gate, up = gate_up.float().chunk(2, dim=-1)
    gelu = torch.nn.functional.gelu
    for run, expected in (
        (lambda out: ops.silu_mul(gate_up, out), torch.nn.functional.silu(gate) * up),
        (lambda out: ops.gelu_mul(gate_up, True, out), gelu(gate, approximate="tanh") * up),
        (lambda out: ops.gelu_mul(gate_up, False, out), gelu(gate) * up),
    ):
        out, check = guarded(num_tokens, intermediate, dtype=dtype)
        run(out)
        assert_close(out, expected)
        check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 5), (33, 1536), (64, 4096)])
def test_plain_activations(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gelu = torch.nn.functional.gelu
    for name, reference in {
        "silu": torch.nn.functional.silu,
        "gelu": gelu,
        "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
        "relu": torch.relu,
    }.items():
        out, check = guarded(*shape, dtype=dtype)
        out.copy_(randn(*shape, dtype=dtype, scale=3.0))
        expected = reference(out.float())
        assert_close(ops.activate(out, name), expected)
        check()
        gate_up = randn(shape[0], 2 * shape[1], dtype=dtype)
        gate, up = gate_up.float().chunk(2, dim=-1)
        assert_close(ops.gated_activation(gate_up, name), reference(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (33, 2880)])
def test_gated_clamped_swish(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = randn(shape[0], 2 * shape[1], dtype=dtype, scale=6.0)
    gate, up = gate_up.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    assert_close(ops.gated_activation(gate_up, "clamped_swish"), gate * torch.sigmoid(1.702 * gate) * (up + 1))


@pytest.mark.parametrize(
    "activation", [ops.silu_mul, lambda x: ops.gelu_mul(x, True), lambda x: ops.gelu_mul(x, False)]
)
def test_gated_activations_far_out(activation: Callable[[Tensor], Tensor]) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30], device=DEVICE)
    out = activation(torch.cat([gate, torch.ones(8, device=DEVICE)])[None])[0]
    torch.testing.assert_close(out, gate.clamp_min(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 9, 1024, 4096])
def test_embedding(dtype: torch.dtype, hidden: int) -> None:
    weight = randn(50, hidden, dtype=dtype)
    ids = int32(0, 49, -1, -3, 7, 7)
    out, check = guarded(6, hidden, dtype=dtype)
    ops.embedding(ids, weight, int32(11, -1, 49), out)
    assert torch.equal(out, weight[[0, 49, 11, 49, 7, 7]])
    check()
    assert ops.embedding(int32(), weight).shape == (0, hidden)
    lost = ops.embedding(int32(50, -2, -4, 3), weight, int32(11, -1, 49))
    assert lost[:3].isnan().all() and torch.equal(lost[3], weight[3])


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 1, 2, 1, 1, 8), (12, 2, 2, 3, 16, 64), (12, 28, 2, 8, 16, 128)])
def test_copy_and_swap_blocks(shape: tuple[int, ...]) -> None:
    cache = randn(*shape, dtype=torch.bfloat16)
    expected = cache.clone()
    ops.copy_blocks(cache, int32(1, 5, -1, -1, 1, 6, 11, 0).view(-1, 2))
    expected[[5, 6, 0]] = expected[[1, 1, 11]]
    assert torch.equal(cache, expected)
    host = torch.zeros((6, *shape[1:]), dtype=torch.bfloat16, pin_memory=True)
    ops.swap_blocks(cache, host, np.array([(3, 1), (4, 2), (9, 5)], np.int32))
    torch.cuda.synchronize()
    assert torch.equal(host[[1, 2, 5]], cache[[3, 4, 9]].cpu()) and (host[[0, 3, 4]] == 0).all()
    ops.swap_blocks(host, cache, np.array([(5, 7), (1, 8)], np.int32))
    expected[[7, 8]] = expected[[9, 3]]
    assert torch.equal(cache, expected)
    ops.copy_blocks(cache, int32().view(0, 2))
    ops.swap_blocks(cache, host, np.empty((0, 2), np.int32))
    with pytest.raises(_C.Error, match="outside"):
        ops.swap_blocks(cache, host, np.array([(0, 6)], np.int32))


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uploads(dtype: torch.dtype) -> None:
    """Several pieces, one that is not whole, other dtypes and strides, rows that nothing is made of."""
    uploads, whole = Uploads(), torch.randn(40_001, 700).to(dtype)
    for values in (whole, whole[:7], whole[:, 1:], whole.t()[:, :3].t(), whole.double(), whole[:0], whole[0]):
        place, check = guarded(*values.shape, dtype=dtype)
        uploads.copy(place, values)
        assert torch.equal(place.cpu(), values.to(dtype))
        check()


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_graph_replay_equals_eager() -> None:
    dtype = torch.bfloat16
    weight, norm_weight = randn(100, 512, dtype=dtype), randn(512, dtype=dtype)
    ids, last, positions = int32(3, -1, 99, 0), int32(42), int32(0, 1, 2, 0)
    slots = torch.tensor([0, 17, 5, -1], device=DEVICE)
    pairs = int32(0, 3, -1, -1).view(-1, 2)
    cos_sin = randn(8, 64)

    def run(cache: Tensor) -> tuple[Tensor, Tensor]:
        x = ops.embedding(ids, weight, last)
        residual = x.clone()
        x = ops.rms_norm(x, norm_weight, 1e-5, residual)
        q = ops.prepare_qkv(x, 4, cache, 0, slots, positions, cos_sin)
        gated = ops.silu_mul(residual)
        ops.copy_blocks(cache, pairs)
        return q.clone(), gated

    eager_cache, graph_cache = (torch.zeros(4, 1, 2, 2, 16, 64, dtype=dtype, device=DEVICE) for _ in range(2))
    expected = run(eager_cache)
    results: list[tuple[Tensor, Tensor]] = []
    replay(lambda: results.append(run(graph_cache)))
    for actual, wanted in zip(results[-1], expected, strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(graph_cache, eager_cache)
