"""What work wishes of a step. Numbers alone: who carries a wish out is the scheduler."""

from __future__ import annotations

import msgspec


# A struct, not a dataclass: one is made for every chunk, and a frozen dataclass costs several times as much to make.
class Stretch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Positions [begin, begin + count) of a sequence, to be computed; of beams, this position of each."""

    begin: int
    count: int
    read_only: bool = False  # their KV is there, and is not written again
    drafts: tuple[int, ...] = ()  # the tokens of its last positions, which are not known to be right


class EncoderWish:
    """The encoder runs for hidden states alone."""

    __slots__ = ()


READ_ENCODER = EncoderWish()
