"""How long steps of each size take: learnt from steps that ran. Owned by the event-loop thread.

A size that nobody has tried is expected to take as much for each token as the next larger one that is known, since a
larger step is never the dearer one by the token, and as long as the smaller ones at least. So a device shows what it
can do within a few steps. The shortest of the latest steps of a size counts, because some take far longer where the
machine is shared; and what was too long is tried again after a while.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning


class SizeCosts:
    def __init__(self, sizes: tuple[int, ...], tuning: Tuning = DEFAULT) -> None:
        """`sizes`: tokens of steps, ascending."""
        self._sizes = sizes
        self._tuning = tuning
        self._seen = [deque[float](maxlen=tuning.costs_kept) for _ in sizes]  # seconds
        self._seen_at = [0] * len(sizes)  # the number of the latest step of each size
        self._num_steps = 0

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step took so long. One that is much smaller than any size says nothing."""
        index = bisect_left(self._sizes, num_tokens)
        if index == len(self._sizes) or num_tokens < self._tuning.whole_part * self._sizes[index]:
            return
        self._num_steps += 1
        self._seen[index].append(seconds)
        self._seen_at[index] = self._num_steps

    def most_within(self, seconds: float) -> int:
        """The largest size that is expected to take no longer; the smallest, if all do."""
        within = (size for size, cost in zip(self._sizes, self._expected(), strict=True) if cost <= seconds)
        return max(within, default=self._sizes[0])

    def at_most(self, num_tokens: int) -> int:
        """The largest size that has no more tokens; as many, if all sizes have more."""
        index = bisect_left(self._sizes, num_tokens + 1)
        return self._sizes[index - 1] if index else num_tokens

    def _expected(self) -> list[float]:
        """Seconds of each size."""
        expected = [0.0] * len(self._sizes)
        least_per_token = 0.0
        for index in reversed(range(len(self._sizes))):
            if self._seen[index]:
                age = self._num_steps - self._seen_at[index]
                expected[index] = min(self._seen[index]) * self._tuning.retry_factor**age
                least_per_token = expected[index] / self._sizes[index]
            else:
                expected[index] = least_per_token * self._sizes[index]
        for index in range(1, len(self._sizes)):
            expected[index] = max(expected[index], expected[index - 1])
        return expected
