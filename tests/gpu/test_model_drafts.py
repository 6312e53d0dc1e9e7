"""Drafts of models and heads on a GPU: what they say is what transformers and the published arithmetic say.

Answers stay the same but from positions on whose two best logits are near.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.speculation_equality import compare
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.drafting.choice import make_drafter
from bequest.engine.runner.cuda_draft_model import CudaDraftModel
from bequest.engine.runner.cuda_drafts import QueuedStep
from bequest.engine.runner.cuda_head_drafts import CudaHeadDrafts
from bequest.engine.runner.device_drafts import Drafted
from bequest.engine.types import NO_ROW, ChoiceDelta, OutputMode, Request, SamplingParams
from bequest.engine.types.speculation import ON_CPU, DraftMethod, ModelDrafts
from tests.engine.mtp_reference import Reference, save_with_head
from tests.engine.test_against_transformers import prompts
from tests.engine.test_draft_model import Heard, Watcher, continued
from tests.engine.test_drafted_samples import V, draw_case, sampler_of, specs
from tests.engine.test_eagle3 import random_head, reference_drafts, save_head
from tests.gpu.test_engine import BF16_GAP, config
from tests.gpu.test_speculation import DEVICE, DRAFTING_KINDS, device_sampler, on_device
from tests.tiny_models import VOCAB_SIZE, make_reference

pytestmark = pytest.mark.gpu

PROMPT: list[int] = np.random.default_rng(1).integers(3, VOCAB_SIZE, 21).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_guesses_are_the_cpus_and_change_no_row(seed: int) -> None:
    rows = specs(DRAFTING_KINDS)
    case = draw_case(rows, np.random.default_rng(seed), False)
    first = np.flatnonzero(np.concatenate([[True], case.asked.rows[1:] != case.asked.rows[:-1]]))
    logits = case.of_samples(case.logits)[torch.from_numpy(first)].contiguous()
    asked, positions = case.asked.rows[first], case.asked.positions[first]
    host, device = sampler_of(rows), device_sampler(rows)
    expected = host.guess(logits, asked, positions)
    guessed = torch.full((len(rows),), -7, dtype=torch.int32, device=DEVICE)
    padded = torch.cat([logits, logits[:2]]).to(DEVICE)
    padded_rows = on_device(np.concatenate([asked, np.full(2, NO_ROW, np.int32)]))
    at = on_device(np.concatenate([positions, np.zeros(2, np.int32)]))
    before = device.last_tokens.clone()
    for _ in range(2):  # the second time as the first
        tokens = device.guess(padded, padded_rows, at, guessed)
        assert tokens.tolist() == [*expected.tolist(), 0, 0]
    assert guessed[torch.from_numpy(asked).long().to(DEVICE)].tolist() == expected.tolist()
    assert torch.equal(device.last_tokens, before)
    sampled, bad = device.sample(padded, padded_rows, at)
    assert not bad.any() and sampled.tolist() == tokens.tolist() and padded.shape[1] == V


# --- what they say -------------------------------------------------------------------------------------------------


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    heard = Heard()
    for kind in (CudaDraftModel, CudaHeadDrafts):
        draft = kind.draft

        def listen(self: object, step: QueuedStep, draft: Callable[..., None] = draft) -> None:
            draft(self, step)
            heard.hear(step.batch, step.samples, Drafted(step.input_ids.cpu().numpy(), step.samples))

        monkeypatch.setattr(kind, "draft", listen)
    return heard


async def answers_of(
    settings: EngineConfig, asked: list[list[int]], params: SamplingParams, method: DraftMethod | None, seed: int = 0
) -> tuple[list[ChoiceDelta], Watcher]:
    """By what drafts, which counts as a small one however large it is."""
    watcher = Watcher()
    built = await build_engine(settings, watcher)
    if method is not None:
        drafts = ModelDrafts(method=method, costs=ON_CPU)
        built.engine.scheduler.drafter = make_drafter(settings.speculative, replace(ON_CPU, model=drafts, rows=64))

    async def answer(number: int) -> ChoiceDelta:
        one = replace(params, seed=seed + number)
        request = Request(f"r{number}", "local", tuple(asked[number]), one, output=OutputMode.FINAL)
        return [choice async for delta in built.engine.generate(request) for choice in delta.choices][-1]

    try:
        return list(await asyncio.gather(*map(answer, range(len(asked))))), watcher
    finally:
        await built.engine.stop()


GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("fields", [{"max_num_batched_tokens": 32}, {"enforce_eager": True}])
async def test_a_model_says_what_transformers_says(
    heard: Heard, fields: dict[str, object], tiny_model: Callable[[str], Path]
) -> None:
    beside = {"draft_model": str(tiny_model("qwen3")), "speculative": "draft:3", "dtype": "float32"}
    answers, _ = await answers_of(config(tiny_model("llama"), **beside, **fields), [PROMPT], GREEDY, "draft")
    whole, reference = [*PROMPT, *answers[0].token_ids], make_reference("qwen3")
    assert len(heard.drafts) > 5
    for _, position, tokens in heard.drafts:
        assert tokens == continued(reference, whole[: position + 1], len(tokens))


@pytest.mark.parametrize("chunk", [3, 64])
async def test_heads_say_what_the_published_arithmetic_says(
    heard: Heard, chunk: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    beside = {"draft_model": str(save_head(tmp_path / "head")), "speculative": "eagle3:4", "dtype": "float32"}
    settings = config(tiny_model("llama"), max_num_batched_tokens=chunk, **beside)
    answers, _ = await answers_of(settings, [PROMPT], GREEDY, "eagle3")
    whole, target = [*PROMPT, *answers[0].token_ids], make_reference("llama")
    assert any(len(tokens) > 1 for _, _, tokens in heard.drafts)
    for _, position, tokens in heard.drafts:
        assert tokens == reference_drafts(target, random_head(), whole[: position + 1], len(tokens))


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
async def test_heads_of_checkpoints_do_too(heard: Heard, name: str, tmp_path: Path) -> None:
    settings = config(save_with_head(name, tmp_path / "model"), speculative="mtp:4", dtype="float32")
    answers, _ = await answers_of(settings, [PROMPT], GREEDY, "mtp")
    whole, reference = [*PROMPT, *answers[0].token_ids], Reference(name)
    assert any(len(tokens) > 1 for _, _, tokens in heard.drafts)
    for _, position, tokens in heard.drafts:
        assert tokens == reference.drafts(whole[: position + 1], len(tokens))


# --- that nothing changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "num_blocks": 40}]
)
async def test_a_model_that_drafts_for_itself_is_right(
    fields: dict[str, object], tiny_model: Callable[[str], Path]
) -> None:
    """In a crowd: where rows beside it change the last bits, two logits may change places."""
    model = tiny_model("llama-head-64")
    settings = config(model, **fields)
    plain, _ = await answers_of(settings, prompts(), GREEDY, None)
    settings = replace(settings, draft_model=str(model), speculative="draft")
    drafted, watcher = await answers_of(settings, prompts(), GREEDY, "draft")
    assert watcher.drafted >= watcher.accepted > 0.9 * watcher.drafted > 40
    gap = 1e-3 if fields["dtype"] == "float32" else BF16_GAP
    for expected, answer in zip(plain, drafted, strict=True):
        pairs = zip(answer.token_ids, expected.token_ids, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            assert expected.logprobs is not None
            (_, best), (_, second) = expected.logprobs[first].top[:2]
            assert best - second < gap


async def test_it_draws_as_the_target_does(tiny_model: Callable[[str], Path]) -> None:
    model = tiny_model("llama-head-64")
    settings = config(model, dtype="float32")
    params = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95, ignore_eos=True)
    plain, _ = await answers_of(settings, prompts(), params, None)
    settings = replace(settings, draft_model=str(model), speculative="draft")
    drafted, watcher = await answers_of(settings, prompts(), params, "draft")
    assert watcher.accepted > 0.95 * watcher.drafted > 40
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    assert same >= len(plain) - 1, "one may have met a tie"


async def test_random_requests_of_every_kind(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Grammars, catalogues, hidden states, penalties, stops, children and preemption among them."""
    model = str(tiny_model("llama"))
    counts = await compare(model, 2500, 3, ("draft",), device="cuda", draft_model=model)
    assert counts["draft"]["accepted"] > 0.8 * counts["draft"]["drafted"] > 100
    counts = await compare(model, 2500, 4, ("eagle3",), device="cuda", draft_model=str(save_head(tmp_path / "head")))
    assert counts["eagle3"]["drafted"] > 100


async def test_random_requests_of_a_recurrent_model(tmp_path: Path) -> None:
    model = str(save_with_head("qwen3.5", tmp_path / "model"))
    counts = await compare(model, 2500, 5, ("prediction", "mtp"), device="cuda")
    assert counts["prediction"]["accepted"] > 100 and counts["mtp"]["drafted"] > 100
