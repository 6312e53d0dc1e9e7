"""What Gemma 4 has beyond other decoders, whichever file described it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.models.strips import KvHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config:
    full_heads: KvHeads  # of layers that see all; the others' are the decoder's
    keys_are_values: bool = False  # in layers that see all: they have no matrix of values
    num_shared: int = 0  # last layers that read the keys and values of layers before them
    wide_shared: bool = False  # the MLP of these is twice as wide
    input_size: int = 0  # of what each layer gets of a token beside the stream; 0: nothing
    input_vocab: int = 0  # tokens that the table of it has
