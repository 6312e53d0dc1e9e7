"""Contents that have token ids of their own: images, and rows that requests bring. Who brings one again gets the same
object, and so the same ids.

One lives as long as somebody holds it: a request, a record, a stored response, whoever expects it to come again. Owned
by the event-loop thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakValueDictionary

from msgspec.structs import replace

from bequest.engine.types.image import FIRST_ID, LAST_ID, Detail, Image


class ContentKey(NamedTuple):
    """Exact: the tenant, what the file holds, and how it is looked at."""

    tenant: str
    digest: bytes
    detail: Detail

    @classmethod
    def of(cls, tenant: str, data: bytes, detail: Detail, settings: str = "") -> ContentKey:
        """`settings`: how it is prepared."""
        digest = hashlib.blake2b(hashlib.blake2b(settings.encode()).digest(), digest_size=32)
        digest.update(data)
        return cls(tenant, digest.digest(), detail)


class Contents:
    def __init__(self) -> None:
        self._found: WeakValueDictionary[ContentKey, Image] = WeakValueDictionary()
        self._next_id = FIRST_ID
        self._taken: list[tuple[int, int]] = []  # [first, end) of those held when ids began again, the last one first

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: ContentKey) -> Image | None:
        return self._found.get(key)

    def take(self, key: ContentKey, num_rows: int, make: Callable[[int], Image]) -> Image:
        """That of this key; made with the first of so many new ids if there is none."""
        if (known := self.find(key)) is not None:
            return known
        made = make(self._free_ids(num_rows))
        image = self._found[key] = replace(made, digest=key.digest, detail=key.detail)
        return image

    def _free_ids(self, count: int) -> int:
        """Ids are used again when all have been: by then a cache has no blocks of contents that nobody holds. Those
        that have been given since ids began again are behind the next one, so that nobody has to look at them."""
        while True:
            if self._next_id + count - 1 > LAST_ID:
                self._next_id = FIRST_ID
                held = ((image.first_id, image.first_id + image.num_rows) for image in self._found.values())
                self._taken = sorted(held, reverse=True)
            while self._taken and self._taken[-1][1] <= self._next_id:
                self._taken.pop()
            if not self._taken or self._taken[-1][0] >= self._next_id + count:
                break
            self._next_id = self._taken[-1][1]
        first, self._next_id = self._next_id, self._next_id + count
        return first
