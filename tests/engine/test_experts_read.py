"""How many experts each step reads, beside the choices that transformers makes of the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.types import SamplingParams
from bequest.engine.watching.observation import RequestStats, StepStats
from tests.engine.harness import request
from tests.tiny_models import make_reference

PROMPT, NUM_TOKENS = [5, 9, 31, 7, 8, 12, 200], 4


class Watcher:
    def __init__(self) -> None:
        self.experts: list[tuple[int, int]] = []

    def on_step(self, stats: StepStats) -> None:
        self.experts.append(stats.experts)

    def on_finish(self, stats: RequestStats) -> None: ...


async def watch(config: EngineConfig) -> tuple[list[int], list[tuple[int, int]]]:
    watcher = Watcher()
    engine = (await build_engine(config, watcher)).engine
    try:
        asked = request(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))
        tokens = [token async for delta in engine.generate(asked) for c in delta.choices for token in c.token_ids]
    finally:
        await engine.stop()
    return tokens, watcher.experts


def check_experts_read(name: str, directory: Path, *, is_exact: bool = True, **fields: object) -> None:
    """`is_exact`: not rounded so that prompts may choose others."""
    shape = {"dtype": "float32", "max_model_len": 96, "num_blocks": 40, "block_size": 16, "pipelined": False}
    config = EngineConfig(model=str(directory), **(shape | fields))  # type: ignore[arg-type]
    tokens, steps = asyncio.run(watch(config))
    model = make_reference(name)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens]), output_router_logits=True).router_logits
    top_k, num_experts = model.config.num_experts_per_tok, model.config.num_experts
    taken = [layer.topk(top_k).indices for layer in logits]
    begin = len(PROMPT)
    expected = [sum(layer[:begin].unique().numel() for layer in taken)]
    expected += [len(taken) * top_k] * (NUM_TOKENS - 1)
    assert [read for read, _ in steps][0 if is_exact else 1 :] == expected[0 if is_exact else 1 :]
    assert {held for _, held in steps} == {len(taken) * num_experts}


# The first has no experts in its last layer, the second runs kernel by kernel on a CPU.
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-next"])
def test_experts_read(name: str, tiny_model: Callable[[str], Path]) -> None:
    check_experts_read(name, tiny_model(name), device="cpu")


def test_a_model_without_experts_reads_none(tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(tiny_model("llama")), device="cpu", max_model_len=96, num_blocks=40)
    _, steps = asyncio.run(watch(config))
    assert set(steps) == {(0, 0)}
