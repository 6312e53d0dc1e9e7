"""Files that a JSON body holds in base64: most of its bytes, of which only who decodes the file makes anything."""

from __future__ import annotations

from typing import Any

_NAMES = ("url", "image_url", "image")  # that a data: URL may stand under


def file_bytes(value: Any) -> int:
    """Of data: URLs in a parsed body. REQUIRES: it has few parts"""
    if isinstance(value, list):
        return sum(map(file_bytes, value))
    if not isinstance(value, dict):
        return 0
    return sum(
        len(inner) if isinstance(inner, str) and name in _NAMES and inner.startswith("data:") else file_bytes(inner)
        for name, inner in value.items()
    )
