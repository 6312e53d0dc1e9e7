"""A smaller model that drafts: it says what transformers says of it, wherever the target is, and changes nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.speculation_equality import compare
from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.drafting.choice import make_drafter
from bequest.engine.errors import ModelError
from bequest.engine.runner.device_drafts import Drafted, Guess
from bequest.engine.runner.draft_model import DraftModel
from bequest.engine.types import DRAFTED, IntArray, OutputMode, Request, SamplingParams, StepBatch, StepSamples
from bequest.engine.types.speculation import ON_CPU, ModelDrafts
from bequest.engine.watching.observation import Observer, StepStats
from tests.tiny_models import VOCAB_SIZE, make_reference

_numbers = itertools.count()


def config(target: Path, draft: Path, **fields: object) -> EngineConfig:
    shape = {"block_size": 4, "max_model_len": 128, "num_blocks": 200, "max_num_seqs": 8, "dtype": "float32"}
    return EngineConfig(
        model=str(target),
        draft_model=str(draft),
        device="cpu",
        **(shape | fields),  # type: ignore[arg-type]
    )


@dataclass
class Heard:
    """What a draft model said: behind which position of which sequence (by its first block), which tokens."""

    drafts: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def hear(self, batch: StepBatch, samples: StepSamples, drafted: Drafted) -> None:
        if samples.drafts is None:
            return
        for sequence, start in enumerate(batch.query_start[:-1]):
            end = batch.query_start[sequence + 1]
            mine = (samples.tokens >= start) & (samples.tokens < end)
            num = int((samples.drafts[mine] == DRAFTED).sum())
            if num:
                tokens = drafted.input_ids[end - num : end].tolist()
                block = int(batch.block_tables[0, sequence, 0])
                self.drafts.append((block, int(batch.positions[end - num - 1]), tokens))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    heard, draft = Heard(), DraftModel.draft

    def listen(self: DraftModel, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        drafted = draft(self, batch, samples, input_ids, guess)
        heard.hear(batch, samples, drafted)
        return drafted

    monkeypatch.setattr(DraftModel, "draft", listen)
    return heard


async def build(settings: EngineConfig, observer: Observer | None = None) -> Built:
    """Whose draft model, which is as large as the target, counts as a small one."""
    built = await build_engine(settings, observer)
    built.engine.scheduler.drafter = make_drafter(
        settings.speculative, replace(ON_CPU, model=ModelDrafts(method="draft", costs=ON_CPU))
    )
    return built


async def answer(built: Built, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    request = Request(f"r{next(_numbers)}", "local", tuple(prompt), params, output=OutputMode.FINAL)
    said: tuple[int, ...] = ()
    async for delta in built.engine.generate(request):
        for choice in delta.choices:
            said = choice.token_ids
    return said


def continued(model: torch.nn.Module, tokens: list[int], count: int) -> list[int]:
    """What the model takes to follow, greedily."""
    tokens = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


@pytest.mark.parametrize("chunk", [3, 64])
async def test_it_drafts_what_transformers_says(heard: Heard, chunk: int, tiny_model: Callable[[str], Path]) -> None:
    draw = np.random.default_rng(1)
    prompt = draw.integers(3, VOCAB_SIZE, 21).tolist()
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    settings = config(tiny_model("llama"), tiny_model("qwen3"), speculative="draft:3", max_num_batched_tokens=chunk)
    built = await build(settings)
    said = await answer(built, prompt, params)
    await built.engine.stop()
    whole, reference = [*prompt, *said], make_reference("qwen3")
    assert heard.drafts
    for _, position, tokens in heard.drafts:
        assert tokens == continued(reference, whole[: position + 1], len(tokens))


@dataclass
class Watcher:
    drafted: int = 0
    accepted: int = 0

    def on_step(self, stats: StepStats) -> None:
        self.drafted += stats.drafted_tokens
        self.accepted += stats.accepted_tokens

    def on_finish(self, stats: object) -> None:
        pass


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_model_that_drafts_for_itself_is_right(temperature: float, tiny_model: Callable[[str], Path]) -> None:
    """In a crowd, with prompts that share blocks: each guess is what the target says, drawn with the same numbers."""
    draw, watcher = np.random.default_rng(2), Watcher()
    common = draw.integers(3, VOCAB_SIZE, 13).tolist()
    prompts = [common + draw.integers(3, VOCAB_SIZE, n).tolist() for n in (1, 4, 9)]
    params = SamplingParams(max_tokens=24, temperature=temperature, top_p=0.95, seed=4, ignore_eos=True)
    answers = []
    for speculative in ("off", "auto"):
        settings = config(tiny_model("llama"), tiny_model("llama"), speculative=speculative)
        built = await build(settings, watcher)
        assert watcher.drafted == 0
        answers.append(await asyncio.gather(*(answer(built, prompt, params) for prompt in prompts)))
        answers.append([await answer(built, [*prompt, 5], params) for prompt in prompts])  # behind cached blocks
        await built.engine.stop()
    assert answers[:2] == answers[2:]
    assert watcher.accepted == watcher.drafted > 40


async def test_drafts_change_nothing(tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("llama"))
    counts = await compare(model, 2000, 5, ("draft",), draft_model=str(tiny_model("llama")))
    assert counts["draft"]["drafted"] >= counts["draft"]["accepted"] > 0.9 * counts["draft"]["drafted"] > 100
    counts = await compare(model, 1000, 6, ("draft",), draft_model=str(tiny_model("qwen3")))
    assert counts["draft"]["drafted"] > 20


def test_a_method_needs_its_model() -> None:
    with pytest.raises(ModelError, match="needs draft_model"):
        make_drafter("draft", ON_CPU)
    with pytest.raises(ModelError, match="needs draft_model: a head"):
        make_drafter("eagle3", replace(ON_CPU, model=ModelDrafts(method="draft", costs=ON_CPU)))
    assert make_drafter("auto", None) is None


@pytest.mark.parametrize(
    ("target", "draft", "why"),
    [
        ("gemma3", "llama", "sliding windows"),
        ("llama", "qwen3.5", "cannot draft"),
    ],
)
async def test_what_cannot_draft_ends_the_start(
    target: str, draft: str, why: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelError, match=why):
        await build_engine(config(tiny_model(target), tiny_model(draft)))
