"""Low-rank deltas on a GPU (csrc/ops/cuda/lora.h): slots that hold adapters, and the tiles of a step that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cuda import address_of
from bequest.engine.kernels.streams import current_stream
from bequest.engine.types import IntArray

TILE_ROWS = 16  # csrc/ops/cuda/lora.h, as what follows
_RANKS = 16
_MOST_PARTS = 8
_PIECE = 1024
_MOST_COUNTED_TILES = 2048
_BF16 = torch.bfloat16
_TABLE_DEPTH = 32  # of an A that nobody reads
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # csrc/core/dtype.h


def rounded_rank(rank: int) -> int:
    return -(-rank // _RANKS) * _RANKS


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A product of the layers: the columns of its matrices, one behind another, and what they read. Or one of each of
    a layer's experts."""

    ends: tuple[int, ...]  # [P]: the column behind each matrix
    in_features: int
    num_experts: int = 1

    @property
    def out_features(self) -> int:
        return self.ends[-1]

    @property
    def has_kernel(self) -> bool:
        return len(self.ends) <= _MOST_PARTS

    @property
    def is_even(self) -> bool:
        """As tensor cores take it."""
        return self.in_features % 32 == 0 and all(end % 8 == 0 for end in self.ends)


@dataclass(frozen=True, slots=True)
class PackedPart:
    """What an adapter adds to one matrix of a product, as slots hold it, in the host's memory."""

    a: Tensor  # [R, K] in the dtype of the product, R a multiple of 16
    b: Tensor  # [R / 16, C, 16]
    rank: int
    scale: float

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype = _BF16) -> PackedPart:
        """Of a [rank, K] and b [rank, C] float32."""
        padding = (0, 0, 0, rounded_rank(len(a)) - len(a))
        rows = torch.nn.functional.pad(b, padding).to(dtype)  # [R, C]
        chunks = rows.view(len(rows) // _RANKS, _RANKS, b.shape[1]).transpose(1, 2).contiguous()
        return cls(torch.nn.functional.pad(a, padding).to(dtype), chunks, len(a), scale)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The same of a product of each expert: parts that some lack are zeros."""

    a: Tensor  # [E, P, R, K]
    b: Tensor  # [E, R / 16, N, 16]
    ranks: Sequence[int]  # [E P]
    scales: Sequence[float]  # [E P]

    @classmethod
    def of(cls, shape: SiteShape, parts: Mapping[tuple[int, int], PackedPart]) -> PackedExperts:
        """By expert and part."""
        num_parts, first = len(shape.ends), next(iter(parts.values()))
        most = max(len(part.a) for part in parts.values())
        a = first.a.new_zeros(shape.num_experts, num_parts, most, shape.in_features)
        b = first.b.new_zeros(shape.num_experts, most // _RANKS, shape.out_features, _RANKS)
        ranks, scales = [0] * (shape.num_experts * num_parts), [0.0] * (shape.num_experts * num_parts)
        for (expert, at), part in parts.items():
            begin, end = (0, *shape.ends)[at : at + 2]
            a[expert, at, : len(part.a)] = part.a
            b[expert, : len(part.b), begin:end] = part.b
            ranks[expert * num_parts + at], scales[expert * num_parts + at] = part.rank, part.scale
        return cls(a, b, ranks, scales)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class SiteSlots:
    """What all slots hold for one product. Slots are written by whoever loads an adapter, beside steps of others."""

    def __init__(
        self,
        shape: SiteShape,
        num_slots: int,
        most_rank: int,
        device: torch.device,
        dtype: torch.dtype = _BF16,
    ) -> None:
        """`most_rank`: rounded"""
        parts, num_products = len(shape.ends), num_slots * shape.num_experts
        self.shape, self.dtype, self.num_slots, self._most_rank = shape, dtype, num_slots, most_rank
        self._a = torch.zeros(num_products, parts, most_rank, shape.in_features, dtype=dtype, device=device)
        chunks = (most_rank // _RANKS, shape.out_features, _RANKS)
        self._b = torch.zeros(num_products, *chunks, dtype=dtype, device=device)
        self._ranks = torch.zeros(num_slots, shape.num_experts * parts, dtype=torch.int32, device=device)
        self._scales = torch.zeros(num_slots, shape.num_experts * parts, dtype=torch.float32, device=device)
        self._counts = torch.zeros(_MOST_COUNTED_TILES, dtype=torch.int32, device=device)
        self._site = _C.CudaLoraSite(
            tuple(part.data_ptr() for part in (self._a, self._b, self._ranks, self._scales, self._counts)),
            shape.ends,
            (num_products, most_rank, shape.in_features, shape.out_features, _DTYPE_CODES[dtype]),
        )

    @property
    def site(self) -> _C.CudaLoraSite:
        """As kernels take it, as long as this object lives."""
        return self._site

    @property
    def scales(self) -> Tensor:
        """[slots, E P] float32"""
        return self._scales

    @property
    def nbytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def write_part(self, slot: int, part: int, packed: PackedPart) -> None:
        """Queues copies on the current stream. Each is out of the host's memory when this returns."""
        first = 0 if part == 0 else self.shape.ends[part - 1]
        self._a[slot, part, : len(packed.a)].copy_(packed.a)
        self._b[slot, : len(packed.b), first : self.shape.ends[part]].copy_(packed.b)

    def write_experts(self, slot: int, packed: PackedExperts) -> None:
        """The same of all experts."""
        experts = slice(slot * self.shape.num_experts, (slot + 1) * self.shape.num_experts)
        self._a[experts, :, : packed.a.shape[2]].copy_(packed.a)
        self._b[experts, : packed.b.shape[1]].copy_(packed.b)
        self.describe(slot, packed.ranks, packed.scales)

    def describe(self, slot: int, ranks: Sequence[int], scales: Sequence[float]) -> None:
        """Of all parts, of every expert; a rank of 0 says that nothing is added."""
        self._ranks[slot].copy_(torch.tensor([rounded_rank(rank) for rank in ranks], dtype=torch.int32))
        self._scales[slot].copy_(torch.tensor(scales, dtype=torch.float32))

    @property
    def can_begin(self) -> bool:
        """Whether `begun` has a kernel."""
        return self.dtype is _BF16 and self.shape.is_even

    def begun(self, x: Tensor, tiles: LoraTiles) -> Tensor:
        """What is added to the product of x [T, K], [T, N], for a product that is added to it. REQUIRES: can_begin,
        and tiles of all rows"""
        y = torch.empty(x.shape[0], self.shape.out_features, dtype=self.dtype, device=x.device)
        self._add(x, y, tiles, stores=True)
        return y

    def add(self, x: Tensor, y: Tensor, tiles: LoraTiles) -> None:
        """To the product y [T, N] of x [T, K], in place; of x [T / rows_of_x, K] where tiles share rows."""
        self._add(x, y, tiles, stores=False)

    def _add(self, x: Tensor, y: Tensor, tiles: LoraTiles, *, stores: bool) -> None:
        num_rows, depth = y.shape[0], self.shape.in_features
        width = len(self.shape.ends) * self._most_rank
        shrunk = torch.empty(-(-depth // _PIECE), num_rows, width, dtype=torch.float32, device=x.device)
        rows = address_of(x, self.dtype, num_rows // tiles.rows_of_x, depth)
        arrays = rows, address_of(y, self.dtype, num_rows, self.shape.out_features), shrunk.data_ptr(), stores
        _C.cuda_lora_add(arrays, num_rows, self._site, tiles.arguments, current_stream())

    def expand(self, shrunk: Tensor, y: Tensor, tiles: LoraTiles) -> None:
        """y [T, N] gets B of shrunk [T, P R] float32, as A would leave it."""
        num_rows = y.shape[0]
        arrays = 0, address_of(y, self.dtype, num_rows, self.shape.out_features), shrunk.data_ptr(), False
        _C.cuda_lora_expand(arrays, num_rows, self._site, tiles.arguments, current_stream())


@dataclass(frozen=True, slots=True)
class PackedTable:
    """What an adapter adds to rows of a table, as slots hold it, in the host's memory."""

    columns: Tensor  # [V, R]: of A, in the dtype of the rows
    part: PackedPart  # of B; its A is not read

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> PackedTable:
        """Of a [rank, V] and b [rank, K] float32."""
        nothing = torch.zeros(len(a), _TABLE_DEPTH)
        padded = torch.nn.functional.pad(a.T, (0, rounded_rank(len(a)) - len(a)))
        return cls(padded.to(dtype).contiguous(), PackedPart.of(nothing, b, scale, dtype))

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes + self.part.nbytes


class TableSlots:
    """What all slots hold for a table of tokens. Its shrunk rows are looked up; what expands them is a product's."""

    def __init__(
        self, shape: tuple[int, int], num_slots: int, most_rank: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Of a table [V, K]; `most_rank`: rounded"""
        self._num_rows, width = shape
        self._site = SiteSlots(SiteShape((width,), _TABLE_DEPTH), num_slots, most_rank, device, dtype)
        self._columns = torch.zeros(num_slots, self._num_rows, most_rank, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self._site.num_slots

    @property
    def nbytes(self) -> int:
        return self._columns.nbytes + self._site.nbytes

    def write(self, slot: int, packed: PackedTable | None) -> None:
        """Queues copies on the current stream. Each is out of the host's memory when this returns."""
        if packed is None:
            self._site.describe(slot, [0], [0.0])
            return
        self._columns[slot, :, : packed.columns.shape[1]].copy_(packed.columns)
        self._site.write_part(slot, 0, packed.part)
        self._site.describe(slot, [packed.part.rank], [packed.part.scale])

    def add(self, ids: Tensor, slots: Tensor, y: Tensor, tiles: LoraTiles) -> None:
        """To rows y [T, K] of the table by tokens ids [T], in place; slots [T] as in LoraRows."""
        num_rows = len(y)
        order = tiles.rows[:num_rows].clamp(0, num_rows - 1).long()  # behind those of tiles it is anything
        own = slots[order].clamp(min=0).long()
        found = self._columns[own, ids[order].clamp(0, self._num_rows - 1).long()]  # [T, R]
        self._site.expand((found.float() * self._site.scales[own]).contiguous(), y, tiles)


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """Which rows of a step have which slots, in device memory."""

    rows: Tensor  # [T] int32
    tiles: Tensor  # [at least 1 + most_tiles, 3] int32, as `write_tiles` leaves them
    most_tiles: int
    rows_of_x: int = 1  # so many rows of a product follow each other that read the same row
    made_in_step: bool = False  # by a kernel of the step

    @property
    def arguments(self) -> _C.LoraTiles:
        return self.rows.data_ptr(), self.tiles.data_ptr(), self.most_tiles, self.rows_of_x, self.made_in_step

    def sharing(self, rows_of_x: int) -> LoraTiles:
        return replace(self, rows_of_x=rows_of_x)


class LoraRows:
    """Of a step, as products are told (AdapterRows of engine.layers): which rows have one is known to the device
    alone."""

    def __init__(
        self,
        sites: Mapping[int, SiteSlots],
        tiles: LoraTiles,
        slots: Tensor,
        most_rank: int,
        tables: Mapping[int, TableSlots] | None = None,
    ) -> None:
        """slots [T] int32: of each row, -1 for none; most_rank: rounded. Experts have the site of the first one."""
        self.sites, self.slots, self.most_rank = sites, slots, most_rank
        self._tiles, self._tables = tiles, tables or {}

    def is_at(self, site: int) -> bool:
        return site in self.sites or site in self._tables

    def add_rows(self, site: int, ids: Tensor, last_tokens: Tensor | None, y: Tensor) -> None:
        if last_tokens is not None:
            known = last_tokens[(-ids - 1).clamp(0, len(last_tokens) - 1)]
            ids = torch.where(ids < 0, known, ids)
        self._tables[site].add(ids, self.slots[: len(y)], y, self._tiles)

    def is_among(self, up: int, down: int) -> bool:
        return up in self.sites or down in self.sites

    def tiles_of_experts(self, ids: Tensor, num_experts: int) -> LoraTiles:
        """Of pairs of tokens and the experts ids [T, K] int32, made on the device."""
        num_tokens, top_k = ids.shape
        num_slots = next(iter(self.sites.values())).num_slots
        pairs, device = num_tokens * top_k, ids.device
        most = most_tiles(pairs, num_slots * num_experts)
        places = torch.empty(num_slots * num_experts, dtype=torch.int32, device=device)
        rows = torch.empty(max(1, pairs), dtype=torch.int32, device=device)
        tiles = torch.empty(1 + most, 3, dtype=torch.int32, device=device)
        _C.cuda_lora_expert_tiles(
            address_of(self.slots[:num_tokens], torch.int32, num_tokens),
            address_of(ids, torch.int32, num_tokens, top_k),
            (num_tokens, top_k, num_experts, num_slots),
            places.data_ptr(),
            (rows.data_ptr(), tiles.data_ptr()),
            current_stream(),
        )
        return LoraTiles(rows, tiles, most, made_in_step=True)

    def add_to_experts(self, site: int | None, x: Tensor, y: Tensor, tiles: LoraTiles) -> None:
        """To the products y of pairs, in place, if slots hold anything for them."""
        if site is not None and site in self.sites:
            self.sites[site].add(x, y, tiles)

    def begun(self, site: int, x: Tensor) -> Tensor | None:
        slots = self.sites[site]
        return slots.begun(x, self._tiles) if slots.can_begin else None

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        self.sites[site].add(x, y, self._tiles)

    def finished(self, site: int, fused: Callable[[], Tensor], plain: Callable[[], Tensor]) -> Tensor:
        return plain()


def most_tiles(num_tokens: int, num_slots: int) -> int:
    """Of a step: each slot may have one that is not full, and so may rows without."""
    return min(num_tokens, num_tokens // TILE_ROWS + num_slots + 1)


def write_tiles(slots: IntArray, rows: IntArray, tiles: IntArray) -> None:
    """Of a step whose row i has slots[i], -1 for none: into `rows` [at least T], and `tiles` [at least 1 + the most
    that there can be, 3], which begin with their number. Rows without one are the last."""
    order = np.roll(np.argsort(slots, kind="stable"), -np.count_nonzero(slots < 0))
    rows[: len(order)] = order
    used, firsts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    written = 0
    for slot, first, count in zip(used.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        for begin in range(first, first + count, TILE_ROWS):
            written += 1
            tiles[written] = (begin, min(TILE_ROWS, first + count - begin), slot)
    tiles[0] = (written, 0, 0)
