"""Drafts on a GPU: the tokens of the CPU's sampler behind each of them, and answers that are the same with and without,
but from positions on whose two best logits are near."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.speculation_equality import compare
from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.kernels.cuda_sampler import CudaSampler
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.scheduling.policy.tuning import Tuning
from bequest.engine.types import NO_ROW, ChoiceDelta, OutputMode, Request, RowSpec, SamplingParams
from bequest.engine.types.speculation import Speculation
from tests.engine import test_drafted_transcripts
from tests.engine.test_against_transformers import prompts
from tests.engine.test_drafted_samples import CATALOGUE, KINDS, V, catalogue, draw_case, one_of_each, sampler_of, specs
from tests.engine.test_encoder_decoder_models import encoder_decoder
from tests.gpu.test_engine import BF16_GAP, config

pytestmark = pytest.mark.gpu
__all__ = ["encoder_decoder"]  # a fixture

DEVICE = torch.device("cuda")
# Timestamps are masked before a GPU samples, by nobody here.
DRAFTING_KINDS = [kind for kind in KINDS if kind != "timestamps"]


def device_sampler(rows: list[RowSpec]) -> CudaSampler:
    catalogues = PlacedCatalogues(DEVICE)
    catalogues.register(CATALOGUE, catalogue())
    sampler = CudaSampler(len(rows), V, DEVICE)
    for row in rows:
        sampler.open_row(row, None if row.catalogue is None else catalogues.rule(row.catalogue))
    sampler.flush()
    return sampler


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_tokens_of_the_cpus_sampler(seed: int, masked: bool) -> None:
    draw = np.random.default_rng(seed)
    rows = specs(DRAFTING_KINDS)
    case = draw_case(rows, draw, masked)
    asked, logits = case.asked, case.of_samples(case.logits)
    masks = None if case.masks is None else case.of_samples(torch.from_numpy(case.masks))
    assert asked.drafts is not None
    host, device = sampler_of(rows), device_sampler(rows)
    expected, expected_bad = host._draw(logits, asked, slice(None), None if masks is None else masks.numpy())
    # What pads a graph is skipped, and belongs to no run.
    padded = [np.concatenate([array, np.full(3, NO_ROW, np.int32)]) for array in (asked.rows, asked.drafts)]
    tokens, bad = device.sample(
        torch.cat([logits, logits[:3]]).to(DEVICE),
        on_device(padded[0]),
        on_device(np.concatenate([asked.positions, np.zeros(3, np.int32)])),
        masks=None if masks is None else torch.cat([masks, masks[:3]]).to(DEVICE),
        drafts=on_device(padded[1]),
    )
    assert tokens.tolist() == [*expected.tolist(), 0, 0, 0]
    assert bad.tolist() == [*expected_bad.tolist(), False, False, False]
    # The samples behind a wrong draft have left nothing behind.
    again, further = one_of_each(len(rows)), torch.from_numpy(draw.normal(size=(len(rows), V)).astype(np.float32))
    tokens, bad = device.sample(further.to(DEVICE), on_device(again.rows), on_device(again.positions))
    expected, expected_bad, _ = host.sample(further, again)
    assert tokens.tolist() == expected.tolist() and bad.tolist() == expected_bad.tolist()


def test_a_bad_sample_ends_its_row() -> None:
    device = device_sampler(specs(["greedy"]))
    logits = torch.zeros(6, V)
    logits[:, 4] = 1.0
    logits[1, 0] = torch.nan
    rows, drafts = np.asarray([0, 0, 0, 1, 1, NO_ROW], np.int32), np.asarray([4, 0, -1, 4, -1, -1], np.int32)
    tokens, bad = device.sample(
        logits.to(DEVICE), on_device(rows), on_device(np.arange(6, dtype=np.int32)), drafts=on_device(drafts)
    )
    assert tokens.tolist() == [4, 0, 0, 4, 4, 0] and bad.tolist() == [False, True, False, False, False, False]


# --- the whole engine ----------------------------------------------------------------------------------------------


async def answers_of(settings: EngineConfig, requests: Sequence[Request]) -> tuple[dict[str, ChoiceDelta], int]:
    """The answers, and how many tokens were drafted for them and right."""
    built = await build_engine(settings, tuning=Tuning(draft_rows=256))
    answers: dict[str, ChoiceDelta] = {}
    num_right = 0

    async def ask(built: Built, request: Request) -> None:
        nonlocal num_right
        async for delta in built.engine.generate(request):
            for choice in delta.choices:
                answers[f"{request.id}-{choice.index}"] = choice
            if delta.usage is not None:
                num_right += delta.usage.predicted_tokens or 0

    try:
        await asyncio.gather(*(ask(built, request) for request in requests))
    finally:
        await built.engine.stop()
    return answers, num_right


def requests_of(params: SamplingParams) -> list[Request]:
    asked = prompts()
    return [
        Request(f"request-{i}", "local", tuple(prompt), replace(params, seed=i), output=OutputMode.FINAL)
        for i, prompt in enumerate(asked)
    ]


def predicting(requests: Sequence[Request], said: Mapping[str, ChoiceDelta]) -> list[Request]:
    """The same, with answers that are known but for a mistake in every ninth token."""
    made = []
    for number, request in enumerate(requests):
        tokens = [*said[f"{request.id}-0"].token_ids]
        for place in range(5, len(tokens), 9):
            tokens[place] += 1 if tokens[place] in (0, 7) else -1
        wish = Speculation(prediction=tuple(tokens), most=[None, 1, 3, 7, 16][number % 5])
        made.append(replace(request, speculation=wish))
    return made


@pytest.mark.parametrize("name", ["llama-head-64", "qwen3-head-128", "qwen3-stacked", "gemma3"])
@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "num_blocks": 40},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "enforce_eager": True},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    ],
)
async def test_greedy_answers_differ_only_where_two_logits_are_near(
    name: str, fields: dict[str, object], tiny_model: Callable[[str], Path]
) -> None:
    settings = config(tiny_model(name), max_model_len=128, **fields)
    requests = requests_of(SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2))
    plain, _ = await answers_of(settings, requests)
    drafted, num_right = await answers_of(settings, predicting(requests, plain))
    assert num_right > 2 * len(requests), "some of the prediction was right"
    gap, equal = 1e-3 if fields["dtype"] == "float32" else BF16_GAP, 0
    for id, answer in drafted.items():
        expected = plain[id]
        pairs = zip(answer.token_ids, expected.token_ids, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            equal += 1
            continue
        assert expected.logprobs is not None
        (_, best), (_, second) = expected.logprobs[first].top[:2]
        assert best - second < gap, f"{id}, token {first}"
    # A key that is rounded the other way to fp8 moves by a sixteenth, so more of two near logits change places. So do
    # they in bfloat16: steps of few rows, of some, and of more that check drafts, round and add up in other orders.
    fewest = 8 if "kv_cache_dtype" in fields else 4 if fields["dtype"] == "bfloat16" else 2
    assert equal >= len(requests) // fewest


async def test_sampled_answers_are_the_same(tiny_model: Callable[[str], Path]) -> None:
    settings = config(tiny_model("llama-head-64"), dtype="float32", max_model_len=128)
    params = SamplingParams(
        max_tokens=40,
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        n=2,
        presence_penalty=0.4,
        repetition_penalty=1.1,
        bad_words=((3, 4), (9,)),
        ignore_eos=True,
        logprobs=1,
    )
    requests = requests_of(params)
    plain, _ = await answers_of(settings, requests)
    drafted, num_right = await answers_of(settings, predicting(requests, plain))
    assert num_right > 2 * len(requests)
    same = [id for id, answer in drafted.items() if answer.token_ids == plain[id].token_ids]
    assert len(same) >= len(plain) - 1, "one may have met a tie"


async def test_random_requests_of_every_kind(tiny_model: Callable[[str], Path]) -> None:
    """Grammars, catalogues, hidden states, penalties, stops, children and preemption among them."""
    counts = await compare(str(tiny_model("llama")), 3000, 10, ("ngram", "prediction"), device="cuda")
    for method in ("ngram", "prediction"):
        assert counts[method]["drafted"] > counts[method]["accepted"] > 20, method


@pytest.mark.parametrize("name", ["whisper", "t5"])
async def test_transcripts_are_the_same(name: str, encoder_decoder: Callable[[str], Path]) -> None:
    """Their timestamps too: a rule that depends on what was said before, and so on drafts."""
    fields = {"device": "cuda", "block_size": 16}
    requests = [
        replace(r, params=replace(r.params, temperature=0.0)) for r in test_drafted_transcripts.requests_of(name)
    ]
    off = [replace(request, speculation=Speculation(method="off")) for request in requests]
    plain, _ = await test_drafted_transcripts.answers_of(encoder_decoder(name), off, **fields)
    predicted = []
    for request in requests:
        tokens = [*plain[request.id].token_ids]
        tokens[4::9] = [(token + 1) % test_drafted_transcripts.FIRST_TIME for token in tokens[4::9]]
        predicted.append(replace(request, speculation=Speculation(prediction=tuple(tokens), most=5)))
    said, num_right = await test_drafted_transcripts.answers_of(encoder_decoder(name), predicted, **fields)
    assert num_right > 20
    same = sum(said[id].token_ids == answer.token_ids for id, answer in plain.items())
    assert same >= len(plain) - 1, "one may have met a tie"
