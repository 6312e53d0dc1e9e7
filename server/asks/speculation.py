"""`speculation` and `prediction`: what may be guessed of an answer. No guess changes a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bequest.engine.types import ModelInfo
from bequest.engine.types.speculation import BY_MODEL, MOST_DRAFTED, DraftMethod, Speculation
from bequest.server.asks.messages import text_of
from bequest.server.asks.prompts import encode
from bequest.server.asks.ranges import between
from bequest.server.context import Context
from bequest.server.wire.bodies import ChatBody, SampledBody
from bequest.server.wire.errors import invalid, missing, unsupported

_METHODS: dict[str, DraftMethod | None] = {
    "auto": None,
    "off": "off",
    "ngram": "ngram",
    "suffix": "suffix",
    "draft": "draft",
    "eagle3": "eagle3",
    "mtp": "mtp",
}
_NOT_HERE = "This server's device checks no drafts; leave it out, answers are the same."
_NO_MODEL = "This server has no such draft model; leave it out, answers are the same."


def speculation_of(body: SampledBody, info: ModelInfo, prediction: tuple[int, ...] = ()) -> Speculation:
    given = body.speculation
    if given is None or given is True:
        return Speculation(prediction=prediction)
    if given is False:
        return Speculation(method="off")
    for name in given:
        if name not in ("method", "max_tokens"):
            raise invalid("`speculation` has `method` and `max_tokens`, no other fields.", f"speculation.{name}")
    method = "auto" if given.get("method") is None else given["method"]
    if not isinstance(method, str) or method not in _METHODS:
        raise invalid(f"`speculation.method` must be one of {', '.join(_METHODS)}.", "speculation.method")
    if method in ("ngram", "suffix") and info.drafts is None:
        raise unsupported("speculation.method", _NOT_HERE)
    model = None if info.drafts is None else info.drafts.model
    if method in BY_MODEL and (model is None or model.method != method):
        raise unsupported("speculation.method", _NO_MODEL)
    most = given.get("max_tokens")
    if most is not None:
        if not isinstance(most, int) or isinstance(most, bool):
            raise invalid("`speculation.max_tokens` must be an integer.", "speculation.max_tokens")
        between("speculation.max_tokens", most, 1, MOST_DRAFTED)
    return Speculation(method=_METHODS[method], most=most, prediction=prediction)


async def predicted(context: Context, body: ChatBody) -> tuple[int, ...]:
    """The tokens of a chat's `prediction`."""
    given = body.prediction
    if given is None:
        return ()
    if context.engine.info.drafts is None:
        raise unsupported("prediction", _NOT_HERE)
    text = _predicted_text(given)
    [ids] = await encode(context, [text], add_special_tokens=False)
    return tuple(ids)


def _predicted_text(given: Mapping[str, Any]) -> str:
    if given.get("type") != "content":
        raise invalid('`prediction.type` must be "content".', "prediction.type")
    if "content" not in given:
        raise missing(
            "prediction.content", "`prediction.content` is missing: the text that the answer is expected to be."
        )
    return text_of(given["content"], "prediction.content")
