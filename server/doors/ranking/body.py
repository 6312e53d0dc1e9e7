"""Bodies of scores and ranks: Jina's, Cohere's and vLLM's fields, and what they mean here."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from bequest.server.wire.errors import ApiError, invalid, missing, unsupported
from bequest.server.wire.fields import Rules
from bequest.server.wire.reading import describe, shorten

MOST_PAIRS = 1024
Method = Literal["relevance", "embedding"]
METHODS: tuple[Method, ...] = ("relevance", "embedding")

_NOT_HERE = {
    "add_special_tokens": ((), "the prompt is made here"),
    "truncate_prompt_tokens": ((), "use `max_tokens_per_doc`, which shortens documents"),
    "stream": ((False,), "the answer comes whole"),
}


class PairsBody(msgspec.Struct, frozen=True, kw_only=True):
    rules: ClassVar[Rules] = Rules(_NOT_HERE)

    model: str | None = None
    method: str | None = None
    instruction: str | None = None
    pooling: str | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    # Advisory
    user: str | None = None


class ScoreBody(PairsBody, frozen=True, kw_only=True):
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


class RerankBody(PairsBody, frozen=True, kw_only=True):
    query: str | dict[str, Any] | None = None
    documents: list[str | dict[str, Any]] | None = None
    top_n: int | None = None
    return_documents: bool = True


class Pair(msgspec.Struct, frozen=True):
    query: str
    document: str


def method_of(body: PairsBody, has_encoder: bool) -> Method:
    """What decides if the body does not: a model that reads with an encoder has no yes and no to say."""
    if body.method is None:
        return "embedding" if has_encoder else "relevance"
    for method in METHODS:
        if body.method == method:
            if method == "relevance" and has_encoder:
                raise unsupported("method", "`method` must be 'embedding' with an encoder-decoder model.")
            return method
    raise invalid(f"`method` must be 'relevance' or 'embedding', not {shorten(repr(body.method))}.", "method")


def check_method(body: PairsBody, method: Method) -> None:
    """What belongs to the other one."""
    other = "pooling" if method == "relevance" else "instruction"
    if getattr(body, other) is not None:
        raise invalid(f"`{other}` cannot be used with the method '{method}'. Leave it out.", other)
    if body.max_tokens_per_doc is not None and body.max_tokens_per_doc < 1:
        message = f"`max_tokens_per_doc` must be at least 1, not {shorten(str(body.max_tokens_per_doc))}."
        raise invalid(message, "max_tokens_per_doc")


def score_pairs(body: ScoreBody) -> list[Pair]:
    """One text beside each of the other's, or as many of the one as of the other."""
    first, second = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
    if isinstance(body.text_1, str):
        first = first * len(second)
    elif isinstance(body.text_2, str):
        second = second * len(first)
    if len(first) != len(second):
        raise invalid(
            f"`text_1` has {len(first)} texts and `text_2` {len(second)}: send as many, or a single one of the two.",
            "text_2",
        )
    _check_count(len(first), "text_2")
    return [Pair(*texts) for texts in zip(first, second, strict=True)]


def rerank_pairs(body: RerankBody) -> list[Pair]:
    if body.query is None:
        raise missing("query")
    if not body.documents:
        raise missing("documents", "`documents` is missing or empty: send a list of texts.")
    if body.top_n is not None and body.top_n < 1:
        raise invalid(f"`top_n` must be at least 1, not {shorten(str(body.top_n))}.", "top_n")
    _check_count(len(body.documents), "documents")
    query = _text(body.query, "query")
    documents = [_text(given, f"documents[{index}]") for index, given in enumerate(body.documents)]
    return [Pair(query, document) for document in documents]


def _texts(given: str | list[str] | None, name: str) -> list[str]:
    if given is None:
        raise missing(name)
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise invalid(f"`{name}` is empty.", name)
    return [_text(text, name if isinstance(given, str) else f"{name}[{index}]") for index, text in enumerate(texts)]


def _text(given: str | dict[str, Any], path: str) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        message = f"`{path}` must be a text, or an object with `text`, not {describe(given)}."
        raise ApiError(400, "invalid_type", message, param=path)
    if not text.strip():
        raise invalid(f"`{path}` is empty.", path)
    return text


def _check_count(count: int, name: str) -> None:
    if count > MOST_PAIRS:
        raise invalid(f"`{name}` may hold {MOST_PAIRS} texts at most, not {count}: send several requests.", name)
