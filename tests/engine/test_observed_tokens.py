"""What observers are told of tokens agrees with what the answers say, however they were generated."""

from __future__ import annotations

import pytest

from bequest.engine.types import OutputMode, Request, SamplingParams
from bequest.engine.watching.observation import RequestStats, StepStats
from tests.engine.harness import Setup, ask_all, request, running
from tests.engine.test_beam_groups import beam_params
from tests.engine.test_encoder_decoder import encoder_of


class Told:
    """An observer."""

    def __init__(self) -> None:
        self.prompt = self.generated = self.first = self.inter = 0

    def on_step(self, stats: StepStats) -> None:
        self.prompt += stats.prompt_tokens
        self.generated += stats.generated_tokens
        self.first += len(stats.first_token_seconds)
        self.inter += len(stats.inter_token_seconds)
        assert min(stats.first_token_seconds + stats.inter_token_seconds, default=0.0) >= 0.0

    def on_finish(self, stats: RequestStats) -> None:
        """The answers say it."""


THREE = SamplingParams(max_tokens=6, n=3, seed=1)
CASES: dict[str, list[Request]] = {
    "sampled": [request(range(20, 31), THREE), request(range(50, 57), THREE)],
    "beams": [request(range(20, 31), beam_params(4, 7, n=2, ignore_eos=True), output=OutputMode.FINAL)],
    "nothing": [request(range(20, 31), SamplingParams(max_tokens=0))],
}


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("case", CASES)
async def test_tokens_of_steps_are_those_of_the_answers(case: str, pipelined: bool) -> None:
    async with running(Setup(num_blocks=400, block_size=4, pipelined=pipelined)) as (engine, _):
        told = engine.observer = Told()
        usages = [answer.usage for answer in await ask_all(engine, CASES[case])]
    assert told.prompt == sum(usage.prompt_tokens for usage in usages if usage)
    assert told.generated == sum(usage.completion_tokens for usage in usages if usage)
    if case == "beams":  # as many steps as the answer is long
        assert (told.first, told.inter) == (1, 6)


@pytest.mark.parametrize("length", [1, 9])
async def test_tokens_of_encoder_inputs_are_tokens_of_prompts(length: int) -> None:
    async with running(Setup(num_blocks=400, block_size=4, max_model_len=160, encoder_len=64)) as (engine, _):
        told = engine.observer = Told()
        params = SamplingParams(max_tokens=3, temperature=0)
        [answer] = await ask_all(engine, [request([1, 30], params, encoder=encoder_of(length))])
    assert answer.usage is not None and told.prompt == answer.usage.prompt_tokens == length + 2
