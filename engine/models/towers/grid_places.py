"""Where the patches of an image lie, and what follows from it for a tower: the order that its layers have them in, the
windows, the angles of their rotation. Images of the same size share it, and nothing of it waits for the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.models.towers.config import GridConfig
from bequest.engine.models.towers.tensors import sent
from bequest.engine.types.arrays import IntArray

_MOST_KEPT = 16  # sizes of images
_BY_LENGTH = (torch.bfloat16, torch.float16)  # what torch attends to parts of several lengths in, at once


@cache
def _attention_by_length() -> Callable[..., object] | None:
    """None before torch 2.10. What it imports takes longer than all the rest of the server: only for those who ask."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


class Parts:
    """Consecutive patches that see each other: a window's, or all of an image."""

    def __init__(self, lengths: IntArray, device: torch.device) -> None:
        """`lengths`: [parts]"""
        ends = np.cumsum(lengths)
        begins = ends - lengths
        self.longest = int(lengths.max())
        self.is_one = len(lengths) == 1
        self.starts = sent(np.concatenate([[0], ends]).astype(np.int32), device)  # [parts + 1]
        self._alike = [
            sent(begins[lengths == length][:, None] + np.arange(length), device) for length in np.unique(lengths)
        ]  # of each length: [parts, patches of one]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[N, heads, D] each → [N, heads, D]"""
        fits = query.is_cuda and query.dtype in _BY_LENGTH and query.shape[2] % 8 == 0
        if fits and (attend := _attention_by_length()) is not None:
            starts, longest = self.starts, self.longest
            gathered = attend(query, key, value, starts, starts, longest, longest)
            assert isinstance(gathered, Tensor)
            return gathered
        out = torch.empty_like(value)
        for part in self._alike:
            asked, found, told = (given[part].transpose(1, 2) for given in (query, key, value))
            # [parts, heads, patches, D]
            out[part] = functional.scaled_dot_product_attention(asked, found, told).transpose(1, 2)
        return out


@dataclass(frozen=True, slots=True)
class Places:
    """Of the N patches of an image, those that become one row of the result next to each other."""

    order: Tensor | None  # [N]: which patch of those that the image was cut into comes where; None: as it was cut
    back: Tensor | None  # [N / merge²]: which row of what the layers made comes where; None: as they made it
    angles: Tensor  # [N, D] float32: cosines, then sines, in this order
    numbers: Tensor  # [N] int32: 0, 1, …
    whole: Parts
    windows: Parts
    stretched: Stretched | None  # of a table of positions, as the image was cut; None: there is none


@dataclass(frozen=True, slots=True)
class Stretched:
    """A square table of positions, its corners at those of the image: each patch has a share of four of its rows."""

    near: Tensor  # [N, 4] rows of the table
    shares: Tensor  # [N, 4] float32

    @classmethod
    def over(cls, rows: int, columns: int, side: int, merge: int, device: torch.device) -> Stretched:
        places = cut_places(rows, columns, merge)
        sides = [np.linspace(0, side - 1, count, dtype=np.float32) for count in (rows, columns)]
        across = [at[places[:, axis]] for axis, at in enumerate(sides)]
        first = [np.floor(at).astype(np.int64) for at in across]
        after = [np.minimum(at + 1, side - 1) for at in first]
        down, right = (at - begin for at, begin in zip(across, first, strict=True))
        near = [top * side + left for top in (first[0], after[0]) for left in (first[1], after[1])]
        shares = [above * left for above in (1 - down, down) for left in (1 - right, right)]
        return cls(sent(np.stack(near, 1), device), sent(np.stack(shares, 1).astype(np.float32), device))

    def rows(self, table: Tensor) -> Tensor:
        """[side², D] → [N, D]"""
        return (table[self.near] * self.shares[:, :, None].to(table.dtype)).sum(1)


class PlacesBySize:
    """Owned by the device thread."""

    def __init__(self, config: GridConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._kept: OrderedDict[tuple[int, int], Places] = OrderedDict()
        if device.type == "cuda":
            _attention_by_length()  # imported while the model is loaded, not under the first image

    def of(self, rows: int, columns: int) -> Places:
        """Of an image of so many patches from top to bottom and from left to right."""
        size = rows, columns
        if size not in self._kept:
            self._kept[size] = self._make(rows, columns)
        self._kept.move_to_end(size)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[size]

    def _make(self, rows: int, columns: int) -> Places:
        config, device = self._config, self._device
        places = cut_places(rows, columns, config.merge)
        count, together = len(places), config.merge**2
        whole = Parts(np.asarray([count], np.int32), device)
        numbers = sent(np.arange(count, dtype=np.int32), device)
        side = config.table_side
        stretched = Stretched.over(rows, columns, side, config.merge, device) if side else None
        if not config.window:
            return Places(None, None, sent(self._angles(places), device), numbers, whole, whole, stretched)
        window = places // config.window
        number = window[:, 0] * (window[:, 1].max() + 1) + window[:, 1]
        order = np.argsort(number, kind="stable")
        lengths = np.bincount(number).astype(np.int32)
        back = np.argsort(order[::together] // together)
        return Places(
            sent(order, device),
            sent(back, device),
            sent(self._angles(places[order]), device),
            numbers,
            whole,
            Parts(lengths[lengths > 0], device),
            stretched,
        )

    def _angles(self, places: IntArray) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """[N, D]: of rows, then of columns."""
        quarter = self._config.hidden_size // self._config.num_heads // 4
        frequencies = (self._config.theta ** (-np.arange(quarter, dtype=np.float64) / quarter)).astype(np.float32)
        angles = (places[:, :, None].astype(np.float32) * frequencies).reshape(len(places), -1)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1, dtype=np.float32)


def cut_places(rows: int, columns: int, merge: int) -> IntArray:
    """[N, 2]: rows and columns of patches as an image is cut, those of a square of `merge` next to each other."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).astype(np.int32)
    grid = grid.reshape(rows // merge, merge, columns // merge, merge, 2).transpose(0, 2, 1, 3, 4)
    return grid.reshape(-1, 2)
