"""How many tokens a step of nothing but extractions may have while generations come and go.

Whoever comes while such a step runs waits for its end. So where generations were there a moment ago it takes no longer
than a few of their steps; where nobody generates it is as long as extractions like it best. What steps of each size
take is learnt from those that ran. Owned by the event-loop thread; the clock is passed in.
"""

from __future__ import annotations

from bisect import bisect_left

_PRESENT = 5.0  # seconds that a generation counts as there after its last step
_STEPS = 2.0  # of generations, that one of extractions may take the time of
_LEAST = 0.002  # seconds, that nobody minds
_WEIGHT = 0.3  # of the newest in an average
_FORGOTTEN = 0.995  # a size that was too long is tried again, tens to hundreds of steps later
_WHOLE = 0.75  # of a size's tokens, that a step has which tells what the size takes


class StepLengths:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        """`sizes` in tokens, ascending; the last is for when nobody generates."""
        self._sizes = sizes
        self._seconds: list[float | None] = [None] * len(sizes)  # of a step of each
        self._decode: float | None = None  # seconds of a step of generations
        self._present_until = 0.0

    def generates(self, now: float) -> None:
        """Somebody does, or waits to."""
        self._present_until = now + _PRESENT

    def decoded(self, seconds: float) -> None:
        """A step of generations that are past their prompts, and of nothing else, took so long."""
        self._decode = _averaged(self._decode, seconds)

    def extracted(self, num_tokens: int, seconds: float) -> None:
        """A step of nothing but extractions took so long."""
        index = bisect_left(self._sizes, num_tokens)
        if index == len(self._sizes) or num_tokens < _WHOLE * self._sizes[index]:
            return
        self._seconds[index] = _averaged(self._seconds[index], seconds)
        for larger in range(index + 1, len(self._sizes)):
            known = self._seconds[larger]
            if known is not None:
                self._seconds[larger] = known * _FORGOTTEN

    def most_tokens(self, now: float) -> int:
        """Of the next step."""
        if now > self._present_until or self._decode is None:
            return self._sizes[-1]
        most = max(_STEPS * self._decode, _LEAST)
        least_per_token = 0.0  # of the next larger size that is known: a smaller one takes no less for each
        for size, seconds in zip(reversed(self._sizes), reversed(self._seconds), strict=True):
            if seconds is not None:
                least_per_token = seconds / size
            if (least_per_token * size if seconds is None else seconds) <= most:
                return size
        return self._sizes[0]


def _averaged(before: float | None, newest: float) -> float:
    return newest if before is None else before + _WEIGHT * (newest - before)
