"""Finds stop strings in a text that arrives in pieces, and shows nothing of a stop string before it is ruled out.

An Aho–Corasick automaton reads each character once. Its state is the longest end of the text that begins some stop
string, which is exactly what must be held back: all before it can be shown at once.

The stop found is the first to be complete; of several that end at the same character, the longest. So the outcome
depends on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

ROOT = 0


class StopMatcher:
    """One text's search. After a stop was found the text is over: nothing may be fed any more."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the stop string found is part of the text shown. ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._automaton = _automaton(tuple(stops))
        self._include_stop = include_stop
        self._state = ROOT
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """The text that can be shown now, and the stop string if one is complete.

        What follows a stop string is dropped, and so is the stop string itself unless it is included. Unarmed (before a
        minimum length is reached), text passes unsearched: a stop string counts if all of it comes after.
        """
        if not self._automaton.searches or not armed:
            return self.flush() + text, None
        state = self._state
        for position, char in enumerate(text):
            state = self._automaton.step(state, char)
            stop = self._automaton.found[state]
            if stop is not None:
                seen = self._held + text[: position + 1]
                self._held, self._state = "", ROOT
                return (seen if self._include_stop else seen.removesuffix(stop)), stop
        self._state = state
        seen = self._held + text
        settled = len(seen) - self._automaton.depth[state]
        self._held = seen[settled:]
        return seen[:settled], None

    def flush(self) -> str:
        """What was held back: the text has ended, or is not searched from here on."""
        held, self._held, self._state = self._held, "", ROOT
        return held


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Long ones take a tenth of a second to make, and all choices of a request have the same."""
    return _Automaton(stops)


class _Automaton:
    """States are the beginnings of the stop strings, numbered; ROOT is the empty one. Never changes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.searches = bool(stops)
        self.depth = [0]  # length of the beginning
        self.found: list[str | None] = [None]  # the longest stop string that ends here
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [ROOT]  # the longest proper end of this beginning that is a beginning too
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        while (following := self._next[state].get(char)) is None:
            if state == ROOT:
                return ROOT
            state = self._fallback[state]
        return following

    def _add(self, stop: str) -> None:
        state = ROOT
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
                self._next.append({})
                self._fallback.append(ROOT)
            state = self._next[state][char]
        self.found[state] = stop

    def _link(self) -> None:
        """Breadth first: the fallback of a state is shallower than the state."""
        queue = deque(self._next[ROOT].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                if self.found[child] is None:
                    self.found[child] = self.found[self._fallback[child]]
                queue.append(child)
