"""Trials of an encoder-decoder model's hidden states, on whichever device: those of transformers, of both stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import BeamParams, Request, SamplingParams
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.hidden import HiddenStatesParams, Stack, resolve_layers
from bequest.engine.types.states import ChoiceStates, as_float32
from tests.engine.harness import Answer, ask, ask_all, request
from tests.engine.model_states import EXTRACT, GREEDY, states_of
from tests.engine.test_encoder_decoder_models import Item, as_input, inputs, positions_for
from tests.tiny_encoder_decoders import make_encoder_decoder


@dataclass(frozen=True)
class Case:
    """An input, the beginning of its decoder, and what transformers makes of both: [L + 1, positions, H]."""

    encoder: EncoderInput
    prompt: list[int]
    states: dict[Stack, np.ndarray]

    def request(self, params: SamplingParams, wanted: HiddenStatesParams | None = None) -> Request:
        return request(self.prompt, params, encoder=self.encoder, hidden_states=wanted)


def make_cases(name: str) -> list[Case]:
    torch.set_num_threads(1)  # more would wait for each other: there is next to nothing to compute
    reference = make_encoder_decoder(name)
    prompt = [int(reference.config.decoder_start_token_id), 9, 8, 7, 6, 5]
    return [
        Case(as_input(item), prompt[: 1 + number % 6], _states(reference, item, prompt[: 1 + number % 6]))
        for number, item in enumerate(inputs(reference))
    ]


@torch.no_grad()
def _states(reference: PreTrainedModel, item: Item, prompt: Sequence[int]) -> dict[Stack, np.ndarray]:
    given: dict[str, Any] = {"decoder_input_ids": torch.tensor([list(prompt)])}
    if isinstance(item, torch.Tensor):
        given["input_features"] = item[None]
    else:
        given["input_ids"] = torch.tensor([item])
    with positions_for(reference, item):
        found = reference(**given, output_hidden_states=True, use_cache=False)
    of_stacks = (("encoder", found.encoder_hidden_states), ("decoder", found.decoder_hidden_states))
    return {stack: torch.stack(states)[:, 0].numpy() for stack, states in of_stacks}  # type: ignore[misc]


@dataclass(frozen=True)
class Trial:
    """`tolerance` is relative to the largest value of a layer."""

    cases: list[Case]
    tolerance: float

    async def run(self, config: EngineConfig) -> None:
        built = await build_engine(config)
        try:
            for stack in ("encoder", "decoder"):
                await self._extract(built.engine, stack)  # type: ignore[arg-type]
            await self._generate(built.engine)
            await self._pool(built.engine)
            assert await built.engine.drain(20)
        finally:
            await built.engine.stop()
        built.engine.scheduler.check_idle()

    async def _extract(self, engine: AsyncEngine, stack: Stack) -> None:
        """Alone and in a crowd of mixed lengths."""
        wanted = everything(engine, stack)
        self._check(await ask(engine, self.cases[5].request(EXTRACT, wanted)), self.cases[5], stack)
        answers = await ask_all(engine, [case.request(EXTRACT, wanted) for case in self.cases])
        for case, answer in zip(self.cases, answers, strict=True):
            self._check(answer, case, stack)

    async def _generate(self, engine: AsyncEngine) -> None:
        """Beside others without states, whose cross blocks are shared; of choices and of beams."""
        wanted = everything(engine, "encoder")
        beams = SamplingParams(max_tokens=4, n=2, temperature=0, beams=BeamParams(2))
        asked = [(case, case.request(GREEDY, s)) for case in self.cases for s in (None, wanted)]
        asked += [(case, case.request(replace(GREEDY, n=2), wanted)) for case in self.cases[:3]]
        asked += [(case, case.request(beams, wanted)) for case in self.cases[:3]]
        answers = await ask_all(engine, [one for _, one in asked])
        for (case, one), answer in zip(asked, answers, strict=True):
            for choice in range(one.params.n if one.hidden_states is not None else 0):
                self._check(answer, case, "encoder", choice)

    async def _pool(self, engine: AsyncEngine) -> None:
        """What embeddings are made of."""
        last = everything(engine, "encoder").layers[-1:]
        wanted = HiddenStatesParams(last, "all", "mean", "float32", stack="encoder")
        for case, answer in zip(
            self.cases, await ask_all(engine, [case.request(EXTRACT, wanted) for case in self.cases]), strict=True
        ):
            expected = case.states["encoder"][-1].mean(axis=0)
            error = np.abs(states_of(answer).assemble()[0] - expected).max() / np.abs(expected).max()
            assert error < self.tolerance, f"relative error {error:.2e}"

    def _check(self, answer: Answer, case: Case, stack: Stack, choice: int = 0) -> None:
        states: ChoiceStates = states_of(answer, choice)
        expected = case.states[stack]
        actual = as_float32(states.assemble(), states.dtype)
        assert actual.shape == expected.shape
        for layer, got, true in zip(states.layers, actual, expected, strict=True):
            error = np.abs(got - true).max() / np.abs(true).max()
            assert error < self.tolerance, f"{stack} layer {layer}: relative error {error:.2e}"


def everything(engine: AsyncEngine, stack: Stack) -> HiddenStatesParams:
    return HiddenStatesParams(resolve_layers("all", engine.info.num_layers_of(stack)), "all", stack=stack)
