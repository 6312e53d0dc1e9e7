"""The store of images: the same content has the same ids, ids are never shared, what nobody holds is let go."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from bequest.engine.errors import InvalidRequest
from bequest.engine.state.contents import ContentKey, Contents
from bequest.engine.types.image import FIRST_ID, LAST_ID, Detail, Image, PreparedImage, VisionInfo, image_spans
from bequest.server.stores import images as stored_images
from bequest.server.stores.images import ImageStore, RecentContents
from tests.server.fakes import ByteTokenizer


def prepared(num_rows: int = 4) -> PreparedImage:
    return PreparedImage(np.zeros((1, 8, 8, 3), np.uint8), ("<", num_rows - 1, "|", 1, ">"), 16)


def store(most_bytes: int = 1 << 20, contents: Contents | None = None) -> ImageStore:
    vision = VisionInfo(7, lambda image, detail: prepared(), 4)
    return ImageStore(vision, ByteTokenizer(), RecentContents(Contents() if contents is None else contents, most_bytes))


def test_the_same_content_is_the_same_image() -> None:
    images = store()
    first = images.take(ContentKey.of("a", b"file", Detail()), prepared())
    assert images.take(ContentKey.of("a", b"file", Detail()), prepared()) is first
    others = [
        ContentKey.of("b", b"file", Detail()),
        ContentKey.of("a", b"filf", Detail()),
        ContentKey.of("a", b"file", Detail(low=True)),
        ContentKey.of("a", b"file", Detail(max_pixels=900)),
    ]
    assert len({image.first_id for image in [first, *(images.take(key, prepared()) for key in others)]}) == 5
    rows = list(range(FIRST_ID, FIRST_ID + 4))
    assert first.token_ids == (ord("<"), *rows[:3], ord("|"), rows[3], ord(">"))


def test_a_tenant_has_sent_files_of_these_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_images, "_MOST_LENGTHS", 2)
    images = store()
    for tenant, length in (("a", 4), ("b", 9), ("a", 4)):
        images.take(ContentKey.of(tenant, bytes(length), Detail()), prepared(), length)
    asked = [("a", 4), ("a", 9), ("b", 9), ("b", 4)]
    assert [images.may_know(*one) for one in asked] == [True, False, True, False]
    images.take(ContentKey.of("c", b"", Detail()), prepared(), 5)
    assert [images.may_know(*one) for one in asked] == [False, False, True, False]


def test_images_that_nobody_holds_make_room() -> None:
    contents = Contents()
    images = store(most_bytes=3 * 8 * 8 * 3, contents=contents)
    held = images.take(ContentKey.of("a", b"held", Detail()), prepared())
    for number in range(5):
        images.take(ContentKey.of("a", bytes([number]), Detail()), prepared())
    gc.collect()
    assert len(contents) == 4, "the last three, and the one that is held"
    assert images.find(ContentKey.of("a", b"held", Detail())) is held
    assert images.find(ContentKey.of("a", bytes([0]), Detail())) is None


def test_ids_begin_again_behind_those_in_use() -> None:
    contents = Contents()
    images = store(most_bytes=0, contents=contents)
    held = images.take(ContentKey.of("a", b"held", Detail()), prepared())
    contents._next_id = LAST_ID - 4
    last = images.take(ContentKey.of("a", b"last", Detail()), prepared())
    assert last.first_id + last.num_rows - 1 <= LAST_ID
    again = images.take(ContentKey.of("a", b"again", Detail()), prepared())
    assert again.first_id == held.first_id + held.num_rows


def test_ids_of_many_laps_are_never_shared() -> None:
    """Some are held for long, others for a moment; half of the ids that there are pass with each image."""
    contents, random = Contents(), np.random.default_rng(4)
    held: dict[int, Image] = {}
    for number in range(400):
        contents._next_id = min(contents._next_id + int(random.integers(0, 1 << 29)), LAST_ID)
        rows = int(random.integers(1, 9))
        key = ContentKey.of("a", str(number).encode(), Detail())
        image = contents.take(
            key,
            rows,
            lambda first, rows=rows: Image.of_rows(np.zeros((rows, 2), np.float32), first),  # type: ignore[misc]
        )
        spans = [range(other.first_id, other.first_id + other.num_rows) for other in held.values()]
        assert not any(image.first_id < span.stop and span.start < image.first_id + rows for span in spans)
        assert image.first_id >= FIRST_ID and image.first_id + rows - 1 <= LAST_ID
        held[number] = image
        held.pop(int(random.integers(0, number + 1)), None)


def test_spans() -> None:
    images = store()
    one, two = (images.take(ContentKey.of("a", bytes([n]), Detail()), prepared()) for n in range(2))
    prompt = (5, *two.token_ids, *one.token_ids, *one.token_ids[2:], 9)
    spans = image_spans(prompt, (one, two))
    assert [span.image for span in spans] == [two, one, one]
    assert [(span.begin, span.end) for span in spans] == [(2, 7), (9, 14), (15, 19)]
    assert image_spans((1, 2, 3), (one,)) == ()
    for wrong, known in ((two.first_id, one), (one.first_id, two), (two.first_id + two.num_rows, two)):
        with pytest.raises(InvalidRequest, match="No image of the request"):
            image_spans((wrong,), (known,))
