"""A tensor that a request brings, as bytes → rows of numbers. What torch.save wrote, or a safetensors file of one
tensor; no pickle is run.

Nothing is made of what a file says of itself before that is known to be within bounds: a few bytes can describe a
tensor of terabytes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import orjson

from bequest.engine.errors import InvalidRequest, ModelError
from bequest.engine.types.image import GivenRows

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors files call them
_LARGEST_HEAD = 1 << 16  # bytes of what describes one tensor
_ZIP = b"PK\x03\x04"
_LENGTH_BYTES = 8
_SHOWN = 80  # characters of what a file says, in an error


def read_rows(data: bytes, hidden_size: int) -> GivenRows:
    """[rows, H] float32. A first dimension of one is left out. Raises InvalidRequest."""
    rows = _from_torch(data, hidden_size) if data.startswith(_ZIP) else _from_safetensors(data, hidden_size)
    if not np.isfinite(rows).all():
        raise _refused("it has numbers that are infinite, or none at all (NaN)")
    return rows


def _from_torch(data: bytes, hidden_size: int) -> GivenRows:
    import torch  # not before somebody needs it: the server is open first

    from bequest.engine.formats.torch_zip import StoredTensor, TorchZip

    try:
        file = TorchZip(data, _LARGEST_HEAD)
        tensor = file.content
        if not isinstance(tensor, StoredTensor):
            raise _refused(f"it must be one tensor, not {type(tensor).__name__}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        num_rows = _num_rows(tensor.shape, dtype, hidden_size)
        # A few stored numbers may stand for many, by strides.
        if num_rows * hidden_size * tensor.dtype.itemsize > len(data):
            raise _refused(f"its shape {list(tensor.shape)} needs more bytes than it has")
        values = file.load(tensor).reshape(num_rows, hidden_size)
    except ModelError as error:
        raise _refused(str(error).rstrip(".")) from None
    return values.to(torch.float32).contiguous().numpy()


def _from_safetensors(data: bytes, hidden_size: int) -> GivenRows:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if not 2 <= length <= min(_LARGEST_HEAD, len(data) - _LENGTH_BYTES):
        raise _refused("it is neither what torch.save writes nor a safetensors file")
    content = memoryview(data)[_LENGTH_BYTES + length :]
    try:
        head = orjson.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        [tensor] = [value for name, value in head.items() if name != "__metadata__"]
        kind, shape, (begin, end) = tensor["dtype"], tuple(tensor["shape"]), tensor["data_offsets"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _refused("it must be a safetensors file with one tensor") from None
    dtype = _DTYPES.get(kind, kind) if isinstance(kind, str) else repr(kind)
    if not all(isinstance(size, int) for size in (*shape, begin, end)):
        raise _refused("its header has sizes that are no numbers")
    num_rows = _num_rows(shape, dtype, hidden_size)
    values: npt.NDArray[np.generic]
    if begin != 0 or end != len(content) or end != num_rows * hidden_size * (4 if dtype == "float32" else 2):
        raise _refused(f"its shape {list(shape)} is not that of its {len(content)} bytes")
    if dtype == "bfloat16":
        values = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(content, "<f4" if dtype == "float32" else "<f2")
    return values.reshape(num_rows, hidden_size).astype(np.float32)


def _num_rows(shape: tuple[int, ...], dtype: str, hidden_size: int) -> int:
    """Where it can be rows of the model at all."""
    if dtype not in _DTYPES.values():
        raise _refused(f"its dtype must be {', '.join(_DTYPES.values())}, not {dtype[:_SHOWN]}")
    rows = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if len(rows) != 2 or rows[1] != hidden_size or rows[0] < 1 or math.prod(rows) >= 1 << 40:
        given = str(list(shape))[:_SHOWN]
        raise _refused(f"its shape must be [tokens, {hidden_size}], the model's hidden size, not {given}")
    return rows[0]


def _refused(why: str) -> InvalidRequest:
    message = f"The embeddings of a prompt cannot be read: {why}."
    return InvalidRequest(message, reason="embeds_unreadable", field="prompt_embeds", why=why)
