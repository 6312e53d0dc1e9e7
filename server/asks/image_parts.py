"""Image parts of messages, as clients send them: where the image is, and how closely it is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bequest.engine.types.image import Detail
from bequest.server.asks.ranges import agreed
from bequest.server.wire.errors import ApiError, invalid, missing, unsupported
from bequest.server.wire.reading import shorten

IMAGE_PARTS = ("image_url", "input_image", "image")
_DETAILS = ("auto", "low", "high", "original")
_PIXELS = ("min_pixels", "max_pixels")


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image that a part of a message names, before anybody has looked at it."""

    url: str
    param: str  # the field that names it
    detail: Detail = Detail()
    sizes: str = ""  # the field that has its bounds of pixels, if it has any
    part: str = ""  # the part of a message that it is, whose `type` says so; empty: it is none


def given_image(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The part as a conversation has it until its image is found."""
    whole = path
    place, at = _place(part, path)
    if isinstance(place, GivenImage):  # somebody else has read it
        return {"type": "image", "image": place}
    if part.get("file_id") is not None:
        raise unsupported(f"{path}.file_id", f"`{path}.file_id` is not taken here: send the image as a data: URL.")
    detail, sizes = part.get("detail"), _sizes(part, path)
    detail_at = f"{path}.detail"
    if isinstance(place, Mapping):
        detail_at, detail = agreed(f"{at}.detail", place.get("detail"), detail_at, detail)
        inner = _sizes(place, at)
        for name in _PIXELS:
            agreed(f"{at}.{name}", inner.get(name), f"{path}.{name}", sizes.get(name))
        sizes = {**sizes, **inner}
        path = at if inner else path
        place, at = place.get("url"), f"{at}.url"
    if place is None:
        raise missing(at)
    if not isinstance(place, str):
        raise ApiError(400, "invalid_type", f"`{at}` must be a string: a data: URL, for example.", param=at)
    if detail not in (None, *_DETAILS):
        message = f"`{detail_at}` must be one of {', '.join(_DETAILS)}, not {shorten(repr(detail))}."
        raise invalid(message, detail_at)
    return {"type": "image", "image": GivenImage(place, at, Detail(low=detail == "low", **sizes), path, whole)}


def _place(part: Mapping[str, Any], path: str) -> tuple[Any, str]:
    """Where the image is, and the field that says so, of those that parts of this type have for it."""
    names = ("image_url", "image", "url") if part.get("type") == "image" else ("image_url",)
    given = [name for name in names if part.get(name) is not None]
    if len(given) > 1:
        message = f"`{path}` has both `{given[0]}` and `{given[1]}`, which say the same: send one of them."
        raise invalid(message, f"{path}.{given[1]}")
    name = given[0] if given else "image" if part.get("type") == "image" else "image_url"
    return part.get(name), f"{path}.{name}"


def _sizes(given: Mapping[str, Any], path: str) -> dict[str, int]:
    """`min_pixels` and `max_pixels` of an object."""
    sizes = {name: given[name] for name in _PIXELS if given.get(name) is not None}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            message = f"`{path}.{name}` must be a whole number of pixels, not {shorten(repr(size))}."
            raise ApiError(400, "invalid_type", message, param=f"{path}.{name}")
    return sizes


def sizes_of_all(kwargs: Mapping[str, Any] | None) -> dict[str, int]:
    """Those of `mm_processor_kwargs`, for all images of a request that have none of their own."""
    if (other := next((name for name in kwargs or {} if name not in _PIXELS), None)) is not None:
        field = f"mm_processor_kwargs.{other}"
        raise unsupported(field, f"`{field}` is not taken; {' and '.join(_PIXELS)} are.")
    return _sizes(kwargs or {}, "mm_processor_kwargs")


def bounded(given: GivenImage, of_all: Mapping[str, int], bounds: tuple[int, int] | None) -> Detail:
    """How closely to look, where the model takes bounds within `bounds`. Raises ApiError for others."""
    detail, path = given.detail, given.sizes
    if not detail.has_pixels:
        shared = {name: of_all.get(name) for name in _PIXELS}
        detail, path = Detail(detail.low, shared["min_pixels"], shared["max_pixels"]), "mm_processor_kwargs"
    if not detail.has_pixels:
        return detail
    named = [(f"{path}.{name}", size) for name in _PIXELS if (size := getattr(detail, name)) is not None]
    if bounds is None:
        field = named[0][0]
        message = f"`{field}` is not taken by this model: its files say how images are resized. Send `detail`."
        raise unsupported(field, message)
    for field, size in named:
        if not bounds[0] <= size <= bounds[1]:
            raise invalid(f"`{field}` must be from {bounds[0]} to {bounds[1]} for this model, not {size}.", field)
    if (detail.min_pixels or 0) > (detail.max_pixels or bounds[1]):
        raise invalid(f"`{named[0][0]}` must not be more than `max_pixels`.", named[0][0])
    return detail
