"""How layers share the blocks of the cache.

A block holds the keys and values of a few layers, `unit` of them. Layers with the same window are a group, and a group
takes as many blocks for the same tokens as it has *strips* of `unit` layers:

    24 layers, windows 128 and none in turns     unit 12:  strip 0 = the 12 without, strip 1 = the 12 of 128
    62 layers, 10 of them without a window       unit 11:  strip 0 = the 10 without, strips 1 to 5 = the 52 others

Blocks of all strips are of equal size and come from one pool. So memory goes to whoever needs it, and a window gives
back what its layers cannot see any more (csrc/cache/strips.h). A model of one group has one strip: a block holds all of
its layers.

No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Layers that a group may be padded by, as a part of its own: half a strip of a small group would be memory for nothing.
_MOST_PADDING = 1 / 8


@dataclass(frozen=True, slots=True)
class Place:
    """Of a layer: which strip, and which of the layers in its blocks."""

    strip: int
    layer: int


@dataclass(frozen=True, slots=True)
class Strips:
    unit: int  # layers of a block
    windows: tuple[int, ...]  # of each strip; 0: its layers see all tokens
    places: tuple[Place, ...]  # of each layer

    def windows_below(self, max_model_len: int) -> tuple[int, ...]:
        """The same, with 0 for windows that are wider than any sequence."""
        return tuple(window if window < max_model_len else 0 for window in self.windows)


def divide(sliding_windows: Sequence[int]) -> Strips:
    """The strips of layers with these windows; those that see all tokens come first."""
    sizes = dict(sorted(Counter(sliding_windows).items()))
    unit = _unit(list(sizes.values()))
    first, windows = {}, list[int]()
    for window, size in sizes.items():
        first[window] = len(windows)
        windows += [window] * -(-size // unit)
    seen: Counter[int] = Counter()
    places = []
    for window in sliding_windows:
        strip, layer = divmod(seen[window], unit)
        places.append(Place(first[window] + strip, layer))
        seen[window] += 1
    return Strips(unit, tuple(windows), tuple(places))


def _unit(sizes: Sequence[int]) -> int:
    """The largest unit that pads no group by much; of one group, all of it."""
    fitting = [u for u in range(1, max(sizes) + 1) if all((-n % u) <= n * _MOST_PADDING for n in sizes)]
    return fitting[-1]
