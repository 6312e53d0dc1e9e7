"""How long steps take: one history, and what is decided by it. Owned by the event-loop thread; the time is passed in.

**When the next step is planned.** A planned step admits nobody. If step N+1 were planned as soon as N started, a new
request would wait for both. So where N is expected to take long, N+1 is planned just before N ends. The estimate is
the lower eighth of recent steps of its size: a mean would say little, since some steps take far longer where the
machine is shared.

**How long a step of nothing but extractions may be.** Whoever comes while it runs waits for its end. So where
generations were there a moment ago it takes no longer than a few of their steps; where nobody generates it is as long
as extractions like it best. One with streams in it takes no longer either.

**How long a step with prompts may be** beside streams: a few steps without (pieces.py).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Literal

from bequest.engine.scheduling.policy.costs import SizeCosts
from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning
from bequest.engine.types import StepPlan
from bequest.engine.types.plan import MIXED_SIZES

_Size = tuple[int, int]
_NO_TOKENS = (-1, -1)  # a tower looks ahead at an image, whose request comes now
_ANY = 1 << 30  # tokens: as many as a step has


class StepClock:
    def __init__(
        self,
        extraction_sizes: tuple[int, ...] = (_ANY,),
        mixed_sizes: tuple[int, ...] = MIXED_SIZES,
        tuning: Tuning = DEFAULT,
    ) -> None:
        """Tokens of steps of extractions and of steps with prompts, ascending; the last of the first is for when nobody
        generates."""
        self._tuning = tuning
        kept = tuning.durations_kept
        self._durations: defaultdict[_Size, deque[float]] = defaultdict(lambda: deque(maxlen=kept))
        self._launched: deque[_Size] = deque()
        self._since = 0.0  # when the oldest of the launched ones began
        self._late = 0.0  # seconds by which whoever asked to be woken was, in the worst of the latest cases
        self._extracting = SizeCosts(extraction_sizes, tuning)
        self.mixed = SizeCosts(mixed_sizes, tuning)
        self._decode: float | None = None  # seconds of a step of generations without prompts
        self._present_until = 0.0

    # --- what happens --------------------------------------------------------------------------------------------

    def launched(self, plan: StepPlan, now: float) -> None:
        if plan.yields:
            return  # whatever comes passes it
        if not self._launched:
            self._since = now
        self._launched.append(self._size(plan))

    def computed(self, now: float) -> None:
        """The device is done with the oldest, and goes on to the next."""
        self._durations[self._launched.popleft()].append(now - self._since)
        self._since = now

    def ran(self, nature: Literal["decode", "extraction", "mixed"], num_tokens: int, seconds: float) -> None:
        """A step without encoders took the device so long; 0: nobody knows."""
        if not seconds:
            return
        if nature == "decode":
            self._decode = self._averaged(self._decode, seconds)
        else:
            (self._extracting if nature == "extraction" else self.mixed).note(num_tokens, seconds)

    def woken(self, seconds_late: float) -> None:
        """A busy event loop comes late: it has to be asked earlier."""
        self._late = max(seconds_late, self._late * (1 - self._tuning.delay_forgotten))

    def generates(self, now: float) -> None:
        """Somebody does, or waits to."""
        self._present_until = now + self._tuning.present_for

    # --- what follows --------------------------------------------------------------------------------------------

    def seconds_until_due(self, now: float) -> float:
        """How long the step behind those that are launched can still wait to be planned; 0: it is due."""
        if not self._launched:
            return 0.0
        least, tuning = self._least(self._launched[0]), self._tuning
        if least < tuning.late_from or self._launched[0] == _NO_TOKENS:
            return 0.0
        return max(0.0, self._since + least - tuning.late_margin - self._late - now)

    def most_extracting(self, now: float) -> int:
        """Tokens of the next step, if it is one of extractions alone."""
        if now > self._present_until or self._decode is None:
            return self._extracting.largest
        return self._extracting.most_within(self._longest_extracting(self._decode))

    def most_extracting_beside_streams(self) -> int | None:
        """Tokens of the next step, if it has streams that wait for extractions; None: nobody knows."""
        return None if self._decode is None else self.mixed.most_within(self._longest_extracting(self._decode))

    @property
    def decode_seconds(self) -> float | None:
        """Of a step of generations without prompts; None: nobody knows."""
        return self._decode

    def most_beside_streams(self) -> int | None:
        """Tokens of the next step, if it has prompts and streams that wait for them; None: nobody knows."""
        if self._decode is None:
            return None
        return self.mixed.most_within(max(self._tuning.piece_cost * self._decode, self._tuning.piece_least))

    # --- inside --------------------------------------------------------------------------------------------------

    def _longest_extracting(self, decode: float) -> float:
        return max(self._tuning.extraction_steps * decode, self._tuning.extraction_least)

    def _least(self, size: _Size) -> float:
        """One of eight steps of the size took less; 0: there were too few to tell."""
        seen = self._durations[size]
        return sorted(seen)[len(seen) // 8] if len(seen) * 2 >= self._tuning.durations_kept else 0.0

    def _averaged(self, before: float | None, newest: float) -> float:
        return newest if before is None else before + self._tuning.average_weight * (newest - before)

    def _size(self, plan: StepPlan) -> _Size:
        return self._rounded(plan.num_tokens), self._rounded(sum(run.input.length for run in plan.encoders))

    def _rounded(self, count: int) -> int:
        return round(math.log2(count) * self._tuning.sizes_per_doubling) if count else -1
