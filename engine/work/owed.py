"""Hidden states that are owed: of a sequence whose tokens are final, those that no step has brought yet.

They are computed from the KV that is there, which is only read; for tokens without KV, it is written first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bequest.engine.state.capture import Capture, EncoderCapture
from bequest.engine.state.sequence import Applied, Group, Outcome, Room, Sequence, Status, Wish, Work
from bequest.engine.state.step import READ_ENCODER, Stretch
from bequest.engine.types import StepResult
from bequest.engine.types.hidden import Indices
from bequest.engine.work.desk import Desk


class Owed(Work):
    """The last thing that a sequence does. Of steps launched past its end, only the states that they bring count."""

    def conclude(self, outcome: Outcome, sequence: Sequence, stretch: Stretch, start: int) -> None:
        """Its states are awaited by the step itself."""

    def num_ready(self, sequence: Sequence) -> int:
        return self.num_to_compute(sequence, sequence.num_computed)

    def most_inherited(self, sequence: Sequence) -> int:
        return self.goal_len(sequence)


class OwedStates(Owed):
    """Those of the decoder."""

    _desk: Desk

    def wishes(self, sequence: Sequence, room: Room) -> Iterator[Wish]:
        """Tokens that have no KV yet come first: for their blocks the sequence itself may have to give way."""
        capture, begin = _capture_of(sequence), sequence.num_computed
        num_there = min(begin, sequence.planned_len)
        count = min(capture.goal_len - begin, room.budget)
        if count > 0 and room.state_rows >= capture.num_layers and room.chunks_left > 0:
            yield Stretch(begin, capture.most_tokens(begin, count, room.state_rows))
        for first, end in capture.owed_runs(num_there):
            begin = self._desk.states.walk(sequence, first)
            rows = room.state_rows // capture.num_layers
            count = min(end - begin, room.budget, first - begin + rows)
            if rows == 0 or count <= 0 or room.chunks_left <= 0:
                return
            yield Stretch(begin, count, read_only=True)
            if self._desk.states.passes_in_order:
                return

    def note_planned(self, sequence: Sequence, stretch: Stretch) -> None:
        sequence.group.states.num_tokens += stretch.count

    def goal_len(self, sequence: Sequence) -> int:
        return _capture_of(sequence).goal_len

    def num_to_compute(self, sequence: Sequence, num_computed: int) -> int:
        capture = _capture_of(sequence)
        return capture.num_owed(num_computed) + max(0, capture.goal_len - num_computed)


class OwedBehind(OwedStates):
    """Of a sequence that was there for something else."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk


class OwedEncoderStates(Owed):
    """Those of the encoder, which reads its whole input once more."""

    def wishes(self, sequence: Sequence, room: Room) -> Iterator[Wish]:
        yield READ_ENCODER

    def goal_len(self, sequence: Sequence) -> int:
        return 0

    def num_to_compute(self, sequence: Sequence, num_computed: int) -> int:
        return _capture_of(sequence).num_owed()


def end(sequence: Sequence, desk: Desk) -> None:
    """The tokens of a sequence are final: it is finished, unless hidden states are owed."""
    capture = sequence.capture
    if capture is None:
        desk.finish(sequence)
        return
    owe(sequence, OwedEncoderStates() if isinstance(capture, EncoderCapture) else OwedBehind(desk))
    desk.release_row(sequence)
    if capture.complete:
        desk.finish(sequence)


def owe(sequence: Sequence, owed: Owed) -> None:
    """From now on a sequence is there for its hidden states."""
    capture = _capture_of(sequence)
    if not capture.ended:
        capture.end(len(sequence.tokens))
    sequence.planned_len = len(sequence.tokens)
    sequence.num_computed = min(sequence.num_computed, sequence.planned_len)
    sequence.work = owed


@dataclass(frozen=True, slots=True)
class StatesOfTokens:
    """A step brings states of a sequence."""

    sequence: Sequence
    positions: Indices
    number: int  # in the result
    desk: Desk

    def apply(self, result: StepResult, applied: Applied) -> None:
        sequence, capture = self.sequence, self.sequence.capture
        if sequence.status is Status.FINISHED or sequence.group in applied.failed:
            return
        assert capture is not None
        right = capture.still_planned(self.positions)  # of tokens that were drafted, those that were right
        states = result.states[self.number]
        if right.all():
            capture.receive(self.positions, states)
        elif right.any():
            capture.receive(self.positions[right], states[right])
        if capture.complete:
            _finish(sequence, self.desk)
        if sequence.group.finished:
            applied.moved[sequence.group] = None


@dataclass(frozen=True, slots=True)
class StatesOfEncoder:
    """A step brings states that all choices of a group have in common; those that have ended meanwhile have waited for
    these alone."""

    group: Group
    positions: Indices
    number: int  # in the result
    desk: Desk

    def apply(self, result: StepResult, applied: Applied) -> None:
        group = self.group
        if group.closed or group in applied.failed:
            return
        capture = _capture_of(group.sequences[0])
        capture.receive(self.positions, result.states[self.number])
        if capture.complete:
            for sequence in group.sequences:
                if isinstance(sequence.work, Owed):
                    _finish(sequence, self.desk)
        if group.finished:
            applied.moved[group] = None


def _finish(sequence: Sequence, desk: Desk) -> None:
    if sequence.output.finish_reason is None:  # an extraction has no other end
        sequence.output.finish("length", None)
    desk.finish(sequence)


def _capture_of(sequence: Sequence) -> Capture:
    assert sequence.capture is not None
    return sequence.capture
