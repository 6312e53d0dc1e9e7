"""Tokens that an answer took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bequest.engine.types import Usage


def usage_object(usages: Sequence[Usage], thought_tokens: int | None = None) -> dict[str, Any]:
    """`thought_tokens`: those among the completion's; None: the model shows no thoughts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    thoughts = {} if thought_tokens is None else {"completion_tokens_details": {"reasoning_tokens": thought_tokens}}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        **thoughts,
    }
