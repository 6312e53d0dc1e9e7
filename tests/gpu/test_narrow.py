"""Steps whose last layer goes on with the samples: what transformers has, in graphs and eagerly, beside steps that read
all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bequest.engine.runner import cuda_sizes
from bequest.engine.runner.cuda_sizes import Ladder, StepSize
from bequest.engine.types import StepPlan
from tests.engine.direct import LLM
from tests.engine.model_scores import scores_and_singles
from tests.engine.model_states import Trial, check_states, reference_of
from tests.engine.test_against_transformers import PARAMS, Judge, check, prompts
from tests.gpu.test_engine import config
from tests.gpu.test_hidden_states import LENGTHS
from tests.tiny_models import VOCAB_SIZE, make_reference

pytestmark = pytest.mark.gpu

# Experts, norms on both sides, attention beside the rest, with a gate, recurrent layers.
NAMES = [
    "llama",
    "ministral3",
    "qwen3",
    "qwen3-moe",
    "gpt-oss",
    "olmo2",
    "gemma2",
    "gemma4",
    "cohere",
    "qwen3.5",
    "smollm3",
]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Short steps are narrowed, too. Yields, of each step, whether it was."""
    monkeypatch.setattr(cuda_sizes, "_FEWEST_NARROWED", 16)
    seen: list[bool] = []
    twin = Ladder._twin

    def noted(self: Ladder, size: StepSize, plan: StepPlan) -> StepSize:
        found = twin(self, size, plan)
        seen.append(found.narrow)
        return found

    monkeypatch.setattr(Ladder, "_twin", noted)
    yield seen


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tokens(name: str, eager: bool, tiny_model: Callable[[str], Path], narrow: list[bool]) -> None:
    asked = prompts()
    judge = Judge(make_reference(name), asked)
    with LLM(config(tiny_model(name), dtype="float32", enforce_eager=eager)) as llm:
        answers = llm.generate(asked, PARAMS, progress=False)
    for answer, one in zip(answers, judge(answers), strict=True):
        check(answer, one)
    assert any(narrow) and not all(narrow)


@pytest.mark.parametrize("eager", [False, True])
async def test_hidden_states(eager: bool, tiny_model: Callable[[str], Path]) -> None:
    trial = Trial(reference_of(make_reference("qwen3")), 1e-4, VOCAB_SIZE)
    fields = config(tiny_model("qwen3"), dtype="float32", enforce_eager=eager, max_num_seqs=8)
    await check_states(fields, trial, LENGTHS)


async def test_scores(tiny_model: Callable[[str], Path]) -> None:
    scored, singles, _ = await scores_and_singles(config(tiny_model("llama-head-64"), dtype="float32"))
    for choice, single in zip(scored, singles, strict=True):
        assert choice.logprobs is not None
        np.testing.assert_allclose([one.logprob for one in choice.logprobs], single, atol=1e-4)
