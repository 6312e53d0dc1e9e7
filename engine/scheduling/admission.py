"""Whether a request can be taken: what it asks for is there, fits, and the queue has room. Event-loop thread."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from bequest.engine.errors import InvalidRequest, QueueFull, context_exceeded
from bequest.engine.scheduling.policy.pace import Pace
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.state.sequence import Lane
from bequest.engine.types import ModelInfo, Request
from bequest.engine.types.encoder import check_encoder
from bequest.engine.types.image import image_spans, without_images


def check_admissible(
    request: Request, info: ModelInfo, scheduler: Scheduler, max_queued: int, paces: Mapping[Lane, Pace], now: float
) -> None:
    """Raises the EngineError that says why not. `paces`: how fast who waits moves on."""
    check_encoder(request.encoder, info.encoder)
    check_images(request, info, takes_embeds=scheduler.limits.takes_embeds)
    _check_tokens(request, info)
    prompt, limit = len(request.prompt_token_ids), info.max_model_len
    more = request.params.max_tokens + max(map(len, request.suffixes), default=0)
    if prompt + more > limit or prompt + 1 > limit + (more == 0):
        raise context_exceeded(prompt, more, limit)
    kind = scheduler.kind_of(request)
    kind.check(request, info, scheduler)
    check_room(request.tenant, kind.lane, scheduler, max_queued, paces[kind.lane], now)


def check_images(request: Request, info: ModelInfo, *, takes_embeds: bool) -> None:
    """Whether the model sees, and what is asked for can be told of images and of rows that are given."""
    if not request.images:
        return
    if not takes_embeds and not all(image.is_seen for image in request.images):
        raise InvalidRequest("No rows are taken instead of tokens.", reason="no_embeds", field="prompt_embeds")
    if info.vision is None and any(image.is_seen for image in request.images):
        raise InvalidRequest("This model does not see images.", reason="no_vision", field="images")
    if request.params.prompt_logprobs is not None:
        message = "Tokens of images have no log-probabilities."
        raise InvalidRequest(message, reason="images_without_logprobs", field="prompt_logprobs")
    if info.vision is None or not info.vision.together:
        return
    seen = [span for span in image_spans(request.prompt_token_ids, request.images) if span.image.is_seen]
    if (cut := next((span for span in seen if not span.is_whole), None)) is not None:
        raise InvalidRequest(
            f"Tokens {cut.begin} to {cut.end - 1} are part of an image; this model computes images at once.",
            reason="image_cut",
            details={"begin": cut.begin, "end": cut.end},
        )


def _check_tokens(request: Request, info: ModelInfo) -> None:
    """Those of a parent were looked at when it came, or were sampled."""
    new = request.prompt_token_ids[0 if request.terms.lineage is None else request.terms.lineage.at :]
    if request.images:
        new = without_images(new)
    encoded = () if request.encoder is None else request.encoder.token_ids
    info.check_tokens(new, encoded, *request.suffixes)


def check_room(tenant: str, lane: Lane, scheduler: Scheduler, max_queued: int, pace: Pace, now: float) -> None:
    """Whether work of the tenant may wait. Extractions and generations do not take each other's places."""
    kind, most = "requests", max_queued
    if lane is Lane.EXTRACTION:
        kind, most = "extractions", scheduler.limits.extraction.max_queued
    if not scheduler.queue_of(lane).has_room(tenant, most):
        seconds = math.ceil(pace.seconds_to_try_again(most, now))
        raise QueueFull(
            f"The queue is full: {most} {kind} wait.",
            reason="queue_full",
            details={"max_queued": most, "retry_after": seconds},
            kind=kind,
        )


def seed_of(request: Request, engine_seed: int) -> int:
    """64 bits: the client's seed, or one drawn from the engine's and the request's id."""
    if request.params.seed is not None:
        return request.params.seed & (2**64 - 1)
    digest = hashlib.blake2b(f"{engine_seed}/{request.id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
