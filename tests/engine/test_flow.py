"""Prompts beside streams while all slots are taken: spread over the steps, and never in the way of who has none."""

from __future__ import annotations

import statistics

from bequest.engine.scheduling.policy.flow import PromptFlow
from tests.engine.plans import Plans

SLOTS, PROMPT, ANSWER = 8, 60, 60


def sizes(plans: Plans, count: int) -> list[int]:
    """Tokens of the next steps."""
    return [plans.step().plan.num_tokens for _ in range(count)]


def crowded(waiting: int) -> Plans:
    """All slots have streams, which end one after another, and some requests wait."""
    plans = Plans(SLOTS)
    for number in range(SLOTS):
        plans.send("one", prompt_len=PROMPT, answer=(number + 1) * ANSWER // SLOTS)
    plans.send("one", waiting, prompt_len=PROMPT, answer=ANSWER)
    plans.steps(2 * ANSWER)
    return plans


def test_prompts_are_spread_while_requests_wait_for_slots() -> None:
    seen = sizes(crowded(waiting=200), 4 * ANSWER)
    assert max(seen) < SLOTS + PROMPT // 2
    # As many are let in as before: a request computes 120 tokens, and a slot is not in use for the steps of its prompt.
    assert statistics.mean(seen) > 0.85 * SLOTS * (PROMPT + ANSWER) / ANSWER


def test_prompts_are_computed_at_once_while_slots_are_free() -> None:
    plans = Plans(SLOTS)
    plans.send("one", SLOTS - 2, prompt_len=4)
    plans.steps(300)
    plans.send("one", 2, prompt_len=PROMPT)
    assert sizes(plans, 1) == [SLOTS - 2 + 2 * PROMPT]


def test_a_long_prompt_takes_two_hundred_steps_at_most() -> None:
    plans = crowded(waiting=200)
    plans.send("one", prompt_len=5000, priority=-1)
    seen = sizes(plans, 200)
    assert sum(seen) > 5000 + 200 * SLOTS // 2


def test_who_has_no_slots_is_not_held_back() -> None:
    plans = crowded(waiting=200)
    plans.send("two", prompt_len=200)
    assert max(sizes(plans, 2)) >= 200


def test_slots_that_hold_prompts_are_worth_a_long_step() -> None:
    flow = PromptFlow(1.0, SLOTS, 256)
    flow.let_in(80)
    for _ in range(60):
        flow.planned(SLOTS)
    assert flow.tokens_of_step(256, SLOTS, crowded=True) == 256 // 16
    assert flow.tokens_of_step(256, SLOTS // 2 - 1, crowded=True) == 256
    assert flow.tokens_of_step(256, SLOTS, crowded=False) == 256
    flow.let_in(4000)
    assert 50 < flow.tokens_of_step(256, SLOTS, crowded=True) < 256
