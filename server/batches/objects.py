"""Batches as clients see them."""

from __future__ import annotations

from typing import Any

from bequest.server.stores.batches import Batch
from bequest.server.wire.errors import ApiError


def shown(batch: Batch) -> dict[str, Any]:
    """The batch as clients see it."""
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    tokens = batch.tokens
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{name}_at": batch.times.get(f"{name}_at") for name in times},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": tokens.input,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.output,
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
            "total_tokens": tokens.input + tokens.output,
        },
        "metadata": batch.metadata,
    }


def why_unkept(error: Exception) -> dict[str, Any]:
    """Why a batch ended whose answers could not be kept."""
    if isinstance(error, ApiError):
        return {"code": error.code, "message": error.message, "param": None, "line": None}
    message = "The answers could not be written to the server's disk."
    return {"code": "disk_error", "message": message, "param": None, "line": None}
