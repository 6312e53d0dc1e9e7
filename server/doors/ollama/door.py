"""Ollama's API, as a door."""

from __future__ import annotations

from typing import Any

import msgspec

from bequest.server.door import Door, DoorRoute, Operation
from bequest.server.doors.ollama import models
from bequest.server.doors.ollama.body import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaModelBody,
)
from bequest.server.doors.ollama.embedding import embed, embeddings
from bequest.server.doors.ollama.errors import error_body
from bequest.server.doors.ollama.generating import chat, generate


class OllamaAnswer(msgspec.Struct):
    model: str
    created_at: str
    done: bool


class OllamaVectors(msgspec.Struct):
    model: str
    embeddings: list[list[float]]


class OllamaVector(msgspec.Struct):
    embedding: list[float]


class OllamaError(msgspec.Struct):
    error: str
    code: str
    param: str | None
    details: dict[str, Any]


def _told(summary: str, answer: type[msgspec.Struct], body: type[msgspec.Struct] | None = None) -> Operation:
    return Operation(summary, answer, body, error=OllamaError)


DOOR = Door(
    routes=(
        DoorRoute("POST", "/api/chat", chat, _told("Answers a conversation.", OllamaAnswer, OllamaChatBody)),
        DoorRoute("POST", "/api/generate", generate, _told("Answers a prompt.", OllamaAnswer, OllamaGenerateBody)),
        DoorRoute("POST", "/api/embed", embed, _told("Vectors of texts.", OllamaVectors, OllamaEmbedBody)),
        DoorRoute("POST", "/api/embeddings", embeddings, _told("A vector.", OllamaVector, OllamaEmbeddingsBody)),
        DoorRoute("GET", "/api/tags", models.tags, _told("The models.", models.OllamaModels)),
        DoorRoute("GET", "/api/ps", models.running, _told("The models that are loaded.", models.OllamaModels)),
        DoorRoute("POST", "/api/show", models.show, _told("One model.", models.OllamaModel, OllamaModelBody)),
        DoorRoute("POST", "/api/pull", models.pull, _told("Nothing.", models.OllamaStatus, OllamaModelBody)),
        DoorRoute("GET", "/api/version", models.version, _told("The version.", models.OllamaVersion)),
    ),
    paths=("/api",),
    error_form=error_body,
)
