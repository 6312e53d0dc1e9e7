"""Engines over a real runner whose device is recorded: requests of every kind at random, then the same tokens from the
recording alone. On whichever device."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.constraints.grammar import Grammar, GrammarSource, Vocabulary
from bequest.engine.errors import InsufficientRetention
from bequest.engine.recording import Masked, Planned, Record, Recording, Registered
from bequest.engine.replay import replay_file
from bequest.engine.types import BeamParams, Request, Retain, SamplingParams
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.hidden import HiddenStatesParams
from tests.engine.harness import ask, request
from tests.tiny_models import VOCAB_SIZE

KINDS = ("plain", "plain", "edited", "grammar", "catalogue", "beams", "beams of a catalogue", "scored")
Draw = Callable[[random.Random, Built], Request]


def records_of(path: Path) -> list[Record]:
    with path.open("rb") as file:
        return list(Recording(file))


def kinds_of(path: Path) -> Counter[str]:
    """What the plans of a recording hold."""
    seen: Counter[str] = Counter()
    for record in records_of(path):
        seen[type(record).__name__] += 1
        if isinstance(record, Planned):
            plan = record.plan
            seen["beams"] += len(plan.beams)
            seen["beams of a catalogue"] += sum(spec.catalogue is not None for spec in plan.beams)
            seen["rows of a catalogue"] += sum(spec.catalogue is not None for spec in plan.rows.open)
            seen["taps"] += plan.taps is not None
            seen["encoders"] += len(plan.encoders)
            seen["prompt logprobs"] += len(plan.prompt_logprobs)
            seen["swaps"] += len(plan.moves.swaps_out) + len(plan.moves.swaps_in)
            seen["copies"] += len(plan.moves.copies)
    return seen


async def record(config: EngineConfig, draw_request: Draw, num_steps: int, seed: int) -> None:
    """Runs crowds of requests until so many steps have come back."""
    draw = random.Random(seed)
    built = await build_engine(config)
    engine = built.engine
    try:
        while engine.num_steps < num_steps:
            waiting = [ask(engine, draw_request(draw, built)) for _ in range(12)]
            for answer in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 100):
                if isinstance(answer, BaseException):
                    assert isinstance(answer, InsufficientRetention), repr(answer)  # more leases than there is room for
                elif answer.states is not None:
                    answer.states.release()
    finally:
        await engine.stop()


def check_replay(path: Path, num_steps: int) -> None:
    replayed, whole = replay_file(path)
    assert whole and replayed.difference is None
    assert replayed.num_steps == replayed.num_compared >= num_steps


class Requests:
    """Of a decoder-only model: sampled in every way, searched, bound to grammars and catalogues, looked into."""

    def __init__(self) -> None:
        items = np.random.default_rng(0).integers(10, 90, (300, 4)).astype(np.int32)
        self._catalogues = [Catalogue(items[begin::3].copy(), VOCAB_SIZE) for begin in range(3)]
        self._grammars: list[Grammar] = []

    def __call__(self, draw: random.Random, built: Built) -> Request:
        if not self._grammars:
            info = built.engine.info
            vocabulary = Vocabulary(built.text.tokenizer, info.vocab_size, info.eos_token_ids)
            sources = GrammarSource("regex", "[a-f]{3,9}-[0-9]{2}"), GrammarSource("regex", "(the|cat|rat| )+")
            self._grammars = [Grammar(source, vocabulary) for source in sources]
        begin = draw.choice([5, 50])
        prompt = [begin + i % 37 for i in range(draw.choice([3, 16, 17, 40]))]
        prompt += [draw.randrange(10, 300) for _ in range(draw.choice([1, 2, 20]))]
        retain = Retain(300) if draw.random() < 0.3 else None
        asked = request(prompt, self._params(draw), retain=retain, priority=draw.choice([0, 1]))
        if draw.random() < 0.15:
            return replace(asked, hidden_states=HiddenStatesParams((0, 2, 3), "all"))
        return asked

    def _params(self, draw: random.Random) -> SamplingParams:
        kind = draw.choice(KINDS)
        most = draw.choice([1, 5, 20])
        plain = SamplingParams(
            max_tokens=most, temperature=draw.choice([0, 0.8]), n=draw.choice([1, 1, 3]), seed=draw.randrange(9)
        )
        beams = BeamParams(draw.choice([2, 5]))
        if kind == "edited":
            return replace(
                plain,
                top_k=40,
                top_p=0.9,
                presence_penalty=0.5,
                frequency_penalty=0.3,
                repetition_penalty=1.2,
                bad_words=((7,), (8, 9)),
                logit_bias=((11, 3.0), (12, -100.0)),
                min_tokens=1,
                logprobs=3,
            )
        if kind == "grammar":
            return replace(plain, grammar=draw.choice(self._grammars), max_tokens=20)
        if kind == "catalogue":
            return replace(plain, catalogue=draw.choice(self._catalogues), max_tokens=6)
        if kind == "beams":
            return SamplingParams(max_tokens=min(most, 5), n=2, beams=beams, logprobs=draw.choice([None, 2]))
        if kind == "beams of a catalogue":
            return SamplingParams(max_tokens=6, n=2, beams=beams, catalogue=draw.choice(self._catalogues))
        if kind == "scored":
            return replace(plain, prompt_logprobs=2, n=1)
        return plain


def encoder_request(draw: random.Random, built: Built) -> Request:
    """Of an encoder-decoder model that reads tokens."""
    read = EncoderInput.of_tokens(draw.randrange(3, 300) for _ in range(draw.choice([1, 4, 17, 30])))
    beams = BeamParams(3) if draw.random() < 0.3 else None
    params = SamplingParams(max_tokens=draw.choice([1, 12]), temperature=0, n=1 if beams is None else 2, beams=beams)
    assert built.engine.info.encoder is not None
    prompt = built.engine.info.encoder.decoder_prompt(None)
    rules = built.engine.info.encoder.rules(len(prompt), ends=True)
    asked = request(prompt, replace(params, rules=rules), encoder=read)
    if beams is None and draw.random() < 0.3:
        wanted = HiddenStatesParams((0, 1), "all", stack=draw.choice(["decoder", "encoder"]))
        return replace(asked, hidden_states=wanted)
    return asked


async def check_recorded_run(config: EngineConfig, num_steps: int) -> None:
    """`config.record` is where. REQUIRES: a cache so small that leases move to the host"""
    assert config.record is not None
    path = Path(config.record)
    await record(config, Requests(), num_steps, seed=3)
    seen = kinds_of(path)
    for kind in ("beams", "beams of a catalogue", "rows of a catalogue", "taps", "prompt logprobs", "swaps", "copies"):
        assert seen[kind] > 0, kind
    assert seen[Masked.__name__] > 0 and seen[Registered.__name__] == 3 and seen["Returned"] >= num_steps
    check_replay(path, num_steps)


async def check_recorded_encoder_run(config: EngineConfig, num_steps: int) -> None:
    assert config.record is not None
    path = Path(config.record)
    await record(config, encoder_request, num_steps, seed=4)
    seen = kinds_of(path)
    assert seen["encoders"] > 0 and seen["beams"] > 0 and seen["taps"] > 0
    check_replay(path, num_steps)
