"""The engine without a server, for scripts and notebooks: LLM, its asynchronous twin, and what they give back.

Arguments become the bodies that a client would send, and take the server's way to the engine: every rule, default and
sentence is the same.
"""

from __future__ import annotations

from bequest.engine.errors import ModelError
from bequest.offline.answers import Choice, Completion, Piece, Score, States
from bequest.offline.async_llm import AsyncCompletion, AsyncLLM, AsyncStream
from bequest.offline.errors import BequestError, EngineFailed, RequestError
from bequest.offline.llm import LLM, Stream, SyncCompletion
from bequest.offline.params import Options, SamplingParams

__all__ = [
    "LLM",
    "AsyncCompletion",
    "AsyncLLM",
    "AsyncStream",
    "BequestError",
    "Choice",
    "Completion",
    "EngineFailed",
    "ModelError",
    "Options",
    "Piece",
    "RequestError",
    "SamplingParams",
    "Score",
    "States",
    "Stream",
    "SyncCompletion",
]
