"""Guesses of how one sequence goes on, as its work and the results of steps see them (engine/drafting)."""

from __future__ import annotations

from typing import Protocol

from bequest.engine._C import TokenList


class Guesses(Protocol):
    """Whatever is guessed, an answer stays the same: a guess that is wrong costs time."""

    waits: bool  # for tokens in flight: the next step is worth more behind a guess, which needs to know them
    num_predicted: int  # tokens of the client's prediction that were drafted and right
    num_mispredicted: int  # and wrong

    def look(self, tokens: TokenList, most: int, *, beside: bool) -> None:
        """These are known now, with all that a result has brought, and `most` could be drafted behind them: decides
        whether it waits. `beside`: whether other sequences run, which do not wait for it."""

    def draft(self, tokens: TokenList, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow."""

    def learn(self, num_drafted: int, num_right: int) -> None:
        """What came of the last draft."""
