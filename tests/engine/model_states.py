"""Trials of hidden states with a real runner, on whichever device: those of transformers, whatever was cached."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import BeamParams, Lineage, Request, Retain, SamplingParams
from bequest.engine.types.hidden import HiddenStatesParams, Span, resolve_layers
from bequest.engine.types.states import ChoiceStates, as_float32
from bequest.engine.watching.observation import RequestStats, StepStats
from tests.engine.harness import Answer, ask, ask_all, request

# States of all layers and tokens, [L + 1, tokens, H], as transformers computes them
Reference = Callable[[Sequence[int]], np.ndarray]

EXTRACT = SamplingParams(max_tokens=0)
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)


def reference_of(model: torch.nn.Module) -> Reference:
    @cache
    @torch.no_grad()
    def states(tokens: tuple[int, ...]) -> np.ndarray:
        device = next(model.parameters()).device
        found = model(torch.tensor([tokens], device=device), output_hidden_states=True).hidden_states
        return torch.stack(found)[:, 0].float().cpu().numpy()

    return lambda tokens: states(tuple(tokens))


@dataclass(frozen=True)
class Trial:
    """`tolerance` is relative to the largest value of a layer."""

    reference: Reference
    tolerance: float
    vocab_size: int
    recurrent: bool = False  # its layers pass tokens before those that are asked for, too

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """The first half of each is the same."""
        draw = random.Random(3)
        common = [draw.randrange(3, self.vocab_size) for _ in range(max(lengths))]
        return [common[: n // 2] + [draw.randrange(3, self.vocab_size) for _ in range(n - n // 2)] for n in lengths]

    def check(self, states: ChoiceStates, tokens: Sequence[int], positions: Sequence[int]) -> None:
        assert states.positions.tolist() == list(positions)
        expected = self.reference(tokens)[list(states.layers)][:, list(positions)]
        actual = as_float32(states.assemble(), states.dtype)
        assert actual.shape == expected.shape
        for layer, got, true in zip(states.layers, actual, expected, strict=True):
            error = np.abs(got - true).max() / np.abs(true).max()
            assert error < self.tolerance, f"layer {layer}: relative error {error:.2e}"


def extraction(tokens: Sequence[int], wanted: HiddenStatesParams, **fields: object) -> Request:
    return request(tokens, EXTRACT, hidden_states=wanted, **fields)


def states_of(answer: Answer, choice: int = 0) -> ChoiceStates:
    assert answer.states is not None
    return answer.states.choices[choice]


class CountPreemptions:
    """An observer."""

    def __init__(self) -> None:
        self.count = 0

    def on_step(self, stats: StepStats) -> None:
        self.count += stats.preempted

    def on_finish(self, stats: RequestStats) -> None:
        pass


async def check_states(config: EngineConfig, trial: Trial, lengths: Sequence[int]) -> int:
    """Returns how many times a request was preempted."""
    preemptions = CountPreemptions()
    built = await build_engine(config, preemptions)
    engine = built.engine
    try:
        everything = HiddenStatesParams(resolve_layers("all", engine.info.num_layers), "all")
        await _check_prompts(engine, trial, everything, lengths)
        await _check_generation(engine, trial, everything, lengths)
        await _check_parents(engine, trial, everything)
        await _check_beams(engine, trial, everything)
        assert await engine.drain(20)
    finally:
        await engine.stop()
    engine.scheduler.check_idle()
    return preemptions.count


async def _check_prompts(engine: AsyncEngine, trial: Trial, wanted: HiddenStatesParams, lengths: Sequence[int]) -> None:
    """Fresh, then found in the prefix index; alone and in a crowd."""
    prompts = trial.prompts(lengths)
    for _ in range(2):
        alone = await ask(engine, extraction(prompts[-1], wanted))
        trial.check(states_of(alone), prompts[-1], range(len(prompts[-1])))
        for prompt, answer in zip(
            prompts, await ask_all(engine, [extraction(p, wanted) for p in prompts]), strict=True
        ):
            trial.check(states_of(answer), prompt, range(len(prompt)))


async def _check_generation(
    engine: AsyncEngine, trial: Trial, wanted: HiddenStatesParams, lengths: Sequence[int]
) -> None:
    """With the last sampled token, beside generations without states, which preempt where the cache is small."""
    prompts = trial.prompts(lengths)
    whole = HiddenStatesParams(wanted.layers, "all", include_prompt=True)
    asked = [request(p, GREEDY, hidden_states=s) for p in prompts for s in (wanted, None, whole)]
    for one, answer in zip(asked, await ask_all(engine, asked), strict=True):
        if one.hidden_states is not None:
            tokens = [*one.prompt_token_ids, *answer.token_ids[0]]
            first = 0 if one.hidden_states.include_prompt else len(one.prompt_token_ids)
            trial.check(states_of(answer), tokens, range(first, len(tokens)))


async def _check_parents(engine: AsyncEngine, trial: Trial, wanted: HiddenStatesParams) -> None:
    """Of a lease: each position for the price of its token, the last sampled one too; then of a child of it."""
    (prompt,) = trial.prompts([21])
    parent = await ask(engine, request(prompt, GREEDY, retain=Retain(60)))
    tokens = [*prompt, *parent.token_ids[0]]
    lineage = Lineage(parent.id, 0, len(tokens))
    for rows in ([len(tokens) - 1], [0, 3, 4, 5, 20, 22, len(tokens) - 1]):
        some = HiddenStatesParams(wanted.layers, tuple(rows))
        answer = await ask(engine, extraction(tokens, some, lineage=lineage))
        trial.check(states_of(answer), tokens, rows)
        assert answer.states is not None
        # A lease keeps windows of some positions alone: others are computed from the first one on.
        most = len(tokens) - rows[0] if trial.recurrent or engine.scheduler.pool.slides else len(rows)
        assert len(rows) <= answer.states.computed_tokens <= most
    child = request(
        [*tokens, 7, 8, 9], GREEDY, lineage=lineage, hidden_states=HiddenStatesParams(wanted.layers, Span(0))
    )
    heir = await ask(engine, child)
    longer = [*tokens, 7, 8, 9, *heir.token_ids[0]]
    trial.check(states_of(heir), longer, range(len(tokens) + 3, len(longer)))
    engine.forget("t", parent.id)


async def _check_beams(engine: AsyncEngine, trial: Trial, wanted: HiddenStatesParams) -> None:
    (prompt,) = trial.prompts([9])
    params = SamplingParams(max_tokens=5, n=2, temperature=0, beams=BeamParams(3), ignore_eos=True)
    answer = await ask(engine, request(prompt, params, hidden_states=wanted))
    for choice in range(2):
        tokens = [*prompt, *answer.token_ids[choice]]
        trial.check(states_of(answer, choice), tokens, range(len(prompt), len(tokens)))
