"""Tokens that an answer took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bequest.engine.types import Usage


def usage_object(usages: Sequence[Usage], thought_tokens: int | None = None) -> dict[str, Any]:
    """`thought_tokens`: those among the completion's; None: the model shows no thoughts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
    details = {} if thought_tokens is None else {"reasoning_tokens": thought_tokens}
    if predicted := [usage.predicted_tokens for usage in usages if usage.predicted_tokens is not None]:
        details["accepted_prediction_tokens"] = sum(predicted)
        details["rejected_prediction_tokens"] = sum(usage.mispredicted_tokens for usage in usages)
    return {**told, "completion_tokens_details": details} if details else told
