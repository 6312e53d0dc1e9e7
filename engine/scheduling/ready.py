"""Which running sequences want something of the next step, and in which order. Owned by the event-loop thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from bequest.engine.scheduling.fairness import turn
from bequest.engine.state.sequence import Lane, Sequence


@dataclass(frozen=True, slots=True)
class Ready:
    """Running sequences that want something of the next step."""

    decoding: list[Sequence]  # need one token; by urgency
    prefilling: list[Sequence]  # need more; in turn
    extracting: list[Sequence]  # in turn

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefilling or self.extracting)


def ready_of(running: Iterable[Sequence]) -> Ready:
    ready: list[tuple[bool, tuple[int, int, int, int], Sequence]] = []
    extracting: list[Sequence] = []
    for sequence in running:
        num = sequence.work.num_ready(sequence)
        if num <= 0:
            continue
        if sequence.group.kind.lane is Lane.EXTRACTION:
            extracting.append(sequence)
        else:
            ready.append((num > 1, sequence.urgency, sequence))
    ready.sort()
    num_decoding = bisect_left(ready, True, key=lambda entry: entry[0])
    ordered = [sequence for _, _, sequence in ready]
    return Ready(ordered[:num_decoding], sorted(ordered[num_decoding:], key=turn), sorted(extracting, key=turn))


def streams(running: Iterable[Sequence]) -> bool:
    """Whether a running generation is past its prompt."""
    return any(s.num_computed >= s.num_prompt and s.group.kind.lane is Lane.GENERATION for s in running)
