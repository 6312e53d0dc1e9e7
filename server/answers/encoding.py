"""Hidden states → bytes of an answer: JSON with numbers or base64 in it, or a safetensors file.

Everything here yields a body piece by piece and makes each piece when it is asked for, so that it can be made in a
worker thread while the one before is sent, and a large answer is never in memory a second time. No piece holds the
interpreter for longer than a millisecond or so, and none is made by a loop over numbers.

Dims as in engine/types/hidden.py. Machines that this runs on are little-endian, as the formats are.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import orjson

from bequest.engine.types.hidden import Indices, StatesDType
from bequest.engine.types.states import ITEM_BYTES, StatesArray, as_float32
from bequest.server.transport.pieces import Piece

# Where numbers go in a JSON text. JSON has no such byte, not even inside of strings, where it is escaped.
_GAP = b"\0"
GAP = orjson.Fragment(_GAP)

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_BASE64_STEP = 3 << 18  # bytes; of whole groups of three, so that the texts of steps can be put together
_FLOAT_STEP = 1 << 14  # numbers
_SAFETENSORS_DTYPES: dict[StatesDType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class States(Protocol):
    """What an answer is made of: engine.hidden_values.ChoiceStates, or what was made of one."""

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def positions(self) -> Indices: ...

    @property
    def dtype(self) -> StatesDType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def assemble(self) -> StatesArray: ...


@dataclass(frozen=True, slots=True)
class Assembled:
    """States whose array is made already."""

    layers: tuple[int, ...]
    positions: Indices
    dtype: StatesDType
    values: StatesArray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        return int(self.values.nbytes)

    def assemble(self) -> StatesArray:
        return self.values


# --- JSON --------------------------------------------------------------------------------------------------------


def states_object(states: States, index: int) -> dict[str, Any]:
    """The object of one choice or input, with a gap for its numbers."""
    return {
        "object": "hidden_states",
        "index": index,
        "layers": states.layers,
        "positions": states.positions,
        "shape": states.shape,
        "dtype": states.dtype,
        "data": GAP,
    }


class JsonBody:
    """The JSON of a value with gaps; the i-th gap is filled with the numbers of the i-th states."""

    def __init__(self, value: Any, fillings: Sequence[States], encoding: Literal["float", "base64"]) -> None:
        self._texts = orjson.dumps(value, option=_NUMPY).split(_GAP)
        self._fillings = fillings
        self._encoding = encoding

    @property
    def size(self) -> int | None:
        if self._encoding == "float":
            return None  # a number is as long as it is
        return sum(map(len, self._texts)) + sum(2 + (states.num_bytes + 2) // 3 * 4 for states in self._fillings)

    def pieces(self) -> Iterator[Piece]:
        encode = base64_pieces if self._encoding == "base64" else float_pieces
        first, *others = self._texts
        yield first
        for states, text in zip(self._fillings, others, strict=True):
            yield from encode(states)
            yield text


def base64_pieces(states: States) -> Iterator[Piece]:
    data = _bytes_of(states.assemble())
    yield b'"'
    for start in range(0, len(data), _BASE64_STEP):
        yield binascii.b2a_base64(data[start : start + _BASE64_STEP], newline=False)
    yield b'"'


def float_pieces(states: States) -> Iterator[Piece]:
    """Nested lists. What is not finite is null."""
    yield from _lists(as_float32(states.assemble(), states.dtype))


def _lists(values: StatesArray) -> Iterator[Piece]:
    if values.ndim == 1 or values.size <= _FLOAT_STEP:
        yield orjson.dumps(values, option=_NUMPY)
        return
    step = _FLOAT_STEP // values[0].size
    yield b"["
    for start in range(0, len(values), max(1, step)):
        if start:
            yield b","
        if step > 1:
            yield orjson.dumps(values[start : start + step], option=_NUMPY)[1:-1]
        else:
            yield from _lists(values[start])
    yield b"]"


# --- safetensors -------------------------------------------------------------------------------------------------


def safetensors_header(answers: Sequence[States], metadata: dict[str, str]) -> bytes:
    """The length and the header of a file with the tensors `<index>.positions` and `<index>.layer.<l>`.

    Positions come first: behind a header of whole words everything is then aligned to its own size.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for index, states in enumerate(answers):
        begin, end = end, end + 8 * len(states.positions)
        shape = [len(states.positions)]
        header[f"{index}.positions"] = {"dtype": "I64", "shape": shape, "data_offsets": [begin, end]}
    for index, states in enumerate(answers):
        _, *shape = states.shape
        num_bytes = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[states.dtype]
        for layer in states.layers:
            begin, end = end, end + num_bytes
            dtype = _SAFETENSORS_DTYPES[states.dtype]
            header[f"{index}.layer.{layer}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class SafetensorsBody:
    def __init__(self, answers: Sequence[States], metadata: dict[str, str]) -> None:
        self._answers = answers
        self._header = safetensors_header(answers, metadata)

    @property
    def size(self) -> int:
        return len(self._header) + sum(8 * len(states.positions) + states.num_bytes for states in self._answers)

    def pieces(self) -> Iterator[Piece]:
        """The layers of an array [K, P, H] lie one after another, as the header has them: it is sent as it is."""
        yield self._header
        for states in self._answers:
            yield _bytes_of(np.ascontiguousarray(states.positions, np.int64))
        for states in self._answers:
            yield _bytes_of(states.assemble())


# --- both --------------------------------------------------------------------------------------------------------


def _bytes_of(values: StatesArray) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
