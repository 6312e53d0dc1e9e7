"""Drafts as a GPU queues them: a model and heads say what they say where nothing is queued, and no answer changes.

Kernels are the CPU's; tests/gpu/test_model_drafts.py has the GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speculation_equality import compare
from bequest.engine.runner.device_drafts import Drafted, Guess
from bequest.engine.types import IntArray, SamplingParams, StepBatch, StepSamples
from tests.engine import head_hearing, queued_on_cpu, test_draft_model, test_eagle3, test_mtp
from tests.engine.mtp_reference import Reference, save_with_head
from tests.engine.queued_on_cpu import OnCpu
from tests.engine.test_draft_model import Heard, answer, continued
from tests.tiny_models import VOCAB_SIZE, make_reference

PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPT: list[int] = np.random.default_rng(1).integers(3, VOCAB_SIZE, 21).tolist()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    queued_on_cpu.install(monkeypatch)
    heard, draft = Heard(), OnCpu.draft

    def listen(self: OnCpu, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        drafted = draft(self, batch, samples, input_ids, guess)
        heard.hear(batch, samples, drafted)
        return drafted

    monkeypatch.setattr(OnCpu, "draft", listen)
    return heard


async def test_a_model_drafts_what_transformers_says(heard: Heard, tiny_model: Callable[[str], Path]) -> None:
    fields = {"speculative": "draft:3", "max_num_batched_tokens": 3}
    built = await test_draft_model.build(test_draft_model.config(tiny_model("llama"), tiny_model("qwen3"), **fields))
    whole = [*PROMPT, *await answer(built, PROMPT, PARAMS)]
    await built.engine.stop()
    reference = make_reference("qwen3")
    assert len(heard.drafts) > 5
    for _, position, tokens in heard.drafts:
        assert tokens == continued(reference, whole[: position + 1], len(tokens))


async def test_a_head_drafts_what_the_published_arithmetic_says(
    heard: Heard, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = test_eagle3.config(
        tiny_model("llama"), test_eagle3.save_head(tmp_path / "head"), max_num_batched_tokens=3
    )
    built = await head_hearing.build(settings)
    whole = [*PROMPT, *await answer(built, PROMPT, PARAMS)]
    await built.engine.stop()
    target, head = make_reference("llama"), test_eagle3.random_head()
    assert any(len(tokens) > 1 for _, _, tokens in heard.drafts)
    for _, position, tokens in heard.drafts:
        assert tokens == test_eagle3.reference_drafts(target, head, whole[: position + 1], len(tokens))


async def test_the_head_of_a_checkpoint_does_too(heard: Heard, tmp_path: Path) -> None:
    built = await head_hearing.build(
        test_mtp.config(save_with_head("qwen3.5", tmp_path / "model"), max_num_batched_tokens=3)
    )
    whole = [*PROMPT, *await answer(built, PROMPT, PARAMS)]
    await built.engine.stop()
    reference = Reference("qwen3.5")
    assert any(len(tokens) > 1 for _, _, tokens in heard.drafts)
    for _, position, tokens in heard.drafts:
        assert tokens == reference.drafts(whole[: position + 1], len(tokens))


async def test_drafts_change_nothing(heard: Heard, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """In a crowd that is preempted: a model that drafts for itself is right, whatever was shared, copied or swapped."""
    model = str(tiny_model("llama"))
    counts = await compare(model, 1500, 5, ("draft",), draft_model=model)
    assert counts["draft"]["drafted"] >= counts["draft"]["accepted"] > 0.9 * counts["draft"]["drafted"] > 100
    counts = await compare(model, 1500, 5, ("eagle3",), draft_model=str(test_eagle3.save_head(tmp_path / "head")))
    assert counts["eagle3"]["drafted"] > 100
