"""How many states of recurrent layers a sequence may come to hold: what it is let in with room for."""

from __future__ import annotations

from bequest.engine.state.recurrent import SequenceStates
from bequest.engine.state.sequence import Sequence
from bequest.engine.types import Request

_PER_CHOICE = 2  # states: what it goes on from, and what it writes
_PER_BEAM, _PER_SEARCH = 3, 1  # those, and one of a beam that has ended; what stands behind the prompt of all
_PER_WALKING = 4  # as many more of a choice, or a beam, that passes its tokens again for their hidden states


def most_held(sequence: Sequence, held: SequenceStates) -> int:
    """States that a sequence may come to hold, for those of its group that will begin, too."""
    work, keeps = sequence.work, 0
    num_to_begin = work.num_to_begin(sequence)
    if held.wanted > 0 or 0 < work.most_passed(sequence) < sequence.planned_len:
        # What it keeps has the room of whoever is to begin; then that of what it came from.
        keeps = int(num_to_begin == 0 and not held.lends)
    each, beside = num_each(sequence.group.request)
    return each * (max(1, work.slots(sequence)) + num_to_begin) + beside + keeps


def num_each(request: Request) -> tuple[int, int]:
    """States that each of its choices or beams may come to hold, and those beside all of them."""
    if request.hidden_states is not None:
        return _PER_WALKING, 0
    return (_PER_CHOICE, 0) if request.params.beams is None else (_PER_BEAM, _PER_SEARCH)
