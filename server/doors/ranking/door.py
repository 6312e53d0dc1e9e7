"""Scores and ranks, as vLLM, Jina and Cohere have them: a door whose errors look as everywhere."""

from __future__ import annotations

from typing import Any

import msgspec

from bequest.server.door import Door, DoorRoute, Operation
from bequest.server.doors.ranking.body import RerankBody, ScoreBody
from bequest.server.doors.ranking.ranking import rerank, score
from bequest.server.wire.errors import ApiError


class Scores(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: dict[str, Any]


class Ranks(msgspec.Struct):
    id: str
    model: str
    results: list[dict[str, Any]]
    usage: dict[str, Any]
    meta: dict[str, Any]


_SCORE = Operation("How well texts go together.", Scores, ScoreBody)
_RERANK = Operation("Documents in the order in which they answer a query.", Ranks, RerankBody)
DOOR = Door(
    routes=(
        *(DoorRoute("POST", path, score, _SCORE) for path in ("/v1/score", "/score")),
        *(DoorRoute("POST", path, rerank, _RERANK) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    ),
    paths=(),
    error_form=ApiError.body,
)
