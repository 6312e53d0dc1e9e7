"""Weights in the layouts of the CPU's matrix kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bequest.engine import _C

PANEL_WIDTH = 16
STRIP_WIDTH = 32
TILE_DEPTH = 32  # values of k
GROUP = 32  # values of a row that share a scale
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
# Numbers of csrc/ops/cpu/linear.h.
_TILES = 2
_FAST = 16

StoredType = Literal["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """How kernels keep codes (csrc/ops/cpu/quantised.h)."""

    number: int  # of the format, in csrc/ops/cpu/linear.h
    bits: int
    values: int  # of a row in a block
    panel_bytes: int  # of a block of 16 rows


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """How a GGUF file holds codes."""

    number: int  # in csrc/ops/cpu/quantised.h
    block_bytes: int  # of a block of a row
    layout: CodeLayout


_CODES_4, _CODES_8 = CodeLayout(3, 4, GROUP, 320), CodeLayout(4, 8, GROUP, 576)
STORED_CODES: dict[StoredType, StoredCodes] = {
    "Q4_0": StoredCodes(0, 18, _CODES_4),
    "Q4_1": StoredCodes(1, 20, _CODES_4),
    "Q8_0": StoredCodes(2, 34, _CODES_8),
    "Q4_K": StoredCodes(3, 144, CodeLayout(5, 4, 8 * GROUP, 2368)),
    "Q5_K": StoredCodes(4, 176, CodeLayout(6, 5, 8 * GROUP, 2880)),
    "Q6_K": StoredCodes(5, 210, CodeLayout(7, 6, 8 * GROUP, 3392)),
}


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """A matrix [N, K] as a GGUF file holds it."""

    type: StoredType
    rows: Tensor  # [N, bytes of K values] uint8

    @property
    def stored(self) -> StoredCodes:
        return STORED_CODES[self.type]

    @property
    def in_features(self) -> int:
        return self.rows.shape[1] // self.stored.block_bytes * self.stored.layout.values

    @property
    def kind(self) -> tuple[object, ...]:
        """Matrices of the same kind can be one weight."""
        return (QuantisedRows, self.stored.layout)

    def take(self, rows: slice) -> QuantisedRows:
        return QuantisedRows(self.type, self.rows[rows])

    def take_columns(self, columns: slice) -> QuantisedRows | None:
        """None: these begin or end within a block."""
        values, num_bytes = self.stored.layout.values, self.stored.block_bytes
        if columns.start % values or columns.stop % values:
            return None
        first, last = (bound // values * num_bytes for bound in (columns.start, columns.stop))
        return QuantisedRows(self.type, self.rows[:, first:last].contiguous())


def multiplies_tiles() -> bool:
    """Whether the chip has matrix units, which then multiply bfloat16 weights and x rounded to bfloat16."""
    return _C.isa() == "amx"


def multiplies_integers(matmul: Literal["auto", "exact", "fast"]) -> bool:
    """Whether codes are multiplied as integers: auto, where the chip multiplies and adds these in one instruction."""
    return matmul == "fast" or (matmul == "auto" and _C.dot_is_fused())


def dot() -> str:
    """The kind of integer dot products in use, as csrc/core/dot.h names them."""
    return _C.dot()


def storage_of(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    codes: CodeLayout | None = None,
    *,
    tiles: bool = False,
    count: int = 1,
) -> Tensor:
    """Memory [count, …] of so many packed weights [N, K]."""
    num_panels = -(-out_features // PANEL_WIDTH)
    if tiles:
        assert dtype is torch.bfloat16 and codes is None, (dtype, codes)
        num_strips, num_k_tiles = -(-out_features // STRIP_WIDTH), -(-in_features // TILE_DEPTH)
        return torch.empty(count, num_strips, num_k_tiles, 2, PANEL_WIDTH, PANEL_WIDTH, 2, dtype=dtype)
    if codes is None:
        return torch.empty(count, num_panels, in_features, PANEL_WIDTH, dtype=dtype)
    assert dtype is torch.float32 and in_features % codes.values == 0, (dtype, in_features)
    return torch.empty(count, num_panels, in_features // codes.values, codes.panel_bytes, dtype=torch.uint8)


def advise_large_pages(tensor: Tensor) -> None:
    """Asks the system for large pages where nothing of the tensor has been written yet."""
    _C.advise_large_pages(tensor.data_ptr(), tensor.nbytes)


class PackedWeight:
    """A weight [N, K] in the layout of the matrix kernel: panels of 16 rows, [ceil(N / 16), …], zero padded.

    A panel is [K, 16] of `dtype`; with `codes` it is blocks of these, whose values are float32.
    `fast` multiplies codes as integers, else they are multiplied as these values.
    With `tiles`, for matrix units, it is strips of 32 rows, [ceil(N / 32), ceil(K / 32), 2, 16, 16, 2] bfloat16.
    """

    __slots__ = ("_address", "_matrix", "_storage", "codes", "dtype", "fast", "in_features", "out_features", "tiles")

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        codes: CodeLayout | None = None,
        tiles: bool = False,
        storage: Tensor | None = None,
        *,
        fast: bool = False,
    ) -> None:
        """`storage` is its memory, if somebody has made that with others' (`storage_of`)."""
        assert out_features >= 1 and in_features >= 1 and dtype in _DTYPE_CODES, (out_features, in_features, dtype)
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        self.codes = codes
        self.fast = fast
        self.tiles = tiles
        if storage is None:
            (storage,) = storage_of(out_features, in_features, dtype, codes, tiles=tiles)
            advise_large_pages(storage)
        self._storage = storage
        self._address = storage.data_ptr()
        self._matrix = _C.PackedMatrix(self._address, self.number, out_features, in_features)
        self._storage[-1].zero_()
        if tiles and in_features % TILE_DEPTH:
            self._storage[:, -1].zero_()

    @property
    def number(self) -> int:
        """Of the format, in csrc/ops/cpu/linear.h."""
        if self.codes is not None:
            return self.codes.number + (_FAST if self.fast else 0)
        assert not self.fast, "numbers are multiplied as they are"
        return _TILES if self.tiles else _DTYPE_CODES[self.dtype]

    @property
    def can_gate(self) -> bool:
        """Whether `gated_linear` takes it."""
        if self.tiles:
            return self.out_features % (2 * STRIP_WIDTH) == 0
        return self.codes is not None and self.out_features % (2 * PANEL_WIDTH) == 0

    @property
    def can_activate(self) -> bool:
        """Whether `activated_linear` takes it."""
        return self.tiles

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    def __repr__(self) -> str:
        stored = str(self.dtype) if self.codes is None else f"codes of {self.codes.bits} bits"
        stored += " in tiles" if self.tiles else ""
        return f"PackedWeight([{self.out_features}, {self.in_features}], {stored})"


def pack_weight(weight: Tensor, dtype: torch.dtype, tiles: bool | None = None) -> PackedWeight:
    """weight [N, K], float32, bfloat16 or float16, as a checkpoint holds it."""
    return pack_weights([weight], dtype, tiles)


def pack_weights(weights: Sequence[Tensor], dtype: torch.dtype, tiles: bool | None = None) -> PackedWeight:
    """Weights [Ni, K] stacked along N (fused query, key and value; gate and up), without a copy that joins them.

    bfloat16 is packed into tiles where the chip multiplies these, unless `tiles` says otherwise."""
    in_features = weights[0].shape[1]
    if tiles is None:
        tiles = dtype is torch.bfloat16 and multiplies_tiles()
    packed = PackedWeight(sum(w.shape[0] for w in weights), in_features, dtype, tiles=tiles)
    pack_into(packed, weights)
    return packed


def pack_into(packed: PackedWeight, weights: Sequence[Tensor]) -> None:
    """Weights [Ni, K] that make up all rows of a packed one."""
    in_features, first_row = packed.in_features, 0
    for weight in weights:
        assert weight.dim() == 2 and weight.shape[1] == in_features and weight.is_cpu, weight.shape
        assert weight.dtype in (torch.float32, torch.bfloat16, torch.float16), weight.dtype
        rows = weight.shape[0]
        dense = (weight.float() if weight.dtype is torch.float16 else weight).contiguous()
        packed._matrix.pack(dense.data_ptr(), _DTYPE_CODES[dense.dtype], first_row, rows)
        first_row += rows
    assert first_row == packed.out_features, (first_row, packed)


def pack_quantised(weights: Sequence[QuantisedRows], *, fast: bool = False) -> PackedWeight:
    """Weights [Ni, K] of the same layout stacked along N, kept in these codes: they are the float32 values exactly."""
    in_features, codes = weights[0].in_features, weights[0].stored.layout
    num_rows = sum(weight.rows.shape[0] for weight in weights)
    packed = PackedWeight(num_rows, in_features, torch.float32, codes, fast=fast)
    pack_quantised_into(packed, weights)
    return packed


def pack_quantised_into(packed: PackedWeight, weights: Sequence[QuantisedRows]) -> None:
    """Weights [Ni, K] that make up all rows of a packed one."""
    first_row = 0
    for weight in weights:
        assert weight.stored.layout == packed.codes and weight.in_features == packed.in_features, weight
        assert weight.rows.dtype is torch.uint8 and weight.rows.is_cpu, weight.rows.dtype
        dense = weight.rows.contiguous()
        num_rows = dense.shape[0]
        packed._matrix.pack_quantised(dense.data_ptr(), weight.stored.number, first_row, num_rows)
        first_row += num_rows
    assert first_row == packed.out_features, (first_row, packed)
