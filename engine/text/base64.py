"""Text in base64 → bytes, ten times as fast as the standard library where it is plain."""

from __future__ import annotations

import base64
import binascii

from bequest.engine.kernels.base64 import decode_plain


def from_base64(text: str, begin: int = 0, *, blanks: bool = False) -> bytes:
    """Of the text from `begin` on. `blanks`: they may stand anywhere. Raises ValueError."""
    plain = decode_plain(text, begin)
    if plain is not None:
        return plain
    rest = text[begin:]
    try:
        return base64.b64decode("".join(rest.split()) if blanks else rest, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
