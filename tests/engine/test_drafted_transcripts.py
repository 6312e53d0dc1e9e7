"""Drafts for models with an encoder: transcripts and texts are the same with them, timestamps and forced tokens too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bequest.engine.build import build_engine
from bequest.engine.scheduling.policy.tuning import Tuning
from bequest.engine.types import ChoiceDelta, OutputMode, Request, SamplingParams
from bequest.engine.types.encoder import TimestampRule
from bequest.engine.types.speculation import Speculation
from tests.engine.test_encoder_decoder_models import as_input, encoder_decoder, engine_config, inputs
from tests.tiny_encoder_decoders import VOCAB_SIZE, make_encoder_decoder

__all__ = ["encoder_decoder"]  # a fixture

FIRST_TIME = VOCAB_SIZE - 80


async def answers_of(directory: Path, requests: Sequence[Request], **fields: Any) -> tuple[dict[str, ChoiceDelta], int]:
    """What each said, and how many tokens of predictions were right."""
    settings = replace(engine_config(directory, max_model_len=64), **fields)
    built = await build_engine(settings, tuning=Tuning(draft_rows=64))
    info = built.engine.info.encoder
    assert info is not None
    said: dict[str, ChoiceDelta] = {}
    num_right = 0

    async def ask(request: Request) -> None:
        nonlocal num_right
        prompt = info.decoder_prompt(None)
        rules = info.rules(len(prompt), ends=False)
        if info.takes == "audio":
            assert rules is not None
            rules = replace(rules, timestamps=TimestampRule(first=FIRST_TIME, end=2))
        params = replace(request.params, rules=rules)
        async for delta in built.engine.generate(replace(request, prompt_token_ids=prompt, params=params)):
            for choice in delta.choices:
                said[request.id] = choice
            if delta.usage is not None:
                num_right += delta.usage.predicted_tokens or 0

    try:
        await asyncio.gather(*map(ask, requests))
    finally:
        await built.engine.stop()
    return said, num_right


def requests_of(name: str) -> list[Request]:
    items = [as_input(item) for item in inputs(make_encoder_decoder(name))]
    made = []
    for number, item in enumerate(items):
        params = SamplingParams(
            max_tokens=50, temperature=[0.0, 0.0, 0.8][number % 3], seed=number, ignore_eos=True, logprobs=2
        )
        made.append(Request(f"r{number}", "local", (0,), params, output=OutputMode.FINAL, encoder=item))
    return made


@pytest.mark.parametrize("name", ["whisper", "bart", "t5"])
async def test_drafts_change_nothing(name: str, encoder_decoder: Callable[[str], Path]) -> None:
    requests = requests_of(name)
    off = [replace(request, speculation=Speculation(method="off")) for request in requests]
    plain, _ = await answers_of(encoder_decoder(name), off)
    if name == "whisper":
        assert all(said.token_ids[0] >= FIRST_TIME for said in plain.values()), "a transcript begins with a time"
    by_ngrams = [replace(request, speculation=Speculation(method="ngram")) for request in requests]
    assert (await answers_of(encoder_decoder(name), by_ngrams))[0] == plain
    predicted = []
    for request in requests:
        tokens = [*plain[request.id].token_ids]
        tokens[4::9] = [(token + 1) % FIRST_TIME for token in tokens[4::9]]
        predicted.append(replace(request, speculation=Speculation(prediction=tuple(tokens), most=5)))
    said, num_right = await answers_of(encoder_decoder(name), predicted)
    assert said == plain and num_right > 20
