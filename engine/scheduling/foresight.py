"""When the next step is planned: as late as it can be without the device waiting for it.

A step that is planned while another one runs is closed to whoever comes until that one ends. On a device that takes
50 ms for a step, a request would wait for what is left of the one that runs and for all of the next. So a step behind a
long one is planned when that is about to end, as steps of its size did before.

Owned by the event-loop thread; the clock is passed in.
"""

from __future__ import annotations

import math
from collections import deque

from engine.types import StepPlan

_WORTH_WAITING = 0.0125  # seconds of a step; nobody notices having waited for a shorter one
_MARGIN = 0.003  # seconds before the end: the time that planning and the way to the device take
_WEIGHT = 1 / 8  # of the latest step in the averages
_SIZES_PER_DOUBLING = 4  # steps whose sizes differ by less than a fifth are expected to take as long

_Size = tuple[int, int]


class _Duration:
    """Mean and mean deviation of what was seen, the latest first."""

    __slots__ = ("_deviation", "_mean")

    def __init__(self, seconds: float) -> None:
        self._mean, self._deviation = seconds, seconds / 2

    def add(self, seconds: float) -> None:
        self._deviation += _WEIGHT * (abs(seconds - self._mean) - self._deviation)
        self._mean += _WEIGHT * (seconds - self._mean)

    @property
    def least(self) -> float:
        """Few take less."""
        return self._mean - 2 * self._deviation


class Foresight:
    """Knows what runs, and how long such steps took."""

    def __init__(self) -> None:
        self._durations: dict[_Size, _Duration] = {}
        self._launched: deque[_Size] = deque()
        self._since = 0.0  # when the oldest of the launched ones began
        self._late = 0.0  # seconds by which whoever asked to be woken was, in the worst of the latest cases

    def launched(self, plan: StepPlan, now: float) -> None:
        if not self._launched:
            self._since = now
        self._launched.append(_size(plan))

    def computed(self, now: float) -> None:
        """The device is done with the oldest, and goes on to the next."""
        size, seconds = self._launched.popleft(), now - self._since
        if (known := self._durations.get(size)) is not None:
            known.add(seconds)
        else:
            self._durations[size] = _Duration(seconds)
        self._since = now

    def seconds_until_due(self, now: float) -> float:
        """How long the step behind those that are launched can still wait to be planned; 0: it is due."""
        if not self._launched:
            return 0.0
        known = self._durations.get(self._launched[0])
        if known is None or known.least < _WORTH_WAITING:
            return 0.0
        return max(0.0, self._since + known.least - _MARGIN - self._late - now)

    def woken(self, seconds_late: float) -> None:
        """A busy event loop comes late: it has to be asked earlier."""
        self._late = max(seconds_late, self._late * (1 - _WEIGHT))


def _size(plan: StepPlan) -> _Size:
    return _rounded(plan.num_tokens), _rounded(sum(encoder.input.length for encoder in plan.encoders))


def _rounded(count: int) -> int:
    return round(math.log2(count) * _SIZES_PER_DOUBLING) if count else -1
