"""A conversation that branches: every answer has a number, and can be gone on from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    number: int
    parent: int | None  # the turn before; None: the beginning
    question: str
    answer: str


class Conversation:
    """All turns, and the one that the next question follows."""

    def __init__(self) -> None:
        self.system = ""
        self.turns: dict[int, Turn] = {}
        self.at: int | None = None

    def messages(self, question: str) -> list[dict[str, Any]]:
        """What a server is sent: the way to here, and the question."""
        found: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.path():
            found.append({"role": "user", "content": turn.question})
            found.append({"role": "assistant", "content": turn.answer})
        return [*found, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> Turn:
        turn = Turn(len(self.turns) + 1, self.at, question, answer)
        self.turns[turn.number] = turn
        self.at = turn.number
        return turn

    def path(self) -> list[Turn]:
        """From the beginning to here."""
        found, at = [], self.at
        while at is not None:
            found.append(self.turns[at])
            at = self.turns[at].parent
        return found[::-1]

    def go(self, number: int) -> None:
        """0 is the beginning. Raises KeyError."""
        self.at = self.turns[number].number if number else None

    def drop_last(self) -> Turn | None:
        """Steps back behind the last question, which stays as a branch."""
        if self.at is None:
            return None
        turn = self.turns[self.at]
        self.at = turn.parent
        return turn

    def outline(self) -> str:
        """A line for each turn, children under their parents, the way to here marked."""
        here = {turn.number for turn in self.path()}
        lines: list[str] = []

        def show(parent: int | None, depth: int) -> None:
            for turn in self.turns.values():
                if turn.parent == parent:
                    text = " ".join(f"{turn.question} → {turn.answer}".split())
                    mark = "*" if turn.number in here else " "
                    lines.append(f"{mark}{'  ' * depth}{turn.number:>3}  {text[:70]}")
                    show(turn.number, depth + 1)

        show(None, 0)
        return "\n".join(lines)
