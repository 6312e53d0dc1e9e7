"""Hidden states on their way out: rows as steps bring them, and the array that an answer is made of. No torch.

bfloat16 is carried as its bits (uint16), since numpy has no such type. Dims as in engine/types/hidden.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bequest.engine.types.hidden import Indices, Pooling, StatesDType

StatesArray: TypeAlias = npt.NDArray[Any]  # float32, float16, or uint16: the bits of bfloat16

ITEM_BYTES: dict[StatesDType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StatesPart:
    """Rows as a step brought them."""

    positions: Indices  # [R], ascending
    values: StatesArray  # [R, tapped layers, H]


@dataclass(slots=True)
class ChoiceStates:
    """The states of one choice of an answer: parts as they came, until they are put together."""

    index: int
    layers: tuple[int, ...]  # [K] as asked for
    positions: Indices  # [P] as asked for, from the beginning of the sequence
    pooling: Pooling
    dtype: StatesDType
    hidden_size: int
    tapped_layers: tuple[int, ...]  # of the parts, ascending
    tapped_dtype: StatesDType  # of the parts
    parts: tuple[StatesPart, ...]
    _assembled: StatesArray | None = field(default=None, init=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """[K, P, H], pooled [K, H]"""
        if self.pooling != "none":
            return (len(self.layers), self.hidden_size)
        return (len(self.layers), len(self.positions), self.hidden_size)

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]

    def assemble(self) -> StatesArray:
        """The values in `shape` and `dtype`, in C order. They take the place of the parts.

        The first call is a pass over all the numbers, without the GIL: where they are many it belongs into a thread.
        """
        if self._assembled is None:
            self._assembled = self._assemble()
            self.parts = ()
        return self._assembled

    def _assemble(self) -> StatesArray:
        values = self._gather()  # [K, P, H]
        if self.pooling == "mean":
            with np.errstate(over="ignore", invalid="ignore"):  # a mean of infinities is what it is
                values = as_float32(values, self.tapped_dtype).mean(axis=1, dtype=np.float64).astype(np.float32)
            return convert(values, "float32", self.dtype)
        if self.pooling == "last":
            values = np.ascontiguousarray(values[:, -1])
        return convert(values, self.tapped_dtype, self.dtype)

    def _gather(self) -> StatesArray:
        columns = [self.tapped_layers.index(layer) for layer in self.layers]
        shape = (len(columns), len(self.positions), self.hidden_size)
        if len(self.parts) == 1 and columns == [*range(len(self.tapped_layers))]:
            values = self.parts[0].values.transpose(1, 0, 2)
            if values.flags.c_contiguous and np.array_equal(self.parts[0].positions, self.positions):
                return values
        values = np.empty(shape, np.float32 if self.tapped_dtype == "float32" else np.uint16)
        for part in self.parts:
            found = np.searchsorted(part.positions, self.positions)
            found[found == len(part.positions)] = 0
            to = np.flatnonzero(part.positions[found] == self.positions)
            if not len(to):
                continue
            rows, source = _as_slice(to), _as_slice(found[to])
            for k, column in enumerate(columns):
                values[k, rows] = part.values[source, column]
        return values


@dataclass(slots=True)
class ExtractedStates:
    """What a request gets with its last Delta. Its memory is counted until it is released or gone."""

    choices: tuple[ChoiceStates, ...]  # in index order
    computed_tokens: int  # of forward that only the states needed; of an extraction all
    on_release: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """The answer is written, or nobody wants it any more. Idempotent; on the event-loop thread."""
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()

    def __del__(self) -> None:
        self.release()


def convert(values: StatesArray, source: StatesDType, target: StatesDType) -> StatesArray:
    """From one dtype to another, rounding to the nearest, ties to even."""
    if source == target:
        return values
    numbers = as_float32(values, source)
    if target == "float32":
        return numbers
    if target == "float16":
        # Beyond its range is infinite, as everywhere; some chips call the cast of a signalling NaN invalid.
        with np.errstate(over="ignore", invalid="ignore"):
            return numbers.astype(np.float16)
    bits = numbers.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded.astype(np.uint16))


def as_float32(values: StatesArray, dtype: StatesDType) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _as_slice(indices: Indices) -> slice | Indices:
    """Consecutive indices as a slice, which is copied without a look at each."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices) and (np.diff(indices) == 1).all():
        return slice(first, last + 1)
    return indices
