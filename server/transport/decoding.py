"""Bodies that come compressed. Ours and not the HTTP library's: that takes one that is cut short for a whole one, and
any encoding that it does not know for none."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from bequest.server.wire.errors import ApiError

_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_PIECE = 1 << 16  # bytes that are unpacked at a time: what a few kilobytes become is checked as it comes


class Decoder:
    """Of the value of a Content-Encoding header."""

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower()
        if name not in ("", "identity", *_WINDOWS):
            raise ApiError(
                415,
                "unsupported_media_type",
                f"The Content-Encoding '{encoding[:100]}' is none that this server reads; send gzip, deflate or none.",
            )
        self._unpack = zlib.decompressobj(_WINDOWS[name]) if name in _WINDOWS else None
        self._began = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What becomes of the next bytes, piece by piece. Raises zlib.error."""
        if self._unpack is None:
            yield data
            return
        self._began = self._began or bool(data)
        while data:
            if self._unpack.eof:
                raise zlib.error("there is something behind the end")
            piece = self._unpack.decompress(data, _PIECE)
            data = self._unpack.unconsumed_tail or self._unpack.unused_data
            if piece:
                yield piece

    def end(self) -> None:
        """Raises zlib.error if something is missing."""
        if self._unpack is not None and self._began and not self._unpack.eof:
            raise zlib.error("it is cut short")
