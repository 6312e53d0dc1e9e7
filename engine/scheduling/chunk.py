"""What a step computes: chunks of sequences, and encoders that run before them. Owned by the event-loop thread."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from bequest.engine._C import BeamTables, BlockTable
from bequest.engine.scheduling.sequence import Group, Sequence
from bequest.engine.types.encoder import EncoderSpec
from bequest.engine.types.hidden import Indices


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Positions [begin, begin + count) of a sequence, to be computed; of a group of beams, one position of each."""

    sequence: Sequence
    begin: int
    count: int
    tapped: Indices | None = None  # positions whose hidden states are stored
    read_only: bool = False  # their KV is there, and is not written again

    @property
    def tables(self) -> BlockTable | BeamTables:
        beams = self.sequence.group.beams
        return self.sequence.table if beams is None else beams

    @property
    def num_tokens(self) -> int:
        beams = self.sequence.group.beams
        return self.count if beams is None else len(beams)


@dataclass(frozen=True, slots=True)
class EncoderRun:
    """An encoder that runs before the chunks are computed."""

    group: Group
    spec: EncoderSpec
    tapped: Indices | None = None  # positions whose hidden states are stored
