"""A trial of sleep with real runners, on whichever device: leases are as they were, and memory goes and comes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.runner.prepare_draft import LoadedDrafts
from bequest.engine.types import Lineage, Retain, SamplingParams
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.speculation import DraftCosts, ModelDrafts
from tests.engine.harness import ask, ask_all, request
from tests.engine.test_draft_model import Watcher

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)


async def _pages_are_there() -> None:
    """A thread that is still at it holds the cache (engine/runner/warm_pages.py)."""
    for thread in threading.enumerate():
        if thread.name == "bequest-pages":
            await asyncio.to_thread(thread.join)


async def check_sleep(config: EngineConfig, encoder: EncoderInput | None = None) -> int:
    """Bytes that the first sleep gave back."""
    engine = (await build_engine(config)).engine
    given_back = 0
    try:
        prompts = [[1, *[5 + (7 * i + j) % 80 for j in range(26 + 9 * i)]] for i in range(2)]
        parents = [request(prompt, GREEDY, retain=Retain(600), encoder=encoder) for prompt in prompts]
        before = await ask_all(engine, parents)
        cache = engine.scheduler.cache
        for number in range(2):
            if number:
                cache.make_room(cache.pool.num_free + 2)  # some of a lease lies on the host
            await _pages_are_there()
            slept = await engine.sleep(wakes_itself=True)
            given_back = given_back or slept
            for parent, answer in zip(parents, before, strict=True):
                known = engine.parent("t", parent.id).choices[0].token_ids
                child = [*known, 11, 12, 13]
                lineage = Lineage(parent.id, 0, len(known))
                mine = await ask(engine, request(child, GREEDY, lineage=lineage, encoder=encoder))
                whole = await ask(engine, request(child, GREEDY, cache_salt="apart", encoder=encoder))
                assert mine.inheritance is not None and mine.inheritance.computed_tokens == 4
                assert mine.token_ids == whole.token_ids
                assert answer.retained is not None
        again = await ask_all(engine, [request(p, GREEDY, cache_salt="new", encoder=encoder) for p in prompts])
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in before]
        await engine.sleep(wakes_itself=False)
        await engine.wake()
        for parent in parents:
            engine.forget("t", parent.id)
        assert await engine.drain(10)
    finally:
        await engine.stop()
    engine.scheduler.check_idle()
    return given_back


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever drafts counts as small, however large it is."""

    def drafts(self: LoadedDrafts, costs: DraftCosts, one_pass: float | None = None) -> ModelDrafts:
        return ModelDrafts(method=self.method, costs=costs)

    monkeypatch.setattr(LoadedDrafts, "drafts", drafts)


async def check_drafts(config: EngineConfig, least_right: float = 1.0) -> None:
    """Of a model that drafts for itself: behind what leases hold, on the device and on the host, and behind what is
    new. REQUIRES: cheap_drafts"""
    watcher = Watcher()
    engine = (await build_engine(config, watcher)).engine
    cache, prompt = engine.scheduler.cache, [1, *range(5, 45)]

    async def draft(tokens: list[int], **asked: object) -> None:
        drafted, accepted = watcher.drafted, watcher.accepted
        await ask(engine, request(tokens, GREEDY, **asked))
        assert watcher.accepted - accepted >= least_right * (watcher.drafted - drafted) > 0

    try:
        parent = request(prompt, GREEDY, retain=Retain(600))
        await ask(engine, parent)
        known = engine.parent("t", parent.id).choices[0].token_ids
        for number in range(3):
            if number == 2:
                cache.make_room(cache.pool.num_free + 2)
            await _pages_are_there()
            await engine.sleep(wakes_itself=True)
            await draft([*known, 11 + number], lineage=Lineage(parent.id, 0, len(known)))
            await draft([2 + number, *prompt])
    finally:
        await engine.stop()
