"""Contents that have token ids of their own: images, and rows that requests bring. Who brings one again gets the same
object, and so the same ids.

One lives as long as somebody holds it: a request, a record, a stored response, whoever expects it to come again. Owned
by the event-loop thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

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
        """Ids are used again when all have been: by then a cache has no blocks of contents that nobody holds."""
        first = self._next_id if self._next_id + count - 1 <= LAST_ID else FIRST_ID
        while (taken := self._end_of_taken(first, first + count)) is not None:
            first = taken if taken + count - 1 <= LAST_ID else FIRST_ID
        self._next_id = first + count
        return first

    def _end_of_taken(self, first: int, end: int) -> int | None:
        """Where the ids of one end that has some of [first, end)."""
        taken = ((image.first_id, image.first_id + image.num_rows) for image in self._found.values())
        return next((its_end for its_first, its_end in taken if its_first < end and first < its_end), None)
