"""The images of an estate. Their ids are those of the process that it left: here they get ids of this one, and whoever
sends the same image again gets these. Rows that a request brought are images, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from bequest.engine.errors import InvalidEstate, InvalidRequest
from bequest.engine.state.contents import ContentKey, Contents
from bequest.engine.types import ModelInfo
from bequest.engine.types.estate import Deed, EstateImage
from bequest.engine.types.image import FIRST_ID, Image

_MOST_BYTES = 64 << 20  # of the images of a lease in files


@dataclass(frozen=True, slots=True)
class Arrival:
    """An estate as this process speaks of it."""

    deed: Deed
    images: tuple[Image, ...]
    ids: Mapping[int, int]  # first ids of images: those that it came with → those that they have here


def arrived(deed: Deed, contents: Contents) -> Arrival:
    """REQUIRES: the deed has no flaws"""
    if not deed.images:
        return Arrival(deed, (), {})
    images = tuple(_taken(image, deed.identity.tenant, contents) for image in deed.images)
    here = {old.first_id: new.first_id for old, new in zip(deed.images, images, strict=True)}
    choices = tuple(replace(choice, token_ids=_renumbered(choice.token_ids, deed, here)) for choice in deed.choices)
    return Arrival(replace(deed, choices=choices, images=tuple(map(EstateImage.of, images))), images, here)


def _taken(image: EstateImage, tenant: str, contents: Contents) -> Image:
    """The one that is here, if it is the same: whoever wrote the estate may say anything of it."""
    key = ContentKey(tenant, image.digest, image.detail)
    known = contents.find(key)
    if known is not None and known != structs.replace(
        image.as_image(known.first_id), digest=key.digest, detail=key.detail
    ):
        key = key._replace(digest=hashlib.blake2b(image.content + image.digest, digest_size=32).digest())
    return contents.take(key, image.num_rows, image.as_image)


def _renumbered(token_ids: tuple[int, ...], deed: Deed, here: Mapping[int, int]) -> tuple[int, ...]:
    ids = np.asarray(token_ids, np.int64)
    moved = ids.copy()
    for image in deed.images:
        of_image = (ids >= image.first_id) & (ids < image.first_id + image.num_rows)
        moved[of_image] += here[image.first_id] - image.first_id
    return tuple(moved.tolist())


def check_size(images: Sequence[Image], field: str | None = None) -> None:
    """A deed has the pixels of its images, and is read whole. Raises InvalidRequest."""
    needed = sum(image.content.nbytes for image in images)
    if needed > _MOST_BYTES:
        raise InvalidRequest(
            f"The images of the prompt have {needed} bytes, at most {_MOST_BYTES} are kept in files.",
            reason="images_not_for_files",
            field=field,
            needed=-(-needed >> 20),
            most=_MOST_BYTES >> 20,
        )


def check_images(deed: Deed, info: ModelInfo, *, takes_embeds: bool) -> None:
    """What only an engine of the same model can know. Raises InvalidEstate."""
    for image in (one.as_image(FIRST_ID) for one in deed.images):
        if image.is_seen:
            fits = info.vision is not None and info.vision.fits(image)
        else:
            fits = takes_embeds and image.content.shape[1] == info.hidden_size
        if not fits or max((id_ for id_ in image.token_ids if id_ < FIRST_ID), default=0) >= info.vocab_size:
            raise InvalidEstate("The estate has images that the model does not take as they are.")
