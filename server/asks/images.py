"""The images of a conversation: found, looked up, and put into its tokens.

A template writes one token in the place of an image. In a prompt the tokens of the image stand there. Folding and
unfolding lead from one to the other, so that texts and tokens can be laid beside each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import repeat
from typing import Any
from urllib.parse import unquote

from bequest.engine.errors import EngineError
from bequest.engine.state.contents import ContentKey
from bequest.engine.text.base64 import from_base64
from bequest.engine.types import ParentChoice
from bequest.engine.types.image import FIRST_ID, LAST_ID, Detail, Image
from bequest.engine.vision.decode import decode
from bequest.server.asks.extension import Conversation, Extension, extend
from bequest.server.asks.image_parts import GivenImage, bounded, sizes_of_all
from bequest.server.context import Context
from bequest.server.stores.images import ImageStore
from bequest.server.transport.ahead import ahead
from bequest.server.transport.fetching import Fetcher, NotFetched, Refused, read_below
from bequest.server.transport.work import current_tenant, hold_more, in_pool
from bequest.server.wire.errors import ApiError, at_field, invalid
from bequest.server.wire.reading import shorten

Message = Mapping[str, Any]
STAND_IN = LAST_ID + 1  # for an image that nobody has looked at yet
_MEGAPIXEL = 10**6
_MEDIA = ("image/", "application/octet-stream;", ";")  # of a data: URL; that of a file that nobody knew the type of
_FETCHED_AT_ONCE = 4  # files of a request: a slow host is waited for once, and few of them take memory
_SHORT_URL = 1 << 20  # characters: half a millisecond of base64, as long as the way to another thread and back
_PLAIN = str.maketrans("-_", "+/")  # base64 for URLs


# --- from parts to images ------------------------------------------------------------------------------------------


async def look_at(
    context: Context,
    messages: Sequence[Message],
    kwargs: Mapping[str, Any] | None = None,
    decoding: asyncio.Event | None = None,
) -> tuple[list[dict[str, Any]], tuple[Image, ...]]:
    """The messages with the first id of each image in its part, and the images in their order. `kwargs`: the request's
    `mm_processor_kwargs`; `decoding`: set when an image is one that nobody knows."""
    given, of_all = list(_given(messages)), sizes_of_all(kwargs)
    if not given:
        return [dict(message) for message in messages], ()
    store = _store(context, given[0])
    check_count(context, given)
    details = [bounded(one, of_all, store.vision.pixels) for one in given]
    decoding = decoding or asyncio.Event()
    elsewhere = [partial(_fetched, context, one) for one in given if not _is_inline(one)]
    async with aclosing(ahead(elsewhere, _FETCHED_AT_ONCE)) as files:
        # Not a list with a name, which an error would keep alive with this frame.
        images = [
            await _image(context, store, await _data(context, one, files), one.param, detail, decoding)
            for one, detail in zip(given, details, strict=True)
        ]
    ids = (image.first_id for image in images)
    return [_with_ids(message, ids) for message in messages], tuple(images)


def before_looking(messages: Sequence[Message]) -> list[dict[str, Any]] | None:
    """The messages as `look_at` will give them, with `STAND_IN` for the first id of each image. None: there is none."""
    return [_with_ids(message, repeat(STAND_IN)) for message in messages] if any(_given(messages)) else None


def check_count(context: Context, given: Sequence[GivenImage]) -> None:
    """Of the images of one request."""
    most = context.config.max_images
    if len(given) > most:
        message = f"`{given[most].param}` is image {most + 1} of a request with {len(given)}, at most {most} are taken "
        raise ApiError(400, "too_many_images", message + "(--max-images).", param=given[most].param)


def _given(messages: Sequence[Message]) -> Iterator[GivenImage]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(image := part.get("image"), GivenImage):
                yield image


def _with_ids(message: Message, left: Iterator[int]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [
        {"type": "image", "image": next(left)} if isinstance(part.get("image"), GivenImage) else part
        for part in content
    ]
    return {**message, "content": parts}


def _store(context: Context, first: GivenImage) -> ImageStore:
    if context.images is not None:
        return context.images
    if not first.part:
        raise invalid(f"`{first.param}` cannot be used here: this model reads text alone. Leave it out.", first.param)
    name = f"{first.part}.type"
    raise invalid(f"`{name}` is that of an image; this model reads text alone: send parts of type 'text'.", name)


async def _image(
    context: Context, store: ImageStore, data: bytes, param: str, detail: Detail, decoding: asyncio.Event
) -> Image:
    tenant = current_tenant()

    def make_key() -> ContentKey:
        return ContentKey.of(tenant, data, detail, store.vision.settings)

    key = await in_pool(context, make_key) if store.may_know(tenant, len(data)) else None
    if key is not None and (known := store.find(key)) is not None:
        return known
    most = int(context.config.max_image_megapixels * _MEGAPIXEL)
    preparing = asyncio.ensure_future(store.pool.run(tenant, lambda: store.vision.prepare(decode(data, most), detail)))
    decoding.set()
    preparing.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it
    try:
        if key is None:  # a millisecond or so, beside the decoder
            key = await in_pool(context, make_key)
            if (known := store.find(key)) is not None:
                return known
        prepared = await preparing
    except EngineError as error:
        raise at_field(error, param) from error
    finally:
        preparing.cancel()
    hold_more(context, prepared.pixels.nbytes)  # a file of a few kilobytes may have millions of them
    image = store.take(key, prepared, len(data))
    context.engine.look_ahead(image)
    return image


def _scheme(url: str) -> str:
    return url[: max(url.find(":"), 0)].lower()


def _is_inline(given: GivenImage) -> bool:
    return _scheme(given.url.strip()) == "data"


async def _data(context: Context, given: GivenImage, files: AsyncIterator[bytes]) -> bytes:
    """The bytes of a file that the request holds, or of the next of those elsewhere."""
    if not _is_inline(given):
        return await anext(files)
    url = given.url.strip()
    if len(url) <= _SHORT_URL:
        return _inline(url, given.param)
    return await in_pool(context, lambda: _inline(url, given.param))


async def _fetched(context: Context, given: GivenImage) -> bytes:
    """The bytes of a file that is elsewhere."""
    url = given.url.strip()
    scheme = _scheme(url)
    most = int(context.config.max_image_mb * 2**20)
    try:
        if scheme == "file":
            return await read_below(context.config.image_dir, url, most)
        if scheme in ("http", "https"):
            return await Fetcher(context.config.allow_image_hosts, most).fetch(url)
    except NotFetched as error:
        code = "image_url_refused" if isinstance(error, Refused) else "invalid_image_url"
        raise ApiError(400, code, f"`{given.param}` {error}.", param=given.param) from error
    hint = "" if ":" in url[:10] or len(url) < 100 else " Base64 alone is none: put data:image/png;base64, before it."
    message = f"`{given.param}` must be a data:, https: or file: URL, not {shorten(repr(url))}.{hint}"
    raise ApiError(400, "invalid_image_url", message, param=given.param)


def _inline(url: str, param: str) -> bytes:
    """The media type is a hint: the file itself says what it is."""
    comma = url.find(",")
    kind = url[len("data:") : max(comma, 0)].lower()
    if comma < 0 or not kind.endswith(";base64") or not kind.startswith(_MEDIA):
        message = f"`{param}` must be a data: URL of an image in base64, such as data:image/png;base64,iVBOR…"
        raise ApiError(400, "invalid_image_url", message, param=param)
    try:
        try:
            return from_base64(url, comma + 1, blanks=True)
        except ValueError:
            return from_base64(_mended(url[comma + 1 :]))
    except ValueError:
        message = f"`{param}` is not valid base64."
        raise ApiError(400, "invalid_image_url", message, param=param) from None


def _mended(text: str) -> str:
    """Some write base64 with the letters of URLs, or quoted as in one, or leave its end out."""
    plain = "".join(unquote(text).split()).translate(_PLAIN).rstrip("=")
    return plain + "=" * (-len(plain) % 4)


def spelling_of_images(context: Context) -> tuple[str, str] | None:
    """What a template writes for an image, and the same with the text around it that the model knows it by. Text is
    tokenised with what is beside it, so it must be there before. None: the model knows images without any."""
    if context.images is None or (around := context.images.vision.around) is None:
        return None
    written = context.text.tokenizer.token_text(context.images.vision.image_token)
    return written, f"{around[0]}{written}{around[1]}"


# --- images in tokens ----------------------------------------------------------------------------------------------


def images_in(messages: Iterable[Message], known: Iterable[Image]) -> list[Image]:
    """The images of messages that were looked at, in their order. REQUIRES: `known` has them"""
    by_id = {image.first_id: image for image in known}
    parts = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [by_id[part["image"]] for content in parts for part in content if part.get("type") == "image"]


def merged(*groups: Iterable[Image]) -> tuple[Image, ...]:
    """Each image once."""
    return tuple({image.first_id: image for group in groups for image in group}.values())


def unfolded(context: Context, token_ids: Sequence[int], images: Sequence[Image], param: str) -> tuple[int, ...]:
    """The tokens with those of images in the places that the template left for them."""
    if context.images is None:
        return tuple(token_ids)
    places = token_ids.count(token := context.images.vision.image_token)
    if places != len(images):
        spelled = context.text.tokenizer.token_text(token)
        raise invalid(
            f"`{param}` has {len(images)} image(s), and the chat template leaves {places} place(s) for them: text must "
            f"not hold {spelled!r}, and the model's template must show images where they are sent.",
            param,
        )
    if not images:
        return tuple(token_ids)
    whole: list[int] = []
    left = iter(images)
    for given in token_ids:
        whole += next(left).token_ids if given == token else (given,)
    return tuple(whole)


def shown_ids(context: Context, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
    """As clients see them: the model's own token for images in the place of each of their rows, and 0 for rows that
    were given."""
    if not images:
        return list(token_ids)
    token = 0
    if context.images is not None:
        vision = context.images.vision
        token = vision.image_token if vision.row_token is None else vision.row_token
    given = {id_ for image in images if not image.is_seen for id_ in image.token_ids}
    return [(0 if id_ in given else token) if id_ >= FIRST_ID else id_ for id_ in token_ids]


class Folded:
    """A parent's tokens with one token for each image."""

    def __init__(self, context: Context, choice: ParentChoice, images: Sequence[Image]) -> None:
        self._token = None if context.images is None else context.images.vision.image_token
        self._ends: list[int] = []  # by folded token: where it ends among the parent's
        self._images: list[int] = []  # folded tokens that are images
        ids: list[int] = []
        by_id = {image.first_id: image for image in images}
        at, whole = 0, choice.token_ids
        for begin, image in _runs(whole, by_id):
            ids += whole[at:begin]
            self._ends += range(at + 1, begin + 1)
            at = begin + len(image.token_ids)
            self._images.append(len(ids))
            ids.append(self._token or 0)
            self._ends.append(at)
        ids += whole[at:]
        self._ends += range(at + 1, len(whole) + 1)
        self.token_ids = tuple(ids)

    def length_of(self, length: int) -> int:
        """Folded tokens of the parent's first `length`. REQUIRES: no image is cut there"""
        return sum(end <= length for end in self._ends)

    def num_images(self, length: int) -> int:
        """Among the first `length` folded tokens."""
        return sum(at < length for at in self._images)

    def end_of(self, length: int) -> int:
        """How many of the parent's tokens the first `length` folded ones are."""
        return self._ends[length - 1] if length else 0


def _runs(token_ids: Sequence[int], by_id: Mapping[int, Image]) -> Iterator[tuple[int, Image]]:
    """Where the tokens of each image begin, text that belongs to it included."""
    for at, token in enumerate(token_ids):
        if token >= FIRST_ID and (image := by_id.get(token)) is not None:
            yield at - image.token_ids.index(token), image


def extend_seen(
    context: Context,
    choice: ParentChoice,
    limit: int,
    prompt_text: str,
    whole: Conversation,
    known: Sequence[Image],
) -> Extension:
    """`extend` of a conversation that may have images, those of `choice` among `known`."""
    tokenizer, text = context.text.tokenizer, whole.prompt_text
    if context.images is None:
        return extend(tokenizer, choice, limit, prompt_text, text)
    images, fold = images_in(whole.messages, known), Folded(context, choice, known)
    num_prompt, most = fold.length_of(choice.num_prompt), fold.length_of(limit)
    folded = ParentChoice(fold.token_ids, num_prompt, len(fold.token_ids))
    extension = extend(tokenizer, folded, most, prompt_text, text)
    behind = images[fold.num_images(extension.at) :]
    return Extension(fold.end_of(extension.at), unfolded(context, extension.suffix_ids, behind, "messages"))
