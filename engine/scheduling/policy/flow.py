"""How much of prompts a step computes while requests wait for slots: as much as keeps up with the streams that end.

Every stream waits for the prompts in its step. While all slots are taken, a prompt that is computed at once only
makes some steps long: in the long run as many requests are let in as streams end. So the prompts are spread over the
steps between, and each step is about as long as any other.

How much that is follows from what there was: prompt tokens let in for each token of a stream. Prompts count as they
are let in, so that a long one speeds up the flow at once: each is spread over two hundred steps at most.

Owned by the event-loop thread.
"""

from __future__ import annotations

import math

from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning


class PromptFlow:
    def __init__(self, pace: float, num_slots: int, max_num_tokens: int, tuning: Tuning = DEFAULT) -> None:
        """`pace` as in SchedulerLimits.prompt_pace; `max_num_tokens` of a step."""
        self._pace, self._num_slots = pace, num_slots
        self._weight = tuning.flow_weight
        self._least = max(1, max_num_tokens // tuning.flow_least_part)
        self._prompts, self._streams = 0.0, 0.0  # tokens of the latest steps

    def let_in(self, num_tokens: int) -> None:
        """A sequence got a slot, and has so many tokens to compute before its first one."""
        self._prompts += num_tokens

    def planned(self, num_streams: int) -> None:
        """A step, with a token for each of these."""
        self._prompts -= self._weight * self._prompts
        self._streams += num_streams - self._weight * self._streams

    def tokens_of_step(self, most: int, num_streams: int, crowded: bool) -> int:
        """Of at most so many, beside these streams. `crowded`: more requests wait than there are slots for."""
        if not crowded or num_streams * 2 < self._num_slots:  # prompts hold most of the slots
            return most
        needed = math.ceil(self._pace * self._num_slots * self._prompts / max(self._streams, 1.0))
        return min(most, max(needed, self._least))
