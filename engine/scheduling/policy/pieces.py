"""How much of prompts a step computes beside streams. Owned by the event-loop thread.

Every stream waits for the prompts in its step, and every prompt for the streams in the steps that it takes. The whole
work is the same, however it is cut. Large pieces make some steps long; small ones make each prompt wait for many steps,
and a device that could multiply many rows has few. So a piece is as large as one of these allows:

- **What a step may cost.** It takes no longer than two steps without prompts, or some milliseconds.
- **Who is there.** Each open request makes room for some tokens: with many streams many prompts come, and if pieces
  were small, slots would wait for prompts.
- **What waits.** A backlog of long prompts is computed within some tens of steps.

Where more wait for their first token than stream, all of a step is for prompts: a burst is computed before its first
ones delay it. So it is before a step without prompts was seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.scheduling.policy.clock import StepClock
from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a step."""

    num_streams: int
    rows: int  # of theirs: a token each
    num_waiting: int  # for their first token, with a slot or one that is free
    backlog: int  # tokens of their prompts


class PromptPieces:
    def __init__(self, clock: StepClock, tuning: Tuning = DEFAULT) -> None:
        self._clock = clock
        self._tuning = tuning

    def tokens_of_step(self, most: int, demand: Demand) -> int:
        """Of prompts, of at most so many."""
        tuning, costs, within = self._tuning, self._clock.mixed, self._clock.most_beside_streams()
        if within is None or demand.num_waiting >= tuning.piece_crowd * demand.num_streams:
            return most
        num_open = demand.num_streams + demand.num_waiting
        tokens = max(tuning.piece_tokens * num_open, demand.backlog // tuning.piece_steps)
        left = max(within, costs.at_most(demand.rows + tokens)) - demand.rows
        return min(most, max(left, tuning.piece_tokens))  # beams alone may have more rows than that
