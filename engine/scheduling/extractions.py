"""Extractions of hidden states beside generations: their queue below these, and their share of the tokens.

Owned by the event-loop thread.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bequest.engine.scheduling.fairness import FairQueue
from bequest.engine.scheduling.limits import ExtractionLimits
from bequest.engine.scheduling.policy.clock import StepClock
from bequest.engine.scheduling.ready import Ready
from bequest.engine.state.draft import Draft
from bequest.engine.state.launch import Launch
from bequest.engine.state.sequence import Sequence
from bequest.engine.states.memory import StatesMemory


class Spare(msgspec.Struct, frozen=True):
    """What a step has for extractions when all others have what they need."""

    most: int  # tokens of the step
    extracted: int  # theirs already
    generating: bool  # a generation runs, in this step or before it
    queued: bool  # they may be alone in a step that is queued where this one is
    extracting: bool  # some run
    yielding: bool  # a step of theirs is launched, which others pass


class ShareOfTokens:
    """Credit of extractions against the tokens that generations compute while these wait."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._rate = share / (1 - share)
        self._credit = 0.0

    def due(self, most: int) -> int:
        """Tokens of the next step that are theirs."""
        return max(0, min(int(self._credit), most))

    def settle(self, generated: int, extracted: int, most: int) -> None:
        """A step of `most` tokens has so many of each. What cannot be used does not pile up: it would come as one large
        step, for which the streams of the generations would have to wait. An encoder's run, which is not cut, may leave
        a debt."""
        credit = self._credit + self._rate * generated - extracted
        self._credit = min(credit, max(1.0, self._share * most))

    def forget(self) -> None:
        """Nobody wants any."""
        self._credit = 0.0


class ShareOfTime:
    """Debt of extractions: seconds by which streams waited longer for them, against those that the streams took.

    A step of few streams reads all weights for few tokens, so a share of its tokens would be next to nothing, and some
    more tokens make it hardly longer. One that has to wait for a short prompt of an embedding takes it at once; the
    next one waits until that is paid for.
    """

    def __init__(self, share: float, clock: StepClock) -> None:
        self._share = share
        self._rate = share / (1 - share)
        self._clock = clock
        self._debt = 0.0

    def due(self, most: int, num_streams: int) -> int:
        """Tokens of the next step that are theirs, beside so many streams that need one."""
        within = self._clock.most_extracting_beside_streams()
        if within is None or not num_streams or self._debt > 0:
            return 0
        return max(0, min(within - num_streams, int(self._share * most)))

    def planned(self) -> None:
        """A step has some of theirs. Until it is known what it took, it counts as two without."""
        self._debt += self._clock.decode_seconds or 0.0

    def ran(self, seconds: float, part: float) -> None:
        """A step that streams waited for took so long. `part`: of what it took longer, for extractions; 0: without."""
        alone = self._clock.decode_seconds or seconds
        longer = part * max(0.0, seconds - alone)
        expected = alone if part else 0.0
        self._debt = max(0.0, self._debt - expected + longer - self._rate * (seconds - longer))


class Extractions:
    def __init__(self, limits: ExtractionLimits, clock: StepClock) -> None:
        self._clock = clock
        self.waiting = FairQueue()
        self.memory = StatesMemory(limits.max_bytes, limits.max_request_bytes)
        self._share = ShareOfTokens(limits.share)
        self._time = ShareOfTime(limits.share, clock)

    def take_share(self, draft: Draft, fill: Callable[[], None], ready: Ready, num_waiting: int) -> int:
        """Their share, before generations take what they need: what they cannot use is these' again. `num_waiting`:
        generations, which would wait longer for their first token.

        Returns the number of their tokens.
        """
        due = self._share.due(draft.budget)
        if not ready.prefilling and not num_waiting:
            due = max(due, self._time.due(draft.budget, len(ready.decoding)))
        if not due:
            return 0
        before, short = draft.budget, draft.short
        with draft.allowing(due):
            fill()
        draft.short = short  # where an extraction finds no blocks, a generation may
        extracted = before - draft.budget
        if extracted and (ready.decoding or ready.prefilling):  # else nobody waits for it, and nobody is owed
            self._time.planned()
        return extracted

    def ran(self, launch: Launch, seconds: float) -> None:
        """A step has come back; 0 seconds: nobody knows."""
        if launch.nature != "extraction":
            self._time.ran(seconds, launch.num_extracted / max(launch.num_extracted, launch.num_prompt_tokens, 1))

    def take_rest(self, draft: Draft, fill: Callable[[], None], spare: Spare) -> None:
        """All that is left of a step, if they are alone in it and on the device."""
        generated = spare.most - draft.budget - spare.extracted
        if spare.generating:
            self._clock.generates(draft.now)
        if generated == 0 and not spare.generating and spare.queued:
            with draft.allowing(max(0, self._clock.most_extracting(draft.now) - spare.extracted)):
                fill()
            self._share.forget()  # what nobody else could have used is no debt
        elif not spare.yielding:  # which is their share, as long as it lasts
            self._share.settle(generated, spare.extracted + draft.overdrawn, spare.most)
        if not spare.extracting and not len(self.waiting):
            self._share.forget()

    def admit(self, draft: Draft, admit: Callable[[Sequence], bool]) -> None:
        """Waiting ones, as far as the budget goes."""
        while draft.budget > 0 and draft.state_rows > 0 and not draft.short:
            sequence = self.waiting.head()
            if sequence is None or not self.memory.try_charge(sequence.group):
                return
            if not sequence.work.num_ready(sequence):
                return  # it gave way with all its steps launched, and ends with their results
            if not admit(sequence) and not self.waiting.is_aside(sequence):
                return
