"""When the next step is planned: as late as it can be without the device waiting for it.

A step that is planned while another one runs is closed to whoever comes until that one ends. On a device that takes
50 ms for a step, a request would wait for what is left of the one that runs and for all of the next. So a step behind a
long one is planned when that is about to end, as steps of its size did before.

Owned by the event-loop thread; the clock is passed in.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque

from bequest.engine.types import StepPlan

_WORTH_WAITING = 0.0125  # seconds of a step; nobody notices having waited for a shorter one
_MARGIN = 0.003  # seconds before the end: the time that planning and the way to the device take
_LOOK_BACK = 16  # steps of a size
_FORGET = 1 / 8  # of the longest delay, with each that is shorter
_SIZES_PER_DOUBLING = 4  # steps whose sizes differ by less than a fifth are expected to take as long

_Size = tuple[int, int]


class _Durations:
    """Of the latest steps of a size. Their mean would say little: some take far longer, where the machine is shared."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_LOOK_BACK)

    def add(self, seconds: float) -> None:
        self._seen.append(seconds)

    @property
    def least(self) -> float:
        """One of eight took less; 0: there were too few to tell."""
        return sorted(self._seen)[len(self._seen) // 8] if len(self._seen) * 2 >= _LOOK_BACK else 0.0


class Foresight:
    """Knows what runs, and how long such steps took."""

    def __init__(self) -> None:
        self._durations: defaultdict[_Size, _Durations] = defaultdict(_Durations)
        self._launched: deque[_Size] = deque()
        self._since = 0.0  # when the oldest of the launched ones began
        self._late = 0.0  # seconds by which whoever asked to be woken was, in the worst of the latest cases

    def launched(self, plan: StepPlan, now: float) -> None:
        if not self._launched:
            self._since = now
        self._launched.append(_size(plan))

    def computed(self, now: float) -> None:
        """The device is done with the oldest, and goes on to the next."""
        self._durations[self._launched.popleft()].add(now - self._since)
        self._since = now

    def seconds_until_due(self, now: float) -> float:
        """How long the step behind those that are launched can still wait to be planned; 0: it is due."""
        if not self._launched:
            return 0.0
        least = self._durations[self._launched[0]].least
        return max(0.0, self._since + least - _MARGIN - self._late - now) if least >= _WORTH_WAITING else 0.0

    def woken(self, seconds_late: float) -> None:
        """A busy event loop comes late: it has to be asked earlier."""
        self._late = max(seconds_late, self._late * (1 - _FORGET))


def _size(plan: StepPlan) -> _Size:
    return _rounded(plan.num_tokens), _rounded(sum(encoder.input.length for encoder in plan.encoders))


def _rounded(count: int) -> int:
    return round(math.log2(count) * _SIZES_PER_DOUBLING) if count else -1
