"""How the tools store a matrix: which tensors hold its codes and scales, and what these make together.

A matrix [N, K] that a module multiplies with is `stem.weight` for those who read a checkpoint. Of these layouts

    scaled    weight [N, K] float8 or int8, with weight_scale or weight_scale_inv: one, [N, 1], by group or by block
    packed    weight_packed [N, bits K / 32] int32 along K, weight_scale [N, G]    (compressed-tensors)
    awq       qweight [K, N / 8] int32 along N in an order of its own, qzeros, scales [G, N]
    gptq      qweight [bits K / 32, N] int32 along K, qzeros, scales [G, N], g_idx [K]: the group of each column
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.layers.codes import Float8Rows, IntegerRows
from bequest.engine.models.quantised.bits import unpacked
from bequest.engine.models.quantised.described import LayoutName, Quantisation
from bequest.engine.models.safetensors_loader import SafetensorsSource

_FLOATS = frozenset({"F32", "F16", "BF16"})
_WORDS = frozenset({"I32"})
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word the codes of eight neighbours lie


class Stored:
    """The tensors of one matrix in the files."""

    def __init__(self, files: SafetensorsSource, stem: str) -> None:
        self._files, self._stem = files, stem

    def has(self, part: str) -> bool:
        return self._name(part) in self._files.names()

    def shape(self, part: str) -> tuple[int, ...]:
        return self._files.shape(self._present(part))

    def load(self, part: str) -> Tensor:
        return self._files.load(self._present(part))

    def scales(self, part: str) -> Tensor:
        """Float32, all of them numbers."""
        scales = self.load(part).float()
        if not scales.isfinite().all():
            raise self.wrong(part, "has scales that are no numbers")
        return scales

    def wrong(self, part: str, what: str) -> ModelError:
        return ModelError(f"{self._files.description}: {self._name(part)} {what}")

    def expect(self, part: str, *shape: int) -> None:
        if (found := self.shape(part)) != shape:
            raise self.wrong(part, f"has shape {list(found)}, not {list(shape)}")

    def group(self, part: str, size: int, count: int, described: frozenset[int]) -> int:
        """The length of `count` groups of `size` values. The last one may be shorter if the length is described."""
        if count == 1:
            return size
        found = (length for length in sorted(described) if -(-size // length) == count)
        length = next(found, size // max(count, 1))
        if length == 0 or -(-size // length) != count:
            raise self.wrong(part, f"has {count} groups, which {size} values do not make")
        return length

    def _name(self, part: str) -> str:
        return f"{self._stem}.{part}"

    def _present(self, part: str) -> str:
        if not self.has(part):
            raise self.wrong(part, "is missing")
        return self._name(part)


class IntegerParts:
    """Of IntegerRows, whose groups are still to be found."""

    def __init__(self, bits: int, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        self.bits, self.codes, self.scales, self.zeros = bits, codes, scales, zeros


class Layout(ABC):
    codes: ClassVar[str]  # the part that has the codes
    kinds: ClassVar[Mapping[str, frozenset[str]]]  # of each part: what its numbers may be in a file

    def __init__(self, quantisation: Quantisation) -> None:
        self._quantisation = quantisation

    @abstractmethod
    def shape(self, stored: Stored) -> tuple[int, int]:
        """[N, K], of the headers alone. Raises ModelError where they do not fit each other."""

    @abstractmethod
    def read(self, stored: Stored) -> Float8Rows | IntegerRows: ...

    def _grouped(self, stored: Stored, part: str, parts: IntegerParts, order: Tensor | None) -> IntegerRows:
        """`order`: the group of each column; it is left out where groups are neighbours. An error names `part`."""
        depth, count = parts.codes.shape[1], parts.scales.shape[1]
        if parts.zeros.shape != parts.scales.shape:
            shapes = f"{list(parts.zeros.shape)} for scales {list(parts.scales.shape)}"
            raise stored.wrong(part, f"goes with zero points {shapes}")
        group = stored.group(part, depth, count, self._quantisation.columns)
        if order is not None:
            if order.shape != (depth,) or int(order.min()) < 0 or int(order.max()) >= count:
                raise stored.wrong(part, f"is not the groups, 0 to {count - 1}, of {depth} columns")
            if torch.equal(order, torch.arange(depth) // group):
                order = None
        return IntegerRows(parts.bits, parts.codes, parts.scales.contiguous(), parts.zeros.contiguous(), group, order)


class Scaled(Layout):
    codes = "weight"
    kinds: ClassVar = {
        "weight": frozenset({"F8_E4M3", "I8"}),
        "weight_scale": _FLOATS | {"F8_E8M0"},
        "weight_scale_inv": _FLOATS | {"F8_E8M0"},
        "weight_zero_point": frozenset({"I8"}),
        "input_scale": _FLOATS,
        "activation_scale": _FLOATS,  # as transformers calls it
        "input_zero_point": frozenset({"I8"}),
    }

    def shape(self, stored: Stored) -> tuple[int, int]:
        rows, depth = _matrix(stored, "weight")
        self._blocks(stored, rows, depth)
        return rows, depth

    def read(self, stored: Stored) -> Float8Rows | IntegerRows:
        codes = stored.load("weight")
        rows, depth = codes.shape
        part, (block_rows, group) = self._part(stored), self._blocks(stored, rows, depth)
        counts = (-(-rows // block_rows), -(-depth // group))
        scales = stored.scales(part).reshape(counts).repeat_interleave(block_rows, 0)[:rows]
        if codes.dtype is not torch.int8:
            return Float8Rows(codes, scales, group)
        zeros = torch.full(counts, 0, dtype=torch.int16)
        if stored.has("weight_zero_point"):
            zeros = stored.load("weight_zero_point").to(torch.int16)
            if zeros.numel() != counts[0] * counts[1]:
                raise stored.wrong("weight_zero_point", f"has shape {list(zeros.shape)}, not {list(counts)}")
            zeros = zeros.reshape(counts)
        zeros = zeros.repeat_interleave(block_rows, 0)[:rows] + 128
        return IntegerRows(8, (codes.to(torch.int16) + 128).to(torch.uint8), scales, zeros, group)

    @staticmethod
    def _part(stored: Stored) -> str:
        return "weight_scale_inv" if stored.has("weight_scale_inv") else "weight_scale"

    def _blocks(self, stored: Stored, rows: int, depth: int) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        part = self._part(stored)
        match stored.shape(part):
            case () | (1,):
                down, across = 1, 1
            case (down,):
                across = 1
            case (down, across) | (down, 1, across, 1):
                pass
            case shape:
                raise stored.wrong(part, f"has shape {list(shape)}: not one scale, nor by row, group or block")
        known = self._quantisation
        return stored.group(part, rows, down, known.rows), stored.group(part, depth, across, known.columns)


class Packed(Layout):
    codes = "weight_packed"
    kinds: ClassVar = {
        "weight_packed": _WORDS,
        "weight_scale": _FLOATS,
        "weight_shape": frozenset({"I64", "I32"}),
        "weight_zero_point": _WORDS,
        "weight_g_idx": _WORDS,
        "input_scale": _FLOATS,
    }

    def shape(self, stored: Stored) -> tuple[int, int]:
        rows, depth = (int(size) for size in stored.load("weight_shape").tolist())
        if _matrix(stored, "weight_packed")[0] != rows or depth < 1:
            raise stored.wrong("weight_shape", f"is [{rows}, {depth}], which weight_packed does not fit")
        self._bits(stored, depth)
        return rows, depth

    def read(self, stored: Stored) -> IntegerRows:
        rows, depth = self.shape(stored)
        bits, scales = self._bits(stored, depth), stored.scales("weight_scale")
        count = scales.numel() // rows
        if count * rows != scales.numel() and scales.numel() != 1:
            raise stored.wrong("weight_scale", f"has shape {list(scales.shape)}, which {rows} rows do not divide")
        scales = scales.reshape(-1, max(count, 1)).expand(rows, max(count, 1))
        order = stored.load("weight_g_idx").long() if stored.has("weight_g_idx") else None
        zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int16)
        if stored.has("weight_zero_point"):
            zeros = unpacked(stored.load("weight_zero_point").T, bits, rows).T.to(torch.int16)
        codes = unpacked(stored.load("weight_packed"), bits, depth)
        part = "weight_scale" if order is None else "weight_g_idx"
        return self._grouped(stored, part, IntegerParts(bits, codes, scales, zeros), order)

    def _bits(self, stored: Stored, depth: int) -> int:
        """Those of the described ones that fill so many words. Short rows may fill as many with one bit less."""
        words, described = stored.shape("weight_packed")[1], sorted(self._quantisation.bits)
        found = [bits for bits in described if -(-depth * bits // 32) == words]
        if len(found) != 1:
            told = f"has {words} words in a row of {depth} values, of {' or '.join(map(str, described))} bits"
            raise stored.wrong("weight_packed", told)
        return found[0]


class Awq(Layout):
    codes = "qweight"
    kinds: ClassVar = {"qweight": _WORDS, "qzeros": _WORDS, "scales": _FLOATS}

    def shape(self, stored: Stored) -> tuple[int, int]:
        depth, words = _matrix(stored, "qweight")
        groups = _matrix(stored, "scales")[0]
        stored.expect("scales", groups, words * 8)
        stored.expect("qzeros", groups, words)
        return words * 8, depth

    def read(self, stored: Stored) -> IntegerRows:
        codes, zeros = (self._columns(stored.load(part)) for part in ("qweight", "qzeros"))
        scales = stored.scales("scales").T
        return self._grouped(stored, "scales", IntegerParts(4, codes, scales, zeros.to(torch.int16)), None)

    @staticmethod
    def _columns(words: Tensor) -> Tensor:
        """[R, N / 8] → [N, R]"""
        codes: Tensor = unpacked(words, 4, words.shape[1] * 8).unflatten(1, (-1, 8))
        return codes[..., _AWQ_PLACES].flatten(1).T.contiguous()


class Gptq(Layout):
    codes = "qweight"
    kinds: ClassVar = {"qweight": _WORDS, "qzeros": _WORDS, "scales": _FLOATS, "g_idx": _WORDS}

    def shape(self, stored: Stored) -> tuple[int, int]:
        words, rows = _matrix(stored, "qweight")
        bits, depth = self._bits(stored)
        groups = _matrix(stored, "scales")[0]
        stored.expect("scales", groups, rows)
        stored.expect("qzeros", groups, -(-rows * bits // 32))
        if words * 32 != bits * depth:
            raise stored.wrong("qweight", f"has {words} words for {depth} values of {bits} bits")
        return rows, depth

    def read(self, stored: Stored) -> IntegerRows:
        rows, depth = self.shape(stored)
        bits, _ = self._bits(stored)
        codes = unpacked(stored.load("qweight").T, bits, depth)
        zeros = unpacked(stored.load("qzeros"), bits, rows).T.to(torch.int16) + self._quantisation.zero_shift
        order = stored.load("g_idx").long() if stored.has("g_idx") else None
        parts = IntegerParts(bits, codes, stored.scales("scales").T, zeros)
        return self._grouped(stored, "g_idx" if stored.has("g_idx") else "scales", parts, order)

    def _bits(self, stored: Stored) -> tuple[int, int]:
        """Of a code, and K. A file with an index says itself how long its columns are."""
        words = stored.shape("qweight")[0]
        if not stored.has("g_idx"):
            (bits,) = self._quantisation.bits
            return bits, words * 32 // bits
        (depth,) = stored.shape("g_idx")
        return words * 32 // max(depth, 1), depth


def _matrix(stored: Stored, part: str) -> tuple[int, int]:
    shape = stored.shape(part)
    if len(shape) != 2:
        raise stored.wrong(part, f"has shape {list(shape)}, which is no matrix")
    return shape[0], shape[1]


LAYOUTS: Mapping[LayoutName, type[Layout]] = {"scaled": Scaled, "packed": Packed, "awq": Awq, "gptq": Gptq}
