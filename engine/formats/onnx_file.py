"""What an ONNX file holds: its stored tensors, and which node reads each. The graph itself is never run.

The file is one protocol buffer. Of its messages only what is named below is read; fields follow onnx.proto3. The file
is mapped; a tensor is a view of it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bequest.engine.errors import ModelError

Array = npt.NDArray[Any]

# TensorProto.DataType
_DTYPES = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 10: np.float16, 11: np.float64}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_INPUT, _NODE_OUTPUT, _NODE_OP = 1, 2, 4
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_FLOATS, _TENSOR_INTS, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 4, 5, 8, 9
_TENSOR_LOCATION = 14  # 1: in another file


@dataclass(frozen=True, slots=True)
class Node:
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class OnnxFile:
    """The tensors by name, and the nodes in the file's order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Array] = {}
        self.nodes: list[Node] = []
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            data = memoryview(self._map)
            for number, graph in _fields(data):
                if number == _MODEL_GRAPH:
                    self._read_graph(_message(graph))
        except (OSError, IndexError, ValueError) as error:
            raise ModelError(f"{path} is not an ONNX file, or is cut short: {error}") from error
        if not self.tensors:
            raise ModelError(f"{path} is not an ONNX file, or holds no tensors")

    def _read_graph(self, graph: memoryview) -> None:
        for number, value in _fields(graph):
            if number == _GRAPH_NODE:
                self.nodes.append(_node(_message(value)))
            elif number == _GRAPH_INITIALIZER:
                name, tensor = _tensor(_message(value))
                self.tensors[name] = tensor


def _node(data: memoryview) -> Node:
    inputs, outputs, op = [], [], ""
    for number, value in _fields(data):
        if number == _NODE_INPUT:
            inputs.append(_text(value))
        elif number == _NODE_OUTPUT:
            outputs.append(_text(value))
        elif number == _NODE_OP:
            op = _text(value)
    return Node(op, tuple(inputs), tuple(outputs))


def _tensor(data: memoryview) -> tuple[str, Array]:
    dims: list[int] = []
    name, kind, raw, location = "", 0, None, 0
    listed: list[Array] = []
    for number, value in _fields(data):
        if number == _TENSOR_DIMS:
            dims += [value] if isinstance(value, int) else _varints(value)
        elif number == _TENSOR_TYPE and isinstance(value, int):
            kind = value
        elif number == _TENSOR_FLOATS:
            listed.append(np.frombuffer(_message(value), "<f4"))
        elif number == _TENSOR_INTS:
            listed.append(np.array([value] if isinstance(value, int) else _varints(value), np.int64))
        elif number == _TENSOR_NAME:
            name = _text(value)
        elif number == _TENSOR_RAW:
            raw = _message(value)
        elif number == _TENSOR_LOCATION and isinstance(value, int):
            location = value
    if location:
        raise ValueError(f"tensor {name} lies in another file")
    if kind not in _DTYPES:
        raise ValueError(f"tensor {name} has data type {kind}, which is not supported")
    dtype = _DTYPES[kind]
    if raw is not None:
        return name, np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(dims)
    values = np.concatenate(listed) if listed else np.zeros(0, dtype)
    return name, values.astype(dtype).reshape(dims)


# --- the wire format ---------------------------------------------------------------------------------------------


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field: an integer, or the bytes of anything longer."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, place = _varint(data, place)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field of wire type {kind}")
        if place + length > len(data):
            raise ValueError("a field reaches beyond the end")
        yield key >> 3, data[place : place + length]
        place += length


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")


def _varints(data: memoryview | int) -> list[int]:
    """A packed list. Negative integers are written as 64 bits of two's complement."""
    packed, values, place = _message(data), [], 0
    while place < len(packed):
        value, place = _varint(packed, place)
        values.append(value - (1 << 64) if value >> 63 else value)
    return values


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("an integer where bytes belong")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_message(value)).decode()
