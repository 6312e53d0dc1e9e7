"""Whether searches wait for each other. Owned by the event-loop thread.

Beams wait for the result of a step before they go on. Searches that come meanwhile could have a step of their own
behind it, which those before them would then wait for in turn, and so on: two crowds that take turns at the device,
each step of which reads all weights. Where all of them fit into one step, they wait for the next one instead and are
together from then on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from bequest.engine.state.sequence import Sequence
from bequest.engine.types import MAX_BEAM_WIDTH

_GATHER = os.environ.get("GATHER", "1") == "1"


def gathers(*several: Iterable[Sequence]) -> bool:
    """Whether nothing is planned behind the step that runs: of all that run and wait, `several`, each is a search, and
    all fit into the next one."""
    if not _GATHER:
        return False
    width = 0
    for sequences in several:
        for sequence in sequences:
            kind = sequence.group.kind
            width += kind.num_slots
            if not kind.takes_beams or width > MAX_BEAM_WIDTH:
                return False
    return True
