"""How many tokens are worth drafting for a sequence, by what came of its drafts lately.

A step that checks k drafts costs a little more than one that samples once, and brings as many tokens as the drafts were
right, and one. Where that does not pay the sequence rests for a while, and each time for longer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceTuning:
    """`python -m benchmarks.speculation` shows what these do."""

    row_cost: float = 0.12  # of a step: what one more row adds to it
    least_gain: float = 1.05  # tokens in the time of one, below which it rests
    first_rest: int = 8  # tokens
    longest_rest: int = 512
    forgetting: float = 0.75  # what a draft leaves of what was known before it


class Pace:
    def __init__(self, tuning: PaceTuning) -> None:
        self._tuning = tuning
        self._right, self._wrong = 1.0, 1.0  # of drafted tokens, the older the less
        self._rest = tuning.first_rest
        self._resting = 0

    def rests(self) -> bool:
        """Whether the token that has come is part of a rest."""
        if self._resting:
            self._resting -= 1
            return True
        return False

    def length(self, most: int) -> int:
        """How many tokens to draft, of `most`."""
        best, gain = 0, self._tuning.least_gain
        right = self._right / (self._right + self._wrong)
        tokens, chance = 1.0, 1.0
        for count in range(1, most + 1):
            chance *= right
            tokens += chance
            if (here := tokens / (1 + self._tuning.row_cost * count)) > gain:
                best, gain = count, here
        return best

    def note(self, num_drafted: int, num_right: int) -> None:
        """Of a draft, the tokens behind the first wrong one tell nothing."""
        kept = self._tuning.forgetting
        self._right = kept * self._right + num_right
        self._wrong = kept * self._wrong + (num_right < num_drafted)
        if num_right == num_drafted:
            self._rest = self._tuning.first_rest
        elif self.length(num_drafted) == 0:
            self._resting, self._rest = self._rest, min(2 * self._rest, self._tuning.longest_rest)
            self._right = self._wrong = 1.0  # the next try says more than what was so long ago
