"""All layers of a step of one row in one launch, against float32 torch that rounds where the kernel stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.kernels import cuda_stack
from bequest.engine.kernels.cuda_attention import CudaAttentionPlan, CudaAttentionWorkspace
from bequest.engine.kernels.cuda_stack import RowStack, StackedLayer, StackRule, StackShape
from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.types import SamplingParams
from tests.engine.direct import LLM
from tests.engine.test_against_transformers import prompts
from tests.gpu.test_engine import config
from tests.gpu.test_ops import DEVICE, guarded, int32, randn, reference_norm

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
NUM_LAYERS, NUM_BLOCKS, EPS = 3, 260, 1e-6
# Clusters with and without heads, one query to a head, inner columns that clusters have unequally, hidden of 2048.
SHAPES = [
    StackShape(1024, 3072, 16, 8, 128),
    StackShape(1024, 1024, 4, 4, 128),
    StackShape(1024, 2816, 2, 1, 128),
    StackShape(2048, 6144, 16, 8, 128),
]
# What lies before the token: nothing, ends of tiles of 16, more than a round of all warps, several rounds.
POSITIONS = [0, 1, 15, 16, 17, 640, 1023, 1024, 4000]


@dataclass(frozen=True)
class Case:
    shape: StackShape
    position: int
    block_size: int = 16
    norms_heads: bool = True
    activation: str = "silu"
    stored: bool = True  # False: the token's keys and values are in the cache, and it has no slot
    empty: bool = False  # there is no sequence at all


class Model:
    def __init__(self, case: Case) -> None:
        shape = self.shape = case.shape
        hidden, head_dim = shape.hidden, shape.head_dim
        attended, keys = shape.q_heads * head_dim, shape.kv_heads * head_dim
        rope = torch.arange(POSITIONS[-1] + 1, device=DEVICE)[:, None] * 1e4 ** -torch.linspace(
            0, 1, head_dim // 2, device=DEVICE
        )
        self.rule = StackRule(EPS, EPS, case.activation, head_dim**-0.5, torch.cat([rope.cos(), rope.sin()], dim=1))

        def matrix(rows: int, columns: int, seed: int, scale: float = 1.0) -> Tensor:
            return randn(rows, columns, dtype=BF16, seed=seed, scale=scale * columns**-0.5)

        def gain(size: int, seed: int) -> Tensor:
            return 1 + randn(size, dtype=BF16, seed=seed, scale=0.1)

        self.layers = [
            StackedLayer(
                attention_norm=gain(hidden, 10 * i),
                qkv=matrix(attended + 2 * keys, hidden, 10 * i + 1),
                q_norm=gain(head_dim, 10 * i + 2) if case.norms_heads else None,
                k_norm=gain(head_dim, 10 * i + 3) if case.norms_heads else None,
                output=matrix(hidden, attended, 10 * i + 4, 0.5),
                mlp_norm=gain(hidden, 10 * i + 5),
                gate_up=matrix(2 * shape.inner, hidden, 10 * i + 6),
                down=matrix(hidden, shape.inner, 10 * i + 7, 0.5),
                cache_layer=NUM_LAYERS - 1 - i,
                index=i + 63,  # states of both words of a tap
            )
            for i in range(NUM_LAYERS)
        ]
        self.scratch = cuda_stack.make_scratch(torch.device(DEVICE))
        self.stack = RowStack(shape, self.rule, self.layers, self.scratch)
        assert self.stack.is_ready()


class Step:
    def __init__(self, case: Case) -> None:
        shape, size = case.shape, case.block_size
        self.case = case
        self.kv_cache = randn(NUM_BLOCKS * 16 // size, NUM_LAYERS, 2, shape.kv_heads, size, shape.head_dim, dtype=BF16)
        tables = np.random.default_rng(1).permutation(len(self.kv_cache)).astype(np.int32)[None]
        slot = int(tables[0, case.position // size]) * size + case.position % size
        # What no token has been stored in may hold anything.
        behind = self.kv_cache[tables[0, case.position // size]]
        behind[:, :, :, case.position % size + (not case.stored) :] = float("nan")
        workspace = CudaAttentionWorkspace(
            num_q_heads=shape.q_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_sequences=1,
            max_tokens=1,
        )
        work_list = torch.empty(workspace.list_len, dtype=torch.int32, pin_memory=True)
        lengths = [0 if case.empty else case.position + 1]
        starts = np.array([0, 0 if case.empty else 1], np.int32)
        workspace.write_list(starts, np.array(lengths, np.int32), tables, work_list.numpy())
        self.tables = tables[0]
        on_device = torch.from_numpy(np.repeat(tables, 2, axis=0)).to(DEVICE)[:1]
        self.plan: CudaAttentionPlan = workspace.bind(work_list.to(DEVICE), on_device, max_query_len=1, max_tokens=1)
        self.slots = torch.tensor([slot if case.stored else -1], device=DEVICE)
        self.positions = int32(case.position)

    def run(self, model: Model, residual: Tensor, tap: HiddenTap | None = None) -> None:
        assert model.stack.takes(self.kv_cache, self.plan)
        model.stack.run(residual, self.kv_cache, self.plan, self.slots, self.positions, tap)


def rounded(x: Tensor) -> Tensor:
    return x.to(BF16).float()


def turned(x: Tensor, rope: Tensor) -> Tensor:
    """Heads [heads, D] by one row of the table."""
    cosine, sine = rope.chunk(2)
    first, second = x.chunk(2, dim=1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=1)


ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def reference(model: Model, step: Step, start: Tensor) -> tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]:
    """The residual, the state that each layer begins with, and the keys and values of the token in each."""
    shape, case, rope = model.shape, step.case, model.rule.rope[step.case.position]
    x, states, own = start.float()[0], [], []
    blocks = torch.from_numpy(step.tables[: case.position // case.block_size + 1].copy()).long().to(DEVICE)
    for layer in model.layers:
        states.append(x)
        qkv = rounded(layer.qkv.float() @ rounded(reference_norm(x, layer.attention_norm, EPS)))
        q, k, v = qkv.view(-1, shape.head_dim).split([shape.q_heads, shape.kv_heads, shape.kv_heads])
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rounded(reference_norm(q, layer.q_norm, EPS))
            k = rounded(reference_norm(k, layer.k_norm, EPS))
        q, k = rounded(turned(q, rope)), rounded(turned(k, rope))
        cached = step.kv_cache[blocks, layer.cache_layer].float()  # [blocks, 2, NKV, BS, D]
        keys, values = cached.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : case.position + 1].clone()
        if case.stored:
            keys[:, -1], values[:, -1] = k, v
        own.append((keys[:, -1], values[:, -1]))
        attended = F.scaled_dot_product_attention(
            q.view(shape.kv_heads, -1, shape.head_dim)[:, :, None],
            keys[:, None].expand(-1, shape.q_heads // shape.kv_heads, -1, -1),
            values[:, None].expand(-1, shape.q_heads // shape.kv_heads, -1, -1),
        )
        attended = torch.zeros_like(attended) if case.empty else rounded(attended)
        x = rounded(x + layer.output.float() @ attended.flatten())
        gate, up = (layer.gate_up.float() @ rounded(reference_norm(x, layer.mlp_norm, EPS))).chunk(2)
        x = rounded(x + layer.down.float() @ rounded(ACTIVATIONS[case.activation](gate) * up))
    return x, states, own


def check(case: Case) -> None:
    model, step = Model(case), Step(case)
    start = randn(1, case.shape.hidden, dtype=BF16, seed=99)
    residual, canaries = guarded(1, case.shape.hidden, dtype=BF16)
    residual.copy_(start)
    before = step.kv_cache.clone()
    expected, _, own = reference(model, step, start)
    step.run(model, residual)
    canaries()
    assert (residual.float()[0] - expected).norm() <= 8e-3 * expected.norm()
    if case.stored:
        block, at = divmod(int(step.slots), case.block_size)
        for layer, pair in zip(model.layers, own, strict=True):
            for stored, value in zip(step.kv_cache[block, layer.cache_layer, :, :, at], pair, strict=True):
                assert (stored.float() - value).norm() <= 1e-2 * value.norm()
        before[block, :, :, :, at] = step.kv_cache[block, :, :, :, at]
    assert torch.equal(step.kv_cache.view(torch.int16), before.view(torch.int16)), "another key or value has changed"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("position", POSITIONS)
def test_stack(shape: StackShape, position: int) -> None:
    check(Case(shape, position))


@pytest.mark.parametrize(
    "case",
    [
        Case(SHAPES[0], 200, block_size=32),
        Case(SHAPES[0], 255, block_size=64),
        Case(SHAPES[0], 100, norms_heads=False),
        Case(SHAPES[0], 100, activation="gelu_tanh"),
        Case(SHAPES[0], 100, stored=False),
        Case(SHAPES[0], 95, stored=False),
        Case(SHAPES[0], 0, stored=False, empty=True),
    ],
    ids=str,
)
def test_others(case: Case) -> None:
    check(case)


def test_small() -> None:
    check(Case(SHAPES[1], 20))


def test_hidden_states_on_their_way() -> None:
    case = Case(SHAPES[0], 33)
    model, step = Model(case), Step(case)
    start = randn(1, case.shape.hidden, dtype=BF16, seed=99)
    _, states, _ = reference(model, step, start)
    words = np.array([[1 << 63, 1 << 1]], np.uint64).view(np.int64)  # layers 63 and 65
    ring, canaries = guarded(4, case.shape.hidden, dtype=BF16)
    plain, residual = start.clone(), start.clone()
    step.run(model, plain)
    step.run(model, residual, HiddenTap(int32(3), torch.from_numpy(words).to(DEVICE), ring))
    assert torch.equal(plain, residual)
    assert torch.equal(ring[3], start[0]) and ring[1:3].isnan().all()
    assert (ring[0].float() - states[2]).norm() <= 8e-3 * states[2].norm()
    canaries()
    ring.fill_(float("nan"))
    step.run(model, start.clone(), HiddenTap(int32(-1), torch.from_numpy(words).to(DEVICE), ring))
    assert ring.isnan().all()


def test_stacks_in_a_graph() -> None:
    """One begins while the one before it ends, and what blocks exchange is never an older one's."""
    case = Case(SHAPES[0], 300)
    model, step = Model(case), Step(case)
    start = randn(1, case.shape.hidden, dtype=BF16, seed=99)
    residual = start.clone()
    for _ in range(10):
        step.run(model, residual)
        torch.cuda.synchronize()
    expected = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            step.run(model, residual)
    for _ in range(50):
        residual.copy_(start)
        graph.replay()
        assert torch.equal(residual, expected)


def test_what_cannot_be_stacked() -> None:
    shape = SHAPES[0]
    assert cuda_stack.has_kernel(shape)
    for other in (
        StackShape(1536, 3072, 16, 8, 128),
        StackShape(1024, 3080, 16, 8, 128),
        StackShape(1024, 512, 16, 8, 128),
        StackShape(1024, 3072, 16, 8, 64),
        StackShape(1024, 3072, 64, 32, 128),
        StackShape(1024, 3072, 32, 8, 128),
    ):
        assert not cuda_stack.has_kernel(other), other
    model, step = Model(Case(shape, 0)), Step(Case(shape, 0))
    assert not model.stack.takes(step.kv_cache.to(torch.float8_e4m3fn), step.plan)


def test_weights_that_have_moved() -> None:
    """A model that has slept has its weights elsewhere."""
    case = Case(SHAPES[1], 20)
    model, step = Model(case), Step(case)
    start = randn(1, case.shape.hidden, dtype=BF16, seed=99)
    expected, residual = start.clone(), start.clone()
    step.run(model, expected)
    for layer in model.layers:
        moved = layer.qkv.clone()
        layer.qkv.zero_()
        layer.qkv.set_(moved)  # type: ignore[call-overload]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not model.stack.is_ready(), "a copy would be the graph's"
        residual.add_(0)
    graph.replay()
    assert model.stack.is_ready()
    step.run(model, residual)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_engines_stack_steps_of_one_row(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    """test_engine.py compares their tokens with those of transformers."""
    launches = 0
    launch = RowStack.run

    def counted(self: RowStack, *arguments: Any) -> None:
        nonlocal launches
        launches += 1
        launch(self, *arguments)

    monkeypatch.setattr(RowStack, "run", counted)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    settings = config(tiny_model("qwen3-stacked"), dtype="bfloat16", max_num_seqs=4, enforce_eager=enforce_eager)
    with LLM(settings) as llm:
        captured = launches
        llm.generate(prompts()[5:6], params, progress=False)
    if enforce_eager:
        assert launches - captured >= 20
    else:
        assert launches == captured > 0, "a graph has the launch"
