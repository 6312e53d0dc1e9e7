"""A trial of leases in files with real runners, on whichever device: a child behind a restart reads them back."""

from __future__ import annotations

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Lineage, Request, Retain, SamplingParams
from bequest.engine.types.encoder import EncoderInput
from tests.engine.harness import Answer, ask, ask_all, request

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
SAMPLED = SamplingParams(max_tokens=7, temperature=1, seed=7, n=2, ignore_eos=True)


def _children(engine: AsyncEngine, parents: list[Request], *, inherit: bool) -> list[Request]:
    children = []
    for parent in parents:
        known = engine.parent("t", parent.id)
        for index, choice in enumerate(known.choices):
            lineage = Lineage(parent.id, index, len(choice.token_ids)) if inherit else None
            told: dict[str, object] = {"lineage": lineage, "encoder": known.encoder}
            told |= {} if inherit else {"cache_salt": "apart"}
            children.append(request([*choice.token_ids, 11, 12, 13], GREEDY, **told))
    return children


async def check_leases_last(config: EngineConfig, encoder: EncoderInput | None = None) -> None:
    """REQUIRES: an estate_dir"""
    assert config.estate_dir is not None
    prompts = [[1, *[5 + (7 * i + j) % 80 for j in range(26 + 9 * i)]] for i in range(2)]
    kinds = zip(prompts, (GREEDY, SAMPLED), strict=True)
    lasting = Retain(600, durable=True)
    parents = [request(prompt, params, retain=lasting, encoder=encoder) for prompt, params in kinds]
    engine = (await build_engine(config)).engine
    try:
        answers = await ask_all(engine, parents)
        assert all(answer.retained is not None and answer.retained.durable for answer in answers)
        expected = await ask_all(engine, _children(engine, parents, inherit=False))
        assert await engine.drain(10)
    finally:
        await engine.stop()
    engine = (await build_engine(config)).engine
    try:
        for child, right in zip(_children(engine, parents, inherit=True), expected, strict=True):
            answer: Answer = await ask(engine, child)
            assert answer.inheritance is not None
            assert (answer.inheritance.source, answer.inheritance.computed_tokens) == ("file", 4)
            assert answer.token_ids == right.token_ids
            assert max(abs(a - b) for a, b in zip(answer.logprobs, right.logprobs, strict=True)) < 1e-3
        for parent in parents:
            engine.forget("t", parent.id)
        assert await engine.drain(10)
    finally:
        await engine.stop()
    engine.scheduler.check_idle()
