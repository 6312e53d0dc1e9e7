"""An estate as one file: safetensors, which any reader of that format opens, with a manifest and a checksum.

    length of the header | header (JSON) | bytes of the blocks

The header names one tensor, `blocks`, [N, L, 2, NKV, BS, D], and has in its metadata the deed (JSON) and a digest of
the deed and of the blocks. There is one header for each deed and content, so that a file is whole exactly if its header
is the one that would be written for what it says.
"""

from __future__ import annotations

import hashlib
import math

import msgspec
import numpy as np
import orjson

from bequest.engine.errors import InvalidEstate
from bequest.engine.types.blocks import BlockBytes, BlockLayout
from bequest.engine.types.estate import Deed, Estate

FORMAT = "bequest.estate.1"
_LENGTH_BYTES = 8
_MOST_HEADER = 1 << 28  # bytes: tokens of a thousand long choices, features of hours
_DTYPES = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "fp8_e4m3": ("F8_E4M3", 1),
}


def header_of(estate: Estate) -> bytes:
    """What comes before the blocks. Hashes them: not for the event loop."""
    deed = msgspec.json.encode(estate.deed)
    return _header(deed, estate.deed.identity.cache, len(estate.content), _digest(deed, estate.content))


def content_of(estate: Estate) -> memoryview:
    """What comes behind the header."""
    return np.ascontiguousarray(estate.content).reshape(-1).data


def to_bytes(estate: Estate) -> bytes:
    return b"".join((header_of(estate), content_of(estate)))


def from_bytes(data: bytes | bytearray | memoryview) -> Estate:
    """Raises InvalidEstate if it is not, to the bit, what `to_bytes` made. Its content is not copied. Not for the event
    loop either."""
    view = memoryview(data).cast("B")
    length = _header_length(view)
    metadata = _metadata(view[_LENGTH_BYTES:length])
    deed = _read_deed(metadata["deed"])
    block_bytes, num_bytes = deed.identity.cache.num_bytes, len(view) - length
    if block_bytes < 1 or num_bytes % block_bytes:
        raise InvalidEstate("The estate is cut short: it does not end where a block does.")
    content = np.frombuffer(view[length:], np.uint8).reshape(-1, block_bytes)
    written = metadata["deed"].encode()
    if _header(written, deed.identity.cache, len(content), metadata["digest"]) != view[:length]:
        raise InvalidEstate("The estate's header is not the one of its content: it is cut short, or was changed.")
    if _digest(written, content) != metadata["digest"]:
        raise InvalidEstate("The estate's bytes have changed since it was made.")
    return Estate(deed, content)


def _header_length(view: memoryview) -> int:
    """Of the header with its own length."""
    if len(view) < _LENGTH_BYTES:
        raise InvalidEstate(f"A file of {len(view)} bytes is too short to be an estate.")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if not 2 <= length <= _MOST_HEADER:
        raise InvalidEstate("The file is no estate: it does not begin as a safetensors file does.")
    if _LENGTH_BYTES + length > len(view):
        raise InvalidEstate(f"The estate is cut short: its header has {length} bytes, and {len(view)} are there.")
    return _LENGTH_BYTES + length


def _metadata(header: memoryview) -> dict[str, str]:
    try:
        parsed = orjson.loads(header)
    except orjson.JSONDecodeError:
        raise InvalidEstate("The file is no estate: its header is not JSON.") from None
    metadata = parsed.get("__metadata__") if isinstance(parsed, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidEstate("The file is no estate: its header has no metadata.")
    if metadata.get("format") != FORMAT:
        raise InvalidEstate(f"The file is no estate of the format {FORMAT}.")
    if not {"deed", "digest"} <= metadata.keys():
        raise InvalidEstate("The estate has no deed, or no digest.")
    return metadata


def _read_deed(text: str) -> Deed:
    try:
        return msgspec.json.decode(text, type=Deed)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidEstate(f"The estate's deed cannot be read: {error}.") from None


def _header(deed: bytes, layout: BlockLayout, num_blocks: int, digest: str) -> bytes:
    dtype, item_bytes = _DTYPES.get(layout.dtype, ("U8", 1))
    shape = [num_blocks, *layout.shape]
    if item_bytes * math.prod(layout.shape) != layout.num_bytes:
        dtype, shape = "U8", [num_blocks, layout.num_bytes]  # there is more to a block than numbers of this type
    metadata = {"format": FORMAT, "deed": deed.decode(), "digest": digest}
    end = num_blocks * layout.num_bytes
    tensors = {"blocks": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}
    try:
        text = orjson.dumps({"__metadata__": metadata, **tensors})
    except (TypeError, ValueError):  # numbers beyond 64 bits, of somebody who made a file by hand
        raise InvalidEstate("The estate's blocks have no size.") from None
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _digest(deed: bytes, content: BlockBytes) -> str:
    digest = hashlib.blake2b(deed, digest_size=32)
    digest.update(np.ascontiguousarray(content).reshape(-1).data)
    return digest.hexdigest()
