"""Where a decoder looks in what its encoder made of a sound: which heads, over which states. No torch.

Dims: T tokens of a sequence, E positions of the encoder, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

FloatRows: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Alignment:
    """The heads of a model that look at what is being said, and how what they see is smoothed."""

    heads: tuple[tuple[int, int], ...]  # (layer of the decoder, head)
    filter_width: int = 7  # positions under a median; odd

    def by_layer(self) -> dict[int, tuple[int, ...]]:
        layers = sorted({layer for layer, _ in self.heads})
        return {layer: tuple(head for at, head in self.heads if at == layer) for layer in layers}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossHeads:
    """Heads of one decoder layer, and what they are asked about."""

    layer: int
    heads: tuple[int, ...]
    filter_width: int
    states: FloatRows  # [T, H] that the layer begins with: of a whole sequence
    encoded: FloatRows  # [E, H] the encoder's last
    first: int  # the tokens before it are not asked about
    num_positions: int  # of the encoder that hold sound; the rest of a window is silence

    def __post_init__(self) -> None:
        assert self.heads and self.filter_width % 2 == 1
        assert 0 <= self.first < len(self.states) and 1 <= self.num_positions <= len(self.encoded)


@runtime_checkable
class ListeningRunner(Protocol):
    """A runner of a model with cross attention."""

    def cross_weights(self, asked: CrossHeads) -> FloatRows:
        """[T - first, num_positions]: the sum of what its heads give each position, normed over the tokens and
        smoothed over the positions."""
        ...
