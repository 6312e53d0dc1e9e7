"""Tokens that an answer took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bequest.engine.types import Usage


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
