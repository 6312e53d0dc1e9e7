"""`input`: what hidden states and embeddings are computed of. Embeddings may be of conversations, too, and of objects
with a text and an image."""

from __future__ import annotations

from typing import Any

from bequest.server.asks.chats import ChatSource, check_not_rendered
from bequest.server.asks.image_parts import GivenImage
from bequest.server.asks.images import check_count as check_images
from bequest.server.asks.messages import string_at, wrong_type
from bequest.server.asks.prompt import Truncation
from bequest.server.asks.prompts import TextSource
from bequest.server.context import Context
from bequest.server.wire.bodies import EmbeddingsBody, HiddenStatesBody, InputField, PromptField
from bequest.server.wire.errors import ApiError, invalid, missing
from bequest.server.wire.reading import shorten

_MOST_INPUTS = 2048  # OpenAI's limit of embeddings
_PARTS = ("text", "image")


def check_count(given: PromptField | InputField | None) -> None:
    if isinstance(given, list) and len(given) > _MOST_INPUTS and not isinstance(given[0], int):
        count = len(given)
        raise invalid(f"`input` may hold {_MOST_INPUTS} inputs at most, not {count}: send several requests.", "input")


def input_source(
    body: HiddenStatesBody | EmbeddingsBody, given: PromptField | InputField | None, hint: str = ""
) -> TextSource:
    return TextSource(
        given=given, field="input", special=body.add_special_tokens, truncation=_truncation(body), hint=hint
    )


def _truncation(body: HiddenStatesBody | EmbeddingsBody) -> Truncation:
    """Nothing is generated, so that an input may fill the context."""
    return Truncation(body.truncate_prompt_tokens, completion=0, side=body.truncation_side)


def chat_sources(context: Context, body: EmbeddingsBody) -> list[ChatSource] | None:
    """The conversations that a body has, each of which is an input: `messages` are one, and each object of `input` is
    a message. None: its inputs are text or tokens."""
    if body.messages is not None:
        if body.input not in (None, "", []):  # the official client insists on sending one
            raise invalid("`input` and `messages` exclude each other: send one of them.", "input")
        return [_chat(body, body.messages, "messages")]
    if body.input is None:
        raise missing("input", "`input` is missing: send texts, token ids or objects, or a conversation as `messages`.")
    given = [body.input] if isinstance(body.input, dict) else body.input
    if not isinstance(given, list) or not any(isinstance(item, dict) for item in given):
        check_not_rendered(body, "input")
        return None
    alone = isinstance(body.input, dict)
    messages = [_message(item, "input" if alone else f"input[{index}]") for index, item in enumerate(given)]
    check_images(context, [part["image"] for message in messages for part in message["content"] if "image" in part])
    return [_chat(body, [message], "input") for message in messages]


def _chat(body: EmbeddingsBody, messages: list[dict[str, Any]], field: str) -> ChatSource:
    return ChatSource(
        given=messages,
        field=field,
        template=body.chat_template,
        template_kwargs=body.chat_template_kwargs,
        opens=bool(body.add_generation_prompt),
        continues=body.continue_final_message,
        special=bool(body.add_special_tokens),
        truncation=_truncation(body),
        image_kwargs=body.mm_processor_kwargs,
    )


def _message(item: object, path: str) -> dict[str, Any]:
    """An image and a text as a user's message, in this order."""
    if not isinstance(item, dict):
        raise wrong_type(path, "an object with `text`, `image` or both, as others are")
    given = {name: value for name, value in item.items() if value is not None}
    if (other := next((name for name in given if name not in _PARTS), None)) is not None:
        at = f"{path}.{shorten(other)}"
        raise ApiError(400, "unknown_parameter", f"`{at}` is not known here; there are `text`, `image`.", param=at)
    if not given:
        raise missing(f"{path}.text", f"`{path}` is empty: it must have `text`, `image` or both.")
    parts: list[dict[str, Any]] = []
    if "image" in given:
        place = GivenImage(string_at(given, "image", path), f"{path}.image")
        parts.append({"type": "image", "image": place})
    if "text" in given:
        parts.append({"type": "text", "text": string_at(given, "text", path)})
    return {"role": "user", "content": parts}
