"""Reads a GGUF file: metadata, the table of tensors, and tensors one by one as float32.

The file is mapped, not read: opening costs the metadata alone (a vocabulary of 50,000 strings: tens of milliseconds),
a tensor costs its own pages when it is loaded. Every length in the file is checked against the bytes that are there
before it is believed, so a truncated or corrupt file ends in a ModelError that says what is wrong.

Layout: "GGUF", version, tensor count, pair count; the pairs; the tensor infos; padding; the tensors' bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from bequest.engine.errors import ModelError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)  # version 1 has 32-bit lengths and left the field in 2023
DEFAULT_ALIGNMENT = 32
MAX_TENSOR_DIMS = 8

SCALAR_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}

Bytes = npt.NDArray[np.uint8]
E = TypeVar("E")


class _Malformed(Exception):
    """Something in the file contradicts its size or the format; the message names it."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the file. `shape` is in torch's order: the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: Bytes  # the tensor's bytes in the mapped file

    def packed(self) -> Bytes:
        """The bytes as stored, [*shape[:-1], bytes per row]; a read-only view of the file."""
        values_per_block, bytes_per_block = GGML_QUANT_SIZES[self.type]
        return self.data.reshape(*self.shape[:-1], self.shape[-1] // values_per_block * bytes_per_block)

    def load(self) -> npt.NDArray[np.float32]:
        """The values, dequantised, in memory of their own; [*shape].

        What is not finite in the file is not finite here either. NumPy would warn of it, of some on one chip and of
        others on another: a signalling NaN in a cast, an infinite scale times a code of zero.
        """
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                values: npt.NDArray[np.float32] = dequantize(self.packed(), self.type)
        except NotImplementedError as error:
            raise ModelError(f"tensor {self.name}: type {self.type.name} cannot be dequantised") from error
        # Unquantised values come back as a read-only view of the file.
        return values if values.flags.writeable else values.copy()


class GGUFFile:
    """An open GGUF file. `metadata` holds scalars, strings, lists of strings, and numpy arrays of numbers."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        data = _map_file(self.path)
        try:
            self.metadata, self.tensors = _read_header(data)
        except _Malformed as error:
            raise ModelError(f"{self.path}: {error}") from error
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelError(f"{self.path}: the metadata has no general.architecture")
        self.architecture = architecture


def _map_file(path: Path) -> Bytes:
    try:
        if path.stat().st_size == 0:
            raise ModelError(f"{path}: the file is empty")
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


class _Cursor:
    """Takes values off the front of the mapped file; never reads past its end."""

    def __init__(self, data: Bytes) -> None:
        self.buffer = data.data
        self.offset = 0

    def take(self, size: int, what: str) -> memoryview:
        end = self.offset + size
        if end > len(self.buffer):
            raise _Malformed(
                f"truncated or corrupt: {what} needs {size} bytes at offset {self.offset}, "
                f"the file has {len(self.buffer)} in all"
            )
        taken = self.buffer[self.offset : end]
        self.offset = end
        return taken

    def scalar(self, format: str, what: str) -> Any:
        return struct.unpack(format, self.take(struct.calcsize(format), what))[0]

    def string(self, what: str) -> str:
        size = self.scalar("<Q", what)
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError as error:
            raise _Malformed(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings. Tokens and merges are most of a file's metadata, so this loop is written to be quick."""
        buffer, offset, end = self.buffer, self.offset, len(self.buffer)
        unpack_size = struct.Struct("<Q").unpack_from
        values: list[str] = []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + unpack_size(buffer, offset)[0]
                if offset > end:
                    raise _Malformed(
                        f"truncated or corrupt: entry {len(values)} of {what} ends past the file's {end} bytes"
                    )
                values.append(str(buffer[start:offset], "utf-8"))
        except struct.error as error:
            raise _Malformed(
                f"truncated: {what} has {count} entries, the file ends after {len(values)} of them"
            ) from error
        except UnicodeDecodeError as error:
            raise _Malformed(f"entry {len(values)} of {what} is not UTF-8") from error
        self.offset = offset
        return values


def _read_header(data: Bytes) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    cursor = _Cursor(data)
    if bytes(cursor.take(min(4, len(data)), "the magic number")) != MAGIC:
        raise _Malformed("not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.scalar("<I", "the version")
    if version not in SUPPORTED_VERSIONS:
        raise _Malformed(f"GGUF version {version} (or a big-endian file); little-endian versions 2 and 3 are supported")
    num_tensors = cursor.scalar("<Q", "the number of tensors")
    num_pairs = cursor.scalar("<Q", "the number of metadata pairs")

    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string(f"the key of metadata pair {len(metadata)}")
        if key in metadata:
            raise _Malformed(f"metadata key {key!r} appears twice")
        metadata[key] = _read_value(cursor, cursor.scalar("<I", f"the type of {key}"), key)
    return metadata, _read_tensors(cursor, data, num_tensors, metadata.get("general.alignment", DEFAULT_ALIGNMENT))


def _read_value(cursor: _Cursor, type_id: int, what: str) -> Any:
    value_type = _known(GGUFValueType, type_id, f"value type of {what}")
    if value_type == GGUFValueType.STRING:
        return cursor.string(what)
    if value_type == GGUFValueType.ARRAY:
        return _read_array(cursor, what)
    return cursor.scalar(SCALAR_FORMATS[value_type], what)


def _read_array(cursor: _Cursor, what: str) -> Any:
    item_type = _known(GGUFValueType, cursor.scalar("<I", what), f"item type of {what}")
    count = cursor.scalar("<Q", what)
    if item_type == GGUFValueType.STRING:
        return cursor.strings(count, what)
    if item_type == GGUFValueType.ARRAY:
        raise _Malformed(f"{what} is an array of arrays, which no known model uses")
    dtype = np.dtype(SCALAR_FORMATS[item_type])
    return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype=dtype).copy()


def _read_tensors(cursor: _Cursor, data: Bytes, count: int, alignment: Any) -> dict[str, GGUFTensor]:
    if not isinstance(alignment, int) or alignment < 1:
        raise _Malformed(f"general.alignment is {alignment!r}, not a positive number")
    infos: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
    for index in range(count):
        name = cursor.string(f"the name of tensor {index}")
        if name in infos:
            raise _Malformed(f"tensor {name} appears twice")
        infos[name] = _read_tensor_info(cursor, f"tensor {name}")
    # The tensors' offsets count from here.
    base = math.ceil(cursor.offset / alignment) * alignment

    tensors: dict[str, GGUFTensor] = {}
    for name, (shape, tensor_type, offset) in infos.items():
        values_per_block, bytes_per_block = GGML_QUANT_SIZES[tensor_type]
        if shape[-1] % values_per_block:
            raise _Malformed(
                f"tensor {name}: rows of {shape[-1]} values do not divide into blocks of {values_per_block}, "
                f"as type {tensor_type.name} has them"
            )
        start = base + offset
        end = start + math.prod(shape) // values_per_block * bytes_per_block
        if end > len(data):
            raise _Malformed(f"truncated: tensor {name} ends at byte {end}, the file has {len(data)}")
        tensors[name] = GGUFTensor(name, shape, tensor_type, data[start:end])
    return tensors


def _read_tensor_info(cursor: _Cursor, what: str) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
    num_dims = cursor.scalar("<I", what)
    if not 1 <= num_dims <= MAX_TENSOR_DIMS:
        raise _Malformed(f"{what} has {num_dims} dimensions")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, what))
    tensor_type = _known(GGMLQuantizationType, cursor.scalar("<I", what), f"type of {what}")
    return dims[::-1], tensor_type, cursor.scalar("<Q", what)


def _known(kind: Callable[[int], E], value: int, what: str) -> E:
    try:
        return kind(value)
    except ValueError as error:
        raise _Malformed(f"unknown {what}: {value}") from error
