"""The images of tenants, and rows that they bring instead of tokens: by content, with token ids of their own
(engine/state/contents.py). The ones used last are held here, so that a prefix that is still in the cache is found
again. Owned by the event-loop thread.
"""

from __future__ import annotations

import os
from collections import OrderedDict

from bequest.engine.state.contents import ContentKey, Contents
from bequest.engine.types import ModelInfo
from bequest.engine.types.image import GivenRows, Image, PreparedImage, VisionInfo
from bequest.server.access.turns import FairPool
from bequest.server.interfaces import TokenizerLike

_MOST_LENGTHS = 1 << 14
_MOST_AT_ONCE = 4  # images that are decoded: each has its pixels in memory twice


class RecentContents:
    """At most so many bytes of them."""

    def __init__(self, contents: Contents, most_bytes: int) -> None:
        self._contents = contents
        self._most_bytes = most_bytes
        self._recent: OrderedDict[ContentKey, Image] = OrderedDict()
        self._num_bytes = 0

    def find(self, key: ContentKey) -> Image | None:
        image = self._contents.find(key)
        if image is not None:
            self._touch(key, image)
        return image

    def take_rows(self, key: ContentKey, rows: GivenRows) -> Image:
        """Of this content, new if there are none."""
        image = self._contents.take(key, len(rows), lambda first_id: Image.of_rows(rows, first_id))
        self._touch(key, image)
        return image

    def take_image(self, key: ContentKey, prepared: PreparedImage, tokenizer: TokenizerLike) -> Image:
        def make(first_id: int) -> Image:
            return Image.of(prepared, first_id, lambda text: tokenizer.encode(text, add_special_tokens=False))

        image = self._contents.take(key, prepared.num_rows, make)
        self._touch(key, image)
        return image

    def _touch(self, key: ContentKey, image: Image) -> None:
        if self._recent.get(key) is not image:
            self._drop(key)
            self._recent[key] = image
            self._num_bytes += image.content.nbytes
        self._recent.move_to_end(key)
        while self._num_bytes > self._most_bytes:
            self._drop(next(iter(self._recent)))

    def _drop(self, key: ContentKey) -> None:
        if (image := self._recent.pop(key, None)) is not None:
            self._num_bytes -= image.content.nbytes


class ImageStore:
    """Of a model that sees."""

    def __init__(self, vision: VisionInfo, tokenizer: TokenizerLike, recent: RecentContents) -> None:
        self.vision = vision
        # Of their own: an image takes ten times as long as a text, and Pillow leaves the interpreter to others.
        self.pool = FairPool(max(2, min(_MOST_AT_ONCE, (os.cpu_count() or 1) // 4)), "images")
        self._tokenizer = tokenizer
        self._recent = recent
        self._lengths: dict[tuple[str, int], None] = {}  # tenants and bytes of files; the first of them goes first

    def find(self, key: ContentKey) -> Image | None:
        return self._recent.find(key)

    def may_know(self, tenant: str, num_bytes: int) -> bool:
        """Whether the tenant has sent a file of this length. If not, nobody has to wait for its digest to decode it.
        Any thread may ask."""
        return (tenant, num_bytes) in self._lengths

    def take(self, key: ContentKey, prepared: PreparedImage, num_bytes: int = 0) -> Image:
        """The image of this content, new if there is none. `num_bytes`: of its file."""
        self._lengths[key.tenant, num_bytes] = None
        if len(self._lengths) > _MOST_LENGTHS:
            del self._lengths[next(iter(self._lengths))]
        return self._recent.take_image(key, prepared, self._tokenizer)


def images_of(info: ModelInfo, tokenizer: TokenizerLike, recent: RecentContents) -> ImageStore | None:
    """None: the model does not see."""
    return None if info.vision is None else ImageStore(info.vision, tokenizer, recent)
