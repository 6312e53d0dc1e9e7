"""Which running sequences want something of the next step, and in which order. Owned by the event-loop thread."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import msgspec

from bequest.engine._C import ready_streams
from bequest.engine.scheduling.fairness import FairQueue, turn
from bequest.engine.scheduling.policy.pieces import Demand
from bequest.engine.state.sequence import Lane, Sequence


class Ready(msgspec.Struct, frozen=True):
    """Running sequences that want something of the next step."""

    decoding: list[Sequence]  # need one token; by urgency
    prefilling: list[Sequence]  # need more; in turn
    extracting: list[Sequence]  # in turn

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefilling or self.extracting)

    def demand(self, waiting: FairQueue, num_free: int) -> Demand:
        """Beside those that wait, as far as there are free slots for them."""
        num_waiting = len(waiting)
        entering = max(0, min(num_waiting, num_free))
        return Demand(
            num_streams=len(self.decoding),
            rows=sum(1 if s.plain else s.work.num_rows(s) for s in self.decoding),
            num_waiting=len(self.prefilling) + entering,
            backlog=sum(s.num_pending for s in self.prefilling)
            + (waiting.num_tokens * entering // num_waiting if num_waiting else 0),
        )


def ready_of(running: dict[Sequence, None]) -> Ready:
    """REQUIRES: they are sorted by their urgency"""
    decoding, prefilling, others = ready_streams(running)
    extracting: list[Sequence] = []
    for sequence in others:
        num = sequence.work.num_ready(sequence)
        if num <= 0:
            continue
        if sequence.group.kind.lane is Lane.EXTRACTION:
            extracting.append(sequence)
        elif num == 1:
            decoding.append(sequence)
        else:
            prefilling.append(sequence)
    if others:  # else they are in the order of those that run
        decoding.sort(key=attrgetter("urgency"))
    return Ready(decoding, sorted(prefilling, key=turn), sorted(extracting, key=turn))


def streams(running: Iterable[Sequence]) -> bool:
    """Whether a running generation is past its prompt."""
    return any(s.num_computed >= s.num_prompt and s.group.kind.lane is Lane.GENERATION for s in running)
