"""What the engine tells its observer: a step that came back, a request that ended."""

from __future__ import annotations

from typing import Literal

from msgspec import structs

from bequest.engine.state.launch import Launch
from bequest.engine.state.sequence import Applied, Group
from bequest.engine.types import StepResult, Usage
from bequest.engine.types.image import StepImages
from bequest.engine.watching.observation import RequestStats, StepStats


def usage_of(group: Group) -> Usage:
    """What a finished request took."""
    kind = group.kind
    usage = Usage(kind.num_prompt_tokens, kind.completion_tokens, group.ties.cached_tokens)
    if not group.request.speculation.prediction:
        return usage
    right, wrong = kind.predicted
    return structs.replace(usage, predicted_tokens=right, mispredicted_tokens=wrong)


def stats_of_step(launch: Launch, result: StepResult, applied: Applied) -> StepStats:
    seen, num_bytes, found = (0, 0, 0) if launch.plan.images is None else _images_of(launch.plan.images)
    return StepStats(
        prompt_tokens=launch.num_prompt_tokens + sum(run.input.length for run in launch.plan.encoders),
        generated_tokens=applied.num_generated,
        preempted=launch.num_preempted,
        swapped_out=len(launch.plan.moves.swaps_out),
        swapped_in=len(launch.plan.moves.swaps_in),
        seconds=result.device_seconds,
        first_token_seconds=tuple(applied.first_token_seconds),
        inter_token_seconds=tuple(applied.inter_token_seconds),
        drafts=applied.num_drafts,
        drafted_tokens=applied.num_drafted,
        accepted_tokens=applied.num_right,
        experts=result.experts,
        images_seen=seen,
        image_bytes=num_bytes,
        images_found=found - launch.images_ahead,
    )


def _images_of(images: StepImages) -> tuple[int, int, int]:
    """How many the tower looks at, their bytes, and how many are found."""
    looked_at = [image for image in images.looked_at if image.is_seen]
    seen = {image.first_id for image in looked_at}
    found = {rows.image for rows in images.gathered} - {image.first_id for image in images.looked_at}
    return len(seen), sum(image.content.nbytes for image in looked_at), len(found)


def stats_of_request(group: Group, reason: Literal["stop", "length", "abort", "error"], now: float) -> RequestStats:
    times = group.times
    admitted = times.admitted if times.admitted is not None else now
    first = times.first_token if times.first_token is not None else now
    return RequestStats(
        reason=reason,
        prompt_tokens=group.kind.num_prompt_tokens,
        cached_tokens=group.ties.cached_tokens,
        completion_tokens=group.kind.completion_tokens,
        max_tokens=group.request.params.max_tokens,
        n=group.request.params.n,
        queue_seconds=admitted - times.arrived,
        prefill_seconds=first - admitted,
        decode_seconds=now - first,
        total_seconds=now - times.arrived,
        inheritance=group.ties.inheritance,
        id=group.request.id,
    )
