"""Text in base64 on the host: csrc/ops/cpu/base64.h. No torch."""

from __future__ import annotations

from bequest.engine import _C


def decode_plain(text: str, begin: int = 0) -> bytes | None:
    """The bytes that the text from `begin` on stands for. None: it is not plain base64, or none at all. Other threads
    have the interpreter meanwhile."""
    return _C.decode_base64(text, begin)
