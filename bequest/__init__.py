"""Bequest: an LLM inference server whose finished requests bequeath their KV cache.

    from bequest import LLM, SamplingParams

Everything that is installed lives under this name. The folders of the repository lie beside it, and links in here lead
to them. The names below are imported when they are first used: the HTTP front must start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bequest.engine.errors import ModelError
    from bequest.offline import (
        LLM,
        AsyncLLM,
        BequestError,
        Choice,
        Completion,
        EngineFailed,
        Piece,
        RequestError,
        SamplingParams,
        Score,
        States,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BequestError",
    "Choice",
    "Completion",
    "EngineFailed",
    "ModelError",
    "Piece",
    "RequestError",
    "SamplingParams",
    "Score",
    "States",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bequest import offline

    return getattr(offline, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
