"""POST /v1/score and /v1/rerank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from aiohttp import web

from bequest.engine.types import Usage
from bequest.server.answers.usage import usage_object
from bequest.server.asks.call import HttpCall, begin
from bequest.server.asks.prompts import encode
from bequest.server.asks.terms import passing_terms
from bequest.server.doors.ranking.body import (
    Pair,
    PairsBody,
    RerankBody,
    ScoreBody,
    check_method,
    method_of,
    rerank_pairs,
    score_pairs,
)
from bequest.server.doors.ranking.relevance import Judge
from bequest.server.doors.ranking.similarity import Embedder
from bequest.server.transport.replies import json_response
from bequest.server.transport.work import apart

_Body = TypeVar("_Body", bound=PairsBody)


async def score(http: web.Request) -> web.Response:
    call = await begin(http, ScoreBody, "score-")
    body = call.body
    scores, usages = await _scored(call, await apart(call.context, lambda: score_pairs(body)), ("text_1", "text_2"))
    answer = {
        "id": call.id,
        "object": "list",
        "created": int(time.time()),
        "model": call.model,
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
        "usage": usage_object(usages),
    }
    return json_response(answer, call.headers)


async def rerank(http: web.Request) -> web.Response:
    """The best come first; of equal ones that which was sent first."""
    call = await begin(http, RerankBody, "rerank-")
    body = call.body
    pairs = await apart(call.context, lambda: rerank_pairs(body))
    scores, usages = await _scored(call, pairs, ("query", "documents"))
    order = sorted(range(len(pairs)), key=lambda index: -scores[index])[: body.top_n]
    results = [_result(index, scores[index], pairs[index] if body.return_documents else None) for index in order]
    usage = usage_object(usages)
    billed = {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": usage["prompt_tokens"]}}
    answer = {"id": call.id, "model": call.model, "results": results, "usage": usage, "meta": billed}
    return json_response(answer, call.headers)


def _result(index: int, score: float, shown: Pair | None) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "relevance_score": score}
    return found if shown is None else {**found, "document": {"text": shown.document}}


async def _scored(
    call: HttpCall[_Body], pairs: Sequence[Pair], fields: tuple[str, str]
) -> tuple[list[float], list[Usage]]:
    """A score for each pair, and what they cost. `fields` are the names of queries and of documents."""
    context, body = call.context, call.body
    method = method_of(body, context.engine.info.encoder is not None)
    check_method(body, method)
    terms = passing_terms(call, body.timeout, body.priority, body.cache_salt or "")
    context.engine.check_room(terms.tenant)
    if body.max_tokens_per_doc is not None:
        pairs = await _shortened(call, pairs, body.max_tokens_per_doc)
    if method == "embedding":
        embedder = Embedder(context, terms, body.pooling)
        return await embedder.scores(pairs, fields), embedder.usages
    judge = Judge(context, call.id, terms, body.instruction, fields[1])
    try:
        return await judge.scores(pairs), judge.usages
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one is enough to tell


async def _shortened(call: HttpCall[_Body], pairs: Sequence[Pair], most: int) -> list[Pair]:
    """Documents of so many tokens at most, from their beginning."""
    context, tokenizer = call.context, call.context.text.tokenizer
    tokens = await encode(context, [pair.document for pair in pairs], add_special_tokens=False)

    def work() -> list[Pair]:
        return [
            pair if len(ids) <= most else Pair(pair.query, tokenizer.decode(ids[:most]))
            for pair, ids in zip(pairs, tokens, strict=True)
        ]

    return await apart(context, work)
