"""Whether searches wait for each other. Owned by the event-loop thread.

Beams wait for the result of a step before they go on. Searches that come meanwhile could have a step of their own
behind it, which those before them would then wait for in turn, and so on: two crowds that take turns at the device,
each step of which reads all weights. Where all of them fit into one step, they wait for the next one instead and are
together from then on.
"""

from __future__ import annotations

from collections.abc import Iterable

from bequest.engine.state.sequence import Sequence, Status


def gathers(max_beams: int, *several: Iterable[Sequence], busy: bool = False) -> bool:
    """Whether nothing is planned behind the step that runs: of all that run and wait, `several`, each is a search, and
    they have no more beams than one step may. Where all of them could go on behind it (engine/work/beams_ahead.py), and
    no other is on its way (`busy`: that may be), they are together as they are."""
    left, together = max_beams, not busy
    for sequences in several:
        for sequence in sequences:
            kind = sequence.group.kind
            left -= kind.num_slots
            if not kind.takes_beams or left < 0:
                return False
            together = together and sequence.status is Status.RUNNING and sequence.work.num_ready(sequence) > 0
    return not together
