"""Tensors of a file that torch.save wrote, read without running its pickle.

The file is a zip of one pickle and one member per storage. A pickle is a program; this reader knows only the
instructions that make strings, numbers, lists, dicts and tuples, and of functions only those by which torch describes
a tensor. Anything else is refused, so that a file can do nothing but say what it holds. Storages are mapped, not read.
"""

from __future__ import annotations

import io
import mmap
import pickletools
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bequest.engine.errors import ModelError

_DTYPES = {
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
}
_LARGEST_PICKLE = 64 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: signature, length of its name and of its extra field
_MARK = object()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is: elements of a storage."""

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """What a pickle names and never gets."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: torch.dtype


# What zipfile raises for a file that is none, is cut short, encrypted, or packed in a way that it does not know.
_NOT_A_ZIP = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError, NotImplementedError)


class TorchZip:
    """`content` is what was saved, with a StoredTensor for each tensor. May be read from several threads."""

    def __init__(self, source: Path | bytes, largest_pickle: int = _LARGEST_PICKLE) -> None:
        """`source`: a file, or what is in one."""
        self.path = path = source if isinstance(source, Path) else "The tensor"
        try:
            with zipfile.ZipFile(source if isinstance(source, Path) else io.BytesIO(source)) as archive:
                self._members = {info.filename: info for info in archive.infolist()}
                pickle = next((name for name in self._members if name.endswith("/data.pkl")), None)
                if pickle is None or self._members[pickle].file_size > largest_pickle:
                    raise ModelError(f"{path} is not a file of torch.save: it has no data.pkl of a sane size")
                program = archive.read(pickle)
            self._map = _mapped(source)
        except _NOT_A_ZIP as error:
            raise ModelError(f"{path} is not a file of torch.save (a zip), or is cut short: {error}") from error
        self._folder = pickle.removesuffix("data.pkl") + "data/"
        try:
            self.content = _Reader(str(path)).read(program)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise ModelError(f"{path}: its pickle cannot be read: {error!r}") from error

    def load(self, tensor: StoredTensor) -> Tensor:
        """A view of the file."""
        start, size = self._extent(tensor.storage)
        if len(tensor.shape) != len(tensor.stride):
            raise ModelError(f"{self.path}: a tensor of storage {tensor.storage} has a shape without strides")
        reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        if 0 in tensor.shape:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if min(tensor.offset, *tensor.stride, *tensor.shape, 0) < 0 or (
            (tensor.offset + reach) * tensor.dtype.itemsize > size
        ):
            raise ModelError(f"{self.path}: a tensor reaches beyond its storage {tensor.storage}")
        begin = start + tensor.offset * tensor.dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=reach, offset=begin)
        return flat.as_strided(tensor.shape, tensor.stride)

    def _extent(self, key: str) -> tuple[int, int]:
        """Where a storage begins in the file, and its bytes."""
        info = self._members.get(self._folder + key)
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise ModelError(f"{self.path}: storage {key} is missing, or is compressed")
        head = self._map[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
        if len(head) < _LOCAL_HEADER.size:
            raise ModelError(f"{self.path} is cut short")
        signature, name_len, extra_len = _LOCAL_HEADER.unpack(head)
        start = info.header_offset + _LOCAL_HEADER.size + name_len + extra_len
        if signature != b"PK\x03\x04" or start + info.file_size > len(self._map):
            raise ModelError(f"{self.path}: storage {key} is cut short")
        return start, info.file_size


def _mapped(source: Path | bytes) -> mmap.mmap | bytearray:
    """Private: torch wants memory that it may write to."""
    if isinstance(source, bytes):
        return bytearray(source)
    with source.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class _Reader:
    """Follows the instructions of a pickle that only describes data."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self, program: bytes) -> Any:
        argument: Any
        for opcode, argument, _ in pickletools.genops(program):
            match opcode.name:
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    return self._stack.pop()
                case "MARK":
                    self._stack.append(_MARK)
                case "BINPUT" | "LONG_BINPUT":
                    self._memo[argument] = self._stack[-1]
                case "MEMOIZE":
                    self._memo[len(self._memo)] = self._stack[-1]
                case "BINGET" | "LONG_BINGET":
                    self._stack.append(self._memo[argument])
                case name:
                    self._value(name, argument)
        raise ValueError("it has no end")

    def _value(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        match opcode:
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[opcode]())
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode[-1])
                items = tuple(stack[-count:])
                del stack[-count:]
                stack.append(items)
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = tuple(self._since_mark())
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                flat = self._since_mark() if opcode == "SETITEMS" else [stack.pop(-2), stack.pop()]
                stack[-1].update(zip(flat[::2], flat[1::2], strict=True))
            case _:
                self._object(opcode, argument)

    def _object(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        match opcode:
            case "GLOBAL":
                stack.append(_Name(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_Name(module, name))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(self._call(function, arguments))
            case "BUILD" if isinstance(stack[-2], dict):
                stack.pop()  # attributes of a state dict: its metadata
            case _:
                raise ModelError(f"{self._description}: its pickle does more than describe tensors ({opcode})")

    def _since_mark(self) -> list[Any]:
        place = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def _storage(self, reference: Any) -> _Storage:
        match reference:
            case ("storage", _Name("torch", kind), str(key), _, int()) if kind in _DTYPES:
                return _Storage(key, _DTYPES[kind])
        raise ModelError(f"{self._description}: its pickle has a storage of an unknown kind: {reference!r}")

    def _call(self, function: Any, arguments: Any) -> Any:
        match function, arguments:
            case _Name("collections", "OrderedDict"), ():
                return {}
            case _Name("torch._utils", "_rebuild_tensor_v2"), (_Storage(key, dtype), int(offset), shape, stride, *_):
                return StoredTensor(key, dtype, offset, tuple(map(int, shape)), tuple(map(int, stride)))
            case _Name("torch._utils", "_rebuild_parameter"), (StoredTensor() as tensor, *_):
                return tensor
        shown = f"{function.module}.{function.name}" if isinstance(function, _Name) else repr(function)
        raise ModelError(f"{self._description}: its pickle calls {shown}, which this reader never does")
