"""Errors of a request: codes and numbers. Their text is a short statement for those who use the engine without a
server; what clients of the server read is worded there (server/errors), by `reason`.

EngineError
├── InvalidRequest            the client must change something (400)
│   ├── ContextLengthExceeded
│   ├── GrammarTooLarge       more work for each token than the others can wait for
│   ├── InvalidAudio          no audio, a format that is not read, or too long
│   ├── InvalidImage          no image, a format that is not read, or broken
│   │   └── ImageTooLarge     of too many pixels
│   ├── RetentionTooLarge     more than the whole budget
│   ├── InvalidEstate         cut short, changed on its way, or never one
│   ├── EstateMismatch        of another model, cache or tenant
│   ├── ContinuationMismatch  a child of another adapter than its parent
│   ├── InvalidAdapter        files that are no LoRA, or one of another model
│   └── AnswerTooLarge        hidden states of more bytes than this server holds for one answer
├── AdapterNotFound           not loaded here, or not any more (404)
├── AdapterInUse              requests or leases need it (409)
├── QueueFull                 try again later (429)
├── InsufficientRetention     leases of others fill the budget (429)
├── ParentNotFound            never seen, forgotten, another tenant's (404)
│   └── ParentExpired         known to have been here
├── ParentFailed              the parent produced nothing (409)
├── ParentLost                its lease was on a disk that failed (410)
├── NameInUse                 a record of the tenant has this name (409)
├── EngineBusy                requests are open (409)
├── DeadlineExceeded          still queued or in prefill at the deadline (504)
├── InternalError             a bug or a device fault in this request alone (500)
└── EngineUnavailable         no engine will answer this (503)
    ├── EngineDraining
    ├── EngineAsleep          until it is woken
    └── EngineDead
"""

from __future__ import annotations

from collections.abc import Mapping


class EngineError(Exception):
    """`code` is the kind of the failure, `reason` the case of it, for whoever words it anew; "" if the text says all.
    `field` names the part of the request at fault, `details` holds numbers that programs read, `facts` what else a
    sentence of the same meaning needs."""

    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str | None = None,
        details: Mapping[str, object] | None = None,
        **facts: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.field = field
        self.details = dict(details or {})
        self.facts = facts


class InvalidRequest(EngineError):
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


def context_exceeded(prompt: int, more: int, limit: int, *, counted: bool = True) -> ContextLengthExceeded:
    """`prompt` tokens and `more` behind them, where the model takes `limit`; not `counted`: there are at least so many
    in the prompt."""
    # A prompt that takes less than half of the room is not at fault: then the sentence says how to ask for less.
    is_short = 2 * prompt < limit
    return ContextLengthExceeded(
        f"{prompt} tokens and {more} behind them are more than the model's {limit}.",
        reason="context_not_counted" if not counted else "completion_too_long" if is_short else "context_length",
        details={"max_model_len": limit, "prompt_tokens": prompt, "max_tokens": more},
        total=prompt + more,
        room=limit - prompt,
    )


class GrammarTooLarge(InvalidRequest):
    code = "grammar_too_large"


class InvalidAudio(InvalidRequest):
    """details: limit, seconds (of audio that is too long)"""

    code = "invalid_audio"


class InvalidImage(InvalidRequest):
    code = "invalid_image"


class ImageTooLarge(InvalidImage):
    """details: width, height, max_pixels"""

    code = "image_too_large"


class QueueFull(EngineError):
    """details: max_queued, retry_after (seconds)"""

    code = "queue_full"


class RetentionTooLarge(InvalidRequest):
    """details: budget, needed"""

    code = "retention_too_large"


class AnswerTooLarge(InvalidRequest):
    """details: budget, needed (bytes)"""

    code = "answer_too_large"


class InvalidEstate(InvalidRequest):
    code = "invalid_estate"


class EstateMismatch(InvalidRequest):
    """details: differs (names of what is not the same)"""

    code = "estate_mismatch"


class InvalidAdapter(InvalidRequest):
    code = "invalid_adapter"


class ContinuationMismatch(InvalidRequest):
    code = "continuation_mismatch"


class AdapterNotFound(EngineError):
    code = "model_not_found"


class AdapterInUse(EngineError):
    """details: requests, leases (ids, some of them), num_requests, num_leases"""

    code = "adapter_in_use"


class InsufficientRetention(EngineError):
    """details: budget_blocks, used_blocks, needed_blocks, earliest_expiry (seconds since 1970, or null)"""

    code = "insufficient_retention"


class ParentNotFound(EngineError):
    code = "continuation_parent_not_found"


class ParentExpired(ParentNotFound):
    """details: expired_at (seconds since 1970)"""

    code = "continuation_parent_expired"


class ParentElsewhere(EngineError):
    """details: replica (who has it)"""

    code = "wrong_replica"


class ParentFailed(EngineError):
    code = "continuation_parent_failed"


class ParentLost(EngineError):
    code = "continuation_parent_lost"


class NameInUse(EngineError):
    """details: id, status ("running" or "retained")"""

    code = "request_id_in_use"


class EngineBusy(EngineError):
    code = "engine_busy"


class DeadlineExceeded(EngineError):
    code = "deadline_exceeded"


class InternalError(EngineError):
    code = "internal_error"


class EngineUnavailable(EngineError):
    code = "engine_dead"


class EngineDraining(EngineUnavailable):
    code = "draining"


class EngineAsleep(EngineUnavailable):
    code = "sleeping"


class EngineDead(EngineUnavailable):
    code = "engine_dead"


class ModelError(Exception):
    """A model cannot be loaded: says which file, tensor or field, and what would do. Ends the start-up."""
