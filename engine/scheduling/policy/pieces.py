"""How much of prompts a step computes beside streams. Owned by the event-loop thread.

Every stream waits for the prompts in its step, and every prompt for the streams in the steps that it takes. The whole
work is the same, however it is cut. Large pieces make some steps long; small ones make each prompt wait for many steps,
and a device that could multiply many rows has few. So a piece is as large as one of these allows:

- **What a step may cost.** It takes no longer than a few steps without prompts.
- **Who is there.** Each open request makes room for some tokens: with many streams many prompts come, and if pieces
  were small, slots would wait for prompts.
- **What waits.** A backlog of long prompts is computed within some tens of steps.

Where nobody streams, and before a step without prompts was seen, all of a step is for prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.scheduling.policy.clock import StepClock
from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a step."""

    rows: int  # of streams: a token each
    num_open: int  # requests that stream, or wait for their first token and have a slot or find one
    backlog: int  # tokens of their prompts


class PromptPieces:
    def __init__(self, clock: StepClock, tuning: Tuning = DEFAULT) -> None:
        self._clock = clock
        self._tuning = tuning

    def tokens_of_step(self, most: int, demand: Demand) -> int:
        """Of prompts, of at most so many."""
        within = self._clock.most_beside_streams() if demand.rows else None
        if within is None:
            return most
        tuning, costs = self._tuning, self._clock.mixed
        tokens = max(tuning.piece_tokens * demand.num_open, demand.backlog // tuning.piece_steps)
        return min(most, max(within, costs.at_most(demand.rows + tokens)) - demand.rows)
