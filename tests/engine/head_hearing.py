"""What heads draft, for tests of each kind of head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.drafting.choice import make_drafter
from bequest.engine.runner.device_drafts import Drafted, Guess
from bequest.engine.runner.head_drafts import HeadDrafts
from bequest.engine.types import IntArray, StepBatch, StepSamples
from bequest.engine.types.speculation import ON_CPU, ModelDrafts
from tests.engine.test_draft_model import Heard


async def build(settings: EngineConfig) -> Built:
    """Whose head, which is as large as the target, counts as a small one."""
    built = await build_engine(settings)
    method = settings.speculative.partition(":")[0]
    drafts = ModelDrafts(method=method, costs=ON_CPU)
    built.engine.scheduler.drafter = make_drafter(settings.speculative, replace(ON_CPU, model=drafts))
    return built


def listen(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """To all heads, from now on."""
    heard, draft = Heard(), HeadDrafts.draft

    def drafted(self: HeadDrafts, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        told = draft(self, batch, samples, input_ids, guess)
        heard.hear(batch, samples, told)
        return told

    monkeypatch.setattr(HeadDrafts, "draft", drafted)
    return heard
