"""A launched step: its plan, and whom its result concerns. Owned by the event-loop thread."""

from __future__ import annotations

from typing import Literal

import msgspec

from bequest.engine.state.sequence import Expectation
from bequest.engine.types import Matcher, Registration, Release, StepPlan

MOST_YIELDING = 2  # steps that yield are launched at once: one runs, the next is queued behind it


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    plan: StepPlan
    expected: tuple[Expectation, ...]  # applied in this order when the result comes
    masked: tuple[Matcher, ...]  # as plan.samples.masks
    changes: tuple[Registration | Release, ...]  # that the device is told before the plan
    num_prompt_tokens: int
    num_preempted: int
    num_extracted: int  # tokens of extractions
    nature: Literal["decode", "extraction", "mixed"]  # a token for each of some streams; nothing but extractions; other
    images_ahead: int = 0  # whose rows it finds because the tower looked at them before their request came
