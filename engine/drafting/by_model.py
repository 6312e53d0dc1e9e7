"""Drafts of a model on the device, which knows them before anybody here does: a plan says how many there are."""

from __future__ import annotations

from bequest.engine._C import TokenList
from bequest.engine.drafting.pace import Pace
from bequest.engine.types import DRAFTED


class ModelGuesses:
    """Guesses, of one sequence."""

    def __init__(self, most: int, pace: Pace) -> None:
        self.waits = False
        self.num_predicted = self.num_mispredicted = 0
        self._most = most
        self._pace = pace

    def look(self, tokens: TokenList, most: int, *, beside: bool) -> None:
        self._pace.beside = beside
        self.waits = most > 0 and not self._pace.rests() and self._length(most) > 0

    def draft(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        return (DRAFTED,) * self._length(most)

    def learn(self, num_drafted: int, num_right: int) -> None:
        self._pace.note(num_drafted, num_right)

    def _length(self, most: int) -> int:
        return self._pace.length(min(most, self._most))
