"""Parts of images: bounds of pixels, of one image and of all of a request, and what is said of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from bequest.engine.types.image import Detail
from bequest.server.asks.image_parts import GivenImage, bounded, given_image, sizes_of_all
from bequest.server.wire.errors import ApiError

BOUNDS = (64, 4096)


def given(**fields: Any) -> GivenImage:
    image: GivenImage = given_image({"type": "image_url", "image_url": {"url": "data:x", **fields}}, "at")["image"]
    return image


def refusal(part: GivenImage, kwargs: dict[str, Any] | None, bounds: tuple[int, int] | None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        bounded(part, sizes_of_all(kwargs), bounds)
    assert caught.value.status == 400
    return caught.value


def test_bounds_of_an_image_go_before_those_of_all() -> None:
    of_all = sizes_of_all({"min_pixels": 100, "max_pixels": 400})
    assert bounded(given(), of_all, BOUNDS) == Detail(False, 100, 400)
    assert bounded(given(max_pixels=900), of_all, BOUNDS) == Detail(False, None, 900)
    assert bounded(given(detail="low"), {}, None) == Detail(low=True)
    beside = given_image({"type": "image_url", "image_url": {"url": "data:x"}, "min_pixels": 70}, "at")["image"]
    assert bounded(beside, {}, BOUNDS) == Detail(False, 70, None) and beside.sizes == "at"


def test_wrong_bounds_are_named() -> None:
    assert refusal(given(max_pixels=5000), None, BOUNDS).param == "at.image_url.max_pixels"
    assert refusal(given(min_pixels=63), None, BOUNDS).param == "at.image_url.min_pixels"
    assert "from 64 to 4096" in str(refusal(given(), {"max_pixels": 1}, BOUNDS))
    assert refusal(given(min_pixels=200, max_pixels=100), None, BOUNDS).param == "at.image_url.min_pixels"
    assert refusal(given(), {"max_pixels": 100}, None).param == "mm_processor_kwargs.max_pixels"
    assert refusal(given(), {"do_resize": False}, BOUNDS).param == "mm_processor_kwargs.do_resize"
    for wrong in ("9", True, 1.5):
        with pytest.raises(ApiError, match="whole number of pixels"):
            given(max_pixels=wrong)


@pytest.mark.parametrize(
    "part, param",
    [
        ({"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}, "detail": "high"}, "image_url.detail"),
        (
            {"type": "image_url", "image_url": {"url": "data:x", "max_pixels": 9}, "max_pixels": 8},
            "image_url.max_pixels",
        ),
        ({"type": "image", "image": "data:x", "url": "data:y"}, "url"),
        ({"type": "image", "image_url": "data:x", "image": "data:y"}, "image"),
        ({"type": "input_image", "image_url": "data:x", "file_id": "file-1"}, "file_id"),
    ],
)
def test_what_is_said_twice_is_refused(part: dict[str, Any], param: str) -> None:
    """One of the two would not be looked at."""
    with pytest.raises(ApiError) as caught:
        given_image(part, "at")
    assert (caught.value.status, caught.value.param) == (400, f"at.{param}")


def test_what_is_said_twice_may_agree() -> None:
    inner = {"url": "data:x", "detail": "low", "max_pixels": None}
    part = {"type": "image_url", "image_url": inner, "detail": "low", "max_pixels": 8}
    assert given_image(part, "at")["image"].detail == Detail(True, None, 8)
    part = {"type": "image_url", "image_url": {"url": "data:x", "detail": None}, "detail": "low"}
    assert given_image(part, "at")["image"].detail.low
