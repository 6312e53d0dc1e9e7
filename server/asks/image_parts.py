"""Image parts of messages, as clients send them: where the image is, and how closely it is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bequest.server.wire.errors import ApiError, invalid, missing, unsupported
from bequest.server.wire.reading import shorten

IMAGE_PARTS = ("image_url", "input_image", "image")
_DETAILS = ("auto", "low", "high")


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image that a part of a message names, before anybody has looked at it."""

    url: str
    low: bool
    param: str  # the field that names it


def given_image(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The part as a conversation has it until its image is found."""
    place, at = part.get("image_url"), f"{path}.image_url"
    if place is None and part.get("type") == "image":
        place, at = part.get("image"), f"{path}.image"
    if isinstance(place, GivenImage):  # somebody else has read it
        return {"type": "image", "image": place}
    if place is None and part.get("file_id") is not None:
        raise unsupported(f"{path}.file_id", f"`{path}.file_id` is not taken here: send the image as a data: URL.")
    detail = part.get("detail")
    if isinstance(place, Mapping):
        detail = place.get("detail", detail)
        _refuse_sizes(place, at)
        place, at = place.get("url"), f"{at}.url"
    _refuse_sizes(part, path)
    if place is None:
        raise missing(at)
    if not isinstance(place, str):
        raise ApiError(400, "invalid_type", f"`{at}` must be a string: a data: URL, for example.", param=at)
    if detail not in (None, *_DETAILS):
        name = at.removesuffix(".url") + ".detail"
        raise invalid(f"`{name}` must be one of {', '.join(_DETAILS)}, not {shorten(repr(detail))}.", name)
    return {"type": "image", "image": GivenImage(place, detail == "low", at)}


def _refuse_sizes(given: Mapping[str, Any], path: str) -> None:
    for name in ("min_pixels", "max_pixels"):
        if given.get(name) is not None:
            message = (
                f"`{path}.{name}` is not taken by this model: its files say how images are resized. Send `detail`."
            )
            raise unsupported(f"{path}.{name}", message)
