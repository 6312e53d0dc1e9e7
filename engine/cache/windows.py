"""What sliding windows mean for a sequence: what its table keeps, and how much it may find in place."""

from __future__ import annotations

from bequest.engine._C import BlockPool, BlockTable
from bequest.engine.state.capture import capture_of
from bequest.engine.state.leased import is_leased
from bequest.engine.state.sequence import Sequence


def most_inherited(pool: BlockPool, sequence: Sequence) -> int:
    """Tokens whose KV it may find in place. Where windows are given back, hidden states are not computed from KV that
    is in place: the windows before it may be gone."""
    most = sequence.work.most_inherited(sequence)
    if pool.slides and (wanted := capture_of(sequence.group.request)):
        return min(most, wanted.first_possible)
    return most


def keep_windows(pool: BlockPool, table: BlockTable, sequence: Sequence) -> None:
    """Says what a table keeps for its sequence and for those who come later."""
    if not pool.slides:
        return
    if capture_of(sequence.group.request):
        table.keep_all()  # states that are owed in the end are computed from any position on
    elif is_leased(sequence):
        table.keep_for_lease(sequence.num_prompt)
    else:
        table.keep_window()
