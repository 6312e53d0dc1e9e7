"""The images of tenants, by content: who sends one again gets the same object, and so the same token ids.

An image lives as long as somebody holds it: a request, a record, a stored response. The ones used last are held here,
too, so that a prefix that is still in the cache is found again. Owned by the event-loop thread.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple
from weakref import WeakValueDictionary

from bequest.engine.types import ModelInfo
from bequest.engine.types.image import FIRST_ID, LAST_ID, Detail, Image, PreparedImage, VisionInfo
from bequest.server.interfaces import TokenizerLike


class ImageKey(NamedTuple):
    """Exact: the tenant, what the file holds, and how it is looked at."""

    tenant: str
    digest: bytes
    detail: Detail

    @classmethod
    def of(cls, tenant: str, data: bytes, detail: Detail) -> ImageKey:
        return cls(tenant, hashlib.blake2b(data, digest_size=32).digest(), detail)


class ImageStore:
    def __init__(self, vision: VisionInfo, tokenizer: TokenizerLike, most_bytes: int) -> None:
        self.vision = vision
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes
        self._images: WeakValueDictionary[ImageKey, Image] = WeakValueDictionary()
        self._recent: OrderedDict[ImageKey, Image] = OrderedDict()
        self._num_bytes = 0  # of the recent ones
        self._next_id = FIRST_ID

    def __len__(self) -> int:
        return len(self._images)

    def find(self, key: ImageKey) -> Image | None:
        image = self._images.get(key)
        if image is not None:
            self._touch(key, image)
        return image

    def take(self, key: ImageKey, prepared: PreparedImage) -> Image:
        """The image of this content, new if there is none."""
        if (known := self.find(key)) is not None:
            return known
        first_id = self._free_ids(prepared.num_rows)
        image = Image.of(prepared, first_id, lambda text: self._tokenizer.encode(text, add_special_tokens=False))
        self._images[key] = image
        self._touch(key, image)
        return image

    def _touch(self, key: ImageKey, image: Image) -> None:
        if key not in self._recent:
            self._recent[key] = image
            self._num_bytes += image.pixels.nbytes
        self._recent.move_to_end(key)
        while self._num_bytes > self._most_bytes:
            _, oldest = self._recent.popitem(last=False)
            self._num_bytes -= oldest.pixels.nbytes

    def _free_ids(self, count: int) -> int:
        """Ids are used again when all have been: by then a cache has no blocks of images that nobody holds."""
        first = self._next_id if self._next_id + count - 1 <= LAST_ID else FIRST_ID
        while (taken := self._end_of_taken(first, first + count)) is not None:
            first = taken if taken + count - 1 <= LAST_ID else FIRST_ID
        self._next_id = first + count
        return first

    def _end_of_taken(self, first: int, end: int) -> int | None:
        """Where the ids of an image end that has some of [first, end)."""
        taken = ((image.first_id, image.first_id + image.num_rows) for image in self._images.values())
        return next((its_end for its_first, its_end in taken if its_first < end and first < its_end), None)


def images_of(info: ModelInfo, tokenizer: TokenizerLike, most_bytes: int) -> ImageStore | None:
    """None: the model does not see."""
    return None if info.vision is None else ImageStore(info.vision, tokenizer, most_bytes)
