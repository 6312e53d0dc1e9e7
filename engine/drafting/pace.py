"""How many tokens are worth drafting for a sequence, by what came of its drafts lately.

A step that checks k drafts costs a little more than one that samples once (`DraftCosts`, by the device), and brings as
many tokens as the drafts were right, and one. On a GPU the cost is that of the rows for which there are kernels, so
one more draft may cost nothing, or a third of a step. Where drafts do not pay the sequence rests for a while, and each
time for longer.

Beside others a draft costs a step more. The step behind the sequence's own is planned for the others before its tokens
are known, so it sits that one out. Half of the guesses being right is not enough there, and a first try hopes for more.
"""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.types.speculation import DraftCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceTuning:
    """`python -m benchmarks.speculation` shows what these do."""

    least_gain: float = 1.05  # tokens in the time of one, below which it rests
    first_rest: int = 8  # tokens
    longest_rest: int = 512
    forgetting: float = 0.75  # what a draft leaves of what was known before it


_DEFAULT = PaceTuning()
_HOPE = 3.0  # right tokens to a wrong one, of which nothing is known


class Pace:
    def __init__(self, costs: DraftCosts, tuning: PaceTuning = _DEFAULT) -> None:
        self._costs = costs
        self._tuning = tuning
        self.beside = False  # whether other sequences run
        self._noted: tuple[float, float] | None = None  # of drafted tokens the right and the wrong, the older the less
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
        num_right, num_wrong = self._known
        right = num_right / (num_right + num_wrong)
        waits = 1.0 if self.beside else 0.0
        tokens, chance = 1.0, 1.0
        for count in range(1, most + 1):
            chance *= right
            tokens += chance
            if (here := tokens / (waits + self._costs.of(count, beside=self.beside))) > gain:
                best, gain = count, here
        return best

    def note(self, num_drafted: int, num_right: int) -> None:
        """Of a draft, the tokens behind the first wrong one tell nothing."""
        kept, (right, wrong) = self._tuning.forgetting, self._known
        self._noted = (kept * right + num_right, kept * wrong + (num_right < num_drafted))
        if num_right == num_drafted:
            self._rest = self._tuning.first_rest
        elif self.length(num_drafted) == 0:
            self._resting, self._rest = self._rest, min(2 * self._rest, self._tuning.longest_rest)
            self._noted = None  # the next try says more than what was so long ago

    @property
    def _known(self) -> tuple[float, float]:
        return self._noted or ((_HOPE, 1.0) if self.beside else (1.0, 1.0))
