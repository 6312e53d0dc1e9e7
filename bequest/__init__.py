"""Bequest: an LLM inference server whose finished requests bequeath their KV cache.

    from bequest import LLM, SamplingParams

Everything that is installed lives under this name. The folders of the repository lie beside it, and links in here lead
to them. The names below are imported when they are first used: the HTTP front must start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bequest.engine.llm import LLM, Completion
    from bequest.engine.types import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bequest.engine import llm

    return getattr(llm, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
