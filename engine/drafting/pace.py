"""How many tokens are worth drafting for a sequence, by what came of its drafts lately.

A step that checks k drafts costs a little more than one that samples once (`DraftCosts`, by the device), and brings as
many tokens as the drafts were right, and one. On a GPU the cost is that of the rows for which there are kernels, so
one more draft may cost nothing, or a part of a step. Where drafts do not pay the sequence rests for a while, and each
time for longer.

Beside others a draft costs a step more. The step behind the sequence's own is planned for the others before its tokens
are known, so it sits that one out. Half of the guesses being right is not enough there, and a first try hopes for more.

An account bounds what is lost: a sequence for which nothing is right pays a hundredth of its steps for tries, and a
few at its beginning, by whatever kinds of guesses they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from bequest.engine.types.speculation import DraftCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceTuning:
    """`python -m benchmarks.speculation` shows what these do."""

    least_gain: float = 1.05  # tokens in the time of one, below which it rests
    first_rest: int = 8  # tokens
    longest_rest: int = 512
    forgetting: float = 0.75  # what a draft leaves of what was known before it
    credit: float = 1.5  # steps that a sequence may lose by drafts
    allowance: float = 0.01  # and for each token
    most_saved: float = 8.0  # of what drafts have brought, for worse times


class Account:
    """Steps that the drafts of a sequence may still lose: what they bring is added to it."""

    def __init__(self, tuning: PaceTuning | None = None) -> None:
        self._tuning = tuning or PaceTuning()
        self.left = self._tuning.credit

    def add(self, steps: float) -> None:
        self.left = min(self.left + steps, self._tuning.most_saved)

    def note_tokens(self, count: int) -> None:
        self.add(count * self._tuning.allowance)


_DEFAULT = PaceTuning()
_HOPE = 3.0  # right tokens to a wrong one, of which nothing is known


class Pace:
    def __init__(self, costs: DraftCosts, tuning: PaceTuning = _DEFAULT, account: Account | None = None) -> None:
        """`account`: which other kinds of guesses may have in common with these."""
        self._costs = costs
        self._account = account
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
        """How many tokens to draft, of `most`: none where the account does not cover it that they are wrong."""
        return self._best(most, inf if self._account is None else self._account.left)

    def _best(self, most: int, most_lost: float) -> int:
        best, gain = 0, self._tuning.least_gain
        num_right, num_wrong = self._known
        right = num_right / (num_right + num_wrong)
        tokens, chance = 1.0, 1.0
        for count in range(1, most + 1):
            chance *= right
            tokens += chance
            cost = self._cost(count)
            if cost - 1 <= most_lost and (here := tokens / cost) > gain:
                best, gain = count, here
        return best

    def note(self, num_drafted: int, num_right: int) -> None:
        """Of a draft, the tokens behind the first wrong one tell nothing."""
        kept, (right, wrong) = self._tuning.forgetting, self._known
        self._noted = (kept * right + num_right, kept * wrong + (num_right < num_drafted))
        if self._account is not None:
            self._account.add(1 + num_right - self._cost(num_drafted))
        if num_right == num_drafted:
            self._rest = self._tuning.first_rest
        elif self._best(num_drafted, inf) == 0:
            self._resting, self._rest = self._rest, min(2 * self._rest, self._tuning.longest_rest)
            self._noted = None  # the next try says more than what was so long ago

    def _cost(self, count: int) -> float:
        """In steps, of which a draft that is wrong from the beginning brings one."""
        return (1.0 if self.beside else 0.0) + self._costs.of(count, beside=self.beside)

    @property
    def _known(self) -> tuple[float, float]:
        return self._noted or ((_HOPE, 1.0) if self.beside else (1.0, 1.0))
