"""How much of a prompt a step computes in which the tower looks at an image of it."""

from __future__ import annotations

import numpy as np
import pytest

from bequest.engine.cache.images import DeviceImages
from bequest.engine.state.step import Stretch
from bequest.engine.types.image import FIRST_ID, Image, ImageSpan


def image(number: int, rows: int = 100) -> Image:
    first = FIRST_ID + 1000 * number
    pixels = np.zeros((1, 2, 2, 3), np.uint8)
    return Image(first_id=first, num_rows=rows, token_ids=(), content=pixels, num_patches=4 * rows)


def spans(*numbers: int) -> tuple[ImageSpan, ...]:
    """Ten tokens of text before each image of a hundred."""
    return tuple(ImageSpan(begin := 10 + 110 * i, begin + 100, image(n), begin) for i, n in enumerate(numbers))


@pytest.mark.parametrize(
    ("count", "rest", "expected"),
    [
        (50, 120, 120),  # to the end of the prompt, behind the image
        (48, 120, 120),
        (47, 120, 47),  # more than so many pieces
        (120, 120, 120),
        (50, 0, 50),  # nobody says what is left
        (5, 8, 5),  # text before the image
    ],
)
def test_a_step_with_a_tower_takes_the_rest_along(count: int, rest: int, expected: int) -> None:
    images = DeviceImages(1000, 10_000)
    images.begin_plan()
    made = images.within(spans(0), Stretch(0, count), rest)
    assert made is not None and (made.begin, made.count) == (0, expected)
    assert images.planned is (expected > 10)


def test_an_image_that_was_looked_at_comes_in_pieces() -> None:
    images = DeviceImages(1000, 10_000)
    images.begin_plan()
    assert images.look_ahead(image(0)) and not images.look_ahead(image(0))
    images.take()
    images.begin_plan()
    made = images.within(spans(0), Stretch(0, 50), 120)
    assert made is not None and made.count == 50 and not images.planned
    assert images.take_ahead({image(0).first_id}) == 1 and images.take_ahead({image(0).first_id}) == 0


def test_the_rest_ends_before_an_image_that_there_is_no_room_for() -> None:
    """In the budget of the step's tower."""
    images = DeviceImages(1000, 700)
    images.begin_plan()
    made = images.within(spans(0, 1), Stretch(0, 100), 230)
    assert made is not None and made.count == 120
    assert [seen.first_id for seen in images.take()[1]] == [image(0).first_id]


def test_what_is_read_again_is_as_long_as_it_was() -> None:
    images = DeviceImages(1000, 10_000)
    images.begin_plan()
    made = images.within(spans(0), Stretch(0, 50, read_only=True), 120)
    assert made is not None and made.count == 50
