"""Products of many rows by algorithms that cuBLASLt offers, against float32; which of them a shape keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bequest.engine.kernels import cublas_lt
from bequest.engine.kernels.cuda_capture import captured
from bequest.engine.kernels.cuda_products import Choices, Chosen, choose

pytestmark = pytest.mark.gpu

SHAPES = [(300, 1280, 1280), (512, 4608, 3584), (1369, 1024, 4096), (2048, 1000, 1536)]


def given(rows: int, outputs: int, depth: int, *, has_bias: bool) -> list[torch.Tensor | None]:
    generator = torch.Generator("cuda").manual_seed(rows)
    sizes = [(rows, depth), (outputs, depth), (outputs,)]
    made = [torch.randn(*size, generator=generator, device="cuda").bfloat16() for size in sizes]
    return [made[0], made[1] * depth**-0.5, made[2] if has_bias else None]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_algorithm_multiplies(shape: tuple[int, int, int], has_bias: bool) -> None:
    x, weight, bias = given(*shape, has_bias=has_bias)
    assert x is not None and weight is not None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    product = cublas_lt.Product(*shape, has_bias=has_bias)
    candidates = product.candidates(16)
    assert len(candidates) > 1
    for candidate in candidates:
        guarded = torch.full((shape[0] + 2, shape[1]), 7.0, dtype=torch.bfloat16, device="cuda")
        product.launch(candidate, x, weight, bias, guarded[1:-1])
        torch.testing.assert_close(guarded[1:-1].float(), expected, rtol=0.01, atol=0.02)
        assert (guarded[0] == 7).all() and (guarded[-1] == 7).all()


def test_a_shape_keeps_its_algorithm_in_graphs_too() -> None:
    choices = Choices()
    x, weight, bias = given(512, 4608, 3584, has_bias=True)
    assert x is not None and weight is not None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with choices.measuring():
            first = choices.linear(x, weight, bias)
        with captured(torch.cuda.graph_pool_handle()) as graph:
            again = choices.linear(x, weight, bias)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, again)
        assert torch.equal(first, choices.linear(x, weight, bias))
    torch.testing.assert_close(first, F.linear(x, weight, bias), rtol=0.02, atol=0.02)


def test_what_is_not_dense_is_left_to_torch() -> None:
    choices = Choices()
    x, weight, _ = given(512, 4096, 2048, has_bias=False)
    assert x is not None and weight is not None
    with choices.measuring():
        choices.linear(x, weight, None)
        wide = torch.zeros(512, 4096, dtype=torch.bfloat16, device="cuda")
        wide[:, :2048] = x
        assert torch.equal(choices.linear(wide[:, :2048], weight, None), F.linear(wide[:, :2048], weight))
        assert choices.linear(x.float(), weight.float(), None).dtype is torch.float32


def test_a_choice_is_an_offer_or_torchs() -> None:
    x, weight, bias = given(2048, 3584, 3584, has_bias=True)
    assert x is not None and weight is not None
    chosen = choose(x, weight, bias)
    assert chosen is None or isinstance(chosen, Chosen)
