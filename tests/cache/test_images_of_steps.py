"""Images that the tower looks at before a token needs them."""

from __future__ import annotations

import numpy as np

from bequest.engine.cache.images import DeviceImages
from bequest.engine.state.step import Stretch
from bequest.engine.types.image import FIRST_ID, Image, ImageSpan


def image(number: int, rows: int = 100) -> Image:
    first = FIRST_ID + 1000 * number
    pixels = np.zeros((1, 2, 2, 3), np.uint8)
    return Image(first_id=first, num_rows=rows, token_ids=(), content=pixels, num_patches=4 * rows)


def test_an_image_that_was_looked_at_ahead() -> None:
    """It is looked at once, and does not count as found by the step that it was looked at for."""
    images = DeviceImages(1000, 10_000)
    images.begin_plan()
    assert images.look_ahead(image(0)) and not images.look_ahead(image(0))
    assert images.take() == ((), (image(0),)) and images.num_runs == 1
    images.begin_plan()
    span = ImageSpan(10, 110, image(0), 10)
    assert images.within((span,), Stretch(0, 120)) is not None and not images.planned
    assert images.take_ahead({image(0).first_id}) == 1
    assert images.take_ahead({image(0).first_id}) == 0, "whoever comes next finds it"


def test_one_that_was_dropped_is_not_ahead_any_more() -> None:
    images = DeviceImages(150, 10_000)
    for number in (0, 1):
        images.begin_plan()
        assert images.look_ahead(image(number))
        images.take()
    assert images.num_rows == 100
    assert images.take_ahead({image(0).first_id}) == 0
    assert images.take_ahead({image(1).first_id}) == 1
