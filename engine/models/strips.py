"""How layers share the blocks of the cache.

A block holds the keys and values of a few layers, `unit` of them. Layers with the same window are a group, and a group
takes as many blocks for the same tokens as it has *strips* of `unit` layers:

    24 layers, windows 128 and none in turns     unit 12:  strip 0 = the 12 without, strip 1 = the 12 of 128
    62 layers, 10 of them without a window       unit 11:  strip 0 = the 10 without, strips 1 to 5 = the 52 others

Blocks of all strips are of equal size and come from one pool. So memory goes to whoever needs it, and a window gives
back what its layers cannot see any more (csrc/cache/strips.h). A model of one group has one strip: a block holds all of
its layers.

Layers whose heads are of other sizes are a group of their own, and a block holds as many of them as fill it:

    60 layers, 50 of 16 heads of 256 and a window, 10 of 4 heads of 512     strip 0 = the 10, strips 1 to 10 = 5 each

No torch here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Layers that a group may be padded by, as a part of its own: half a strip of a small group would be memory for nothing.
_MOST_PADDING = 1 / 8


@dataclass(frozen=True, slots=True, order=True)
class KvHeads:
    """What a layer keeps of a token: so many heads of keys, and as many of values."""

    count: int
    size: int

    @property
    def width(self) -> int:
        """Of the keys of a token."""
        return self.count * self.size


@dataclass(frozen=True, slots=True)
class Place:
    """Of a layer: which strip, and which of the layers in its blocks."""

    strip: int
    layer: int


@dataclass(frozen=True, slots=True)
class Strips:
    units: tuple[int, ...]  # of each strip: layers of a block
    windows: tuple[int, ...]  # of each strip; 0: its layers see all tokens
    heads: tuple[KvHeads, ...]  # of each strip
    places: tuple[Place, ...]  # of each layer

    def windows_below(self, max_model_len: int) -> tuple[int, ...]:
        """The same, with 0 for windows that are wider than any sequence."""
        return tuple(window if window < max_model_len else 0 for window in self.windows)

    def shapes(self, block_size: int) -> tuple[tuple[int, ...], ...]:
        """[L, 2, NKV, BS, D]: one block of the cache, as each strip sees it; all have as many values."""
        each = zip(self.units, self.heads, strict=True)
        return tuple((unit, 2, heads.count, block_size, heads.size) for unit, heads in each)


def divide(sliding_windows: Sequence[int], heads: Sequence[KvHeads]) -> Strips:
    """The strips of layers with these windows and heads; those that see all tokens come first."""
    groups = list(zip(sliding_windows, heads, strict=True))
    counts = dict(sorted(Counter(groups).items()))
    whole = math.lcm(*(kept.width for _, kept in counts))
    fills = {group: whole // group[1].width for group in counts}  # layers that have as many values as any others' fill
    unit = _unit([(count, fills[group]) for group, count in counts.items()])
    first, strips = {}, list[tuple[int, KvHeads]]()
    for group, count in counts.items():
        first[group] = len(strips)
        strips += [group] * -(-count // (unit * fills[group]))
    seen: Counter[tuple[int, KvHeads]] = Counter()
    places = []
    for group in groups:
        strip, layer = divmod(seen[group], unit * fills[group])
        places.append(Place(first[group] + strip, layer))
        seen[group] += 1
    windows, kept = zip(*strips, strict=True)
    return Strips(tuple(unit * fills[group] for group in strips), windows, kept, tuple(places))


def _unit(sizes: Sequence[tuple[int, int]]) -> int:
    """Of groups of so many layers, which come in so many at a time: the largest unit that pads no group by much, or
    else that pads them least. Of one group, all of it."""
    units = range(1, max(-(-count // fill) for count, fill in sizes) + 1)
    paddings = {unit: [(-count % (unit * fill)) / count for count, fill in sizes] for unit in units}
    fitting = [unit for unit in units if max(paddings[unit]) <= _MOST_PADDING]
    return fitting[-1] if fitting else min(units, key=lambda unit: (max(paddings[unit]), -unit))
