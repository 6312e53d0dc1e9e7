"""Anthropic's image blocks → parts of a message, as chat's are until their images are found (asks/image_parts.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bequest.server.asks.image_parts import GivenImage
from bequest.server.asks.messages import string_at, wrong_type
from bequest.server.wire.errors import invalid
from bequest.server.wire.reading import shorten

_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def image_part(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The image stands in the block itself, in base64, or where a URL leads."""
    source, at = block.get("source"), f"{path}.source"
    if not isinstance(source, dict):
        raise wrong_type(at, "an object with `type`")
    kind = string_at(source, "type", at)
    if kind == "url":
        return _part(string_at(source, "url", at), f"{at}.url", path)
    if kind != "base64":
        message = f"`{at}.type` must be 'base64' or 'url', not {shorten(repr(kind))}."
        raise invalid(message, f"{at}.type")
    media = string_at(source, "media_type", at)
    if media not in _TYPES:
        message = f"`{at}.media_type` must be one of {', '.join(_TYPES)}, not {shorten(repr(media))}."
        raise invalid(message, f"{at}.media_type")
    return _part(f"data:{media};base64,{string_at(source, 'data', at)}", f"{at}.data", path)


def _part(url: str, param: str, path: str) -> dict[str, Any]:
    return {"type": "image", "image": GivenImage(url, param, part=path)}
