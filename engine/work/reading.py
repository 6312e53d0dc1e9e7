"""Reading: a request whose prompt is computed, and of which nothing is sampled (max_tokens 0).

It leaves its KV behind for others, and tells the log-probabilities of its prompt if they are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bequest.engine._C import BlockTable, TokenList
from bequest.engine.state.output import Output
from bequest.engine.state.sequence import Applied, Group, Kind, Outcome, Room, Sequence, Status, Wish
from bequest.engine.state.step import Stretch
from bequest.engine.types import ModelInfo, Request, StepResult
from bequest.engine.work.desk import Desk


class Reading(Kind):
    def __init__(self, group: Group, desk: Desk) -> None:
        self.group = group
        self._desk = desk

    @classmethod
    def takes(cls, request: Request) -> bool:
        return request.params.max_tokens == 0 and request.hidden_states is None

    @classmethod
    def check(cls, request: Request, info: ModelInfo, desk: Desk) -> None:
        """A prompt that fits the model can be read."""

    def begin(self, output: Output) -> None:
        tokens = TokenList(self.group.request.prompt_token_ids)
        table = BlockTable(self._desk.pool, self.group.salt)
        self.group.sequences.append(Sequence(self.group, 0, tokens, table, output, self))

    @property
    def num_slots(self) -> int:
        return min(self.group.request.params.n, self._desk.max_num_seqs)

    def slots(self, sequence: Sequence) -> int:
        return 1 if self.forked else self.num_slots

    def num_ready(self, sequence: Sequence) -> int:
        return sequence.planned_len - sequence.num_computed

    def wishes(self, sequence: Sequence, room: Room) -> Iterator[Wish]:
        count = room.most_tokens(sequence)
        if count > 0:
            yield Stretch(sequence.num_computed, count)

    def conclude(self, outcome: Outcome, sequence: Sequence, stretch: Stretch, start: int) -> None:
        if stretch.begin + stretch.count == sequence.planned_len:
            self._part_ways(sequence)
            outcome.expect(_Read(self, self._desk))

    def _part_ways(self, sequence: Sequence) -> None:
        """All choices are the prompt, and end with it."""
        if self.forked:
            return
        self.forked = True
        for choice in range(1, self.group.request.params.n):
            tokens, output = TokenList(self.group.request.prompt_token_ids), sequence.output.sibling(choice)
            table, num_computed = sequence.table.fork(), sequence.num_computed
            child = Sequence(self.group, choice, tokens, table, output, self, num_computed, Status.RUNNING)
            self._desk.states.fork(sequence, child)
            self.group.sequences.append(child)
            self._desk.run(child)

    def cut(self) -> None:
        raise AssertionError("nothing is sampled for it")


@dataclass(frozen=True, slots=True)
class _Read:
    """The last prompt token is computed."""

    reading: Reading
    desk: Desk

    def apply(self, result: StepResult, applied: Applied) -> None:
        group = self.reading.group
        if group.closed or group in applied.failed:
            return
        for sequence in group.sequences:
            sequence.output.finish("length", None)
            self.desk.finish(sequence)
        applied.moved[group] = None
