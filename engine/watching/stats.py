"""What the engine tells its observer: a step that came back, a request that ended."""

from __future__ import annotations

from typing import Literal

from bequest.engine.scheduling.results import Applied
from bequest.engine.scheduling.sequence import Group
from bequest.engine.scheduling.step import Launch
from bequest.engine.types import StepResult
from bequest.engine.watching.observation import RequestStats, StepStats


def stats_of_step(launch: Launch, result: StepResult, applied: Applied) -> StepStats:
    return StepStats(
        prompt_tokens=launch.num_prompt_tokens + sum(run.input.length for run in launch.plan.encoders),
        generated_tokens=applied.generated_tokens,
        preempted=launch.num_preempted,
        swapped_out=len(launch.plan.moves.swaps_out),
        swapped_in=len(launch.plan.moves.swaps_in),
        seconds=result.device_seconds,
        first_token_seconds=applied.first_token_seconds,
        inter_token_seconds=applied.inter_token_seconds,
    )


def stats_of_request(group: Group, reason: Literal["stop", "length", "abort", "error"], now: float) -> RequestStats:
    admitted = group.admitted_at if group.admitted_at is not None else now
    first = group.first_token_at if group.first_token_at is not None else now
    return RequestStats(
        reason=reason,
        prompt_tokens=group.num_prompt_tokens,
        cached_tokens=group.cached_tokens,
        completion_tokens=group.completion_tokens,
        max_tokens=group.request.params.max_tokens,
        n=group.request.params.n,
        queue_seconds=admitted - group.arrived_at,
        prefill_seconds=first - admitted,
        decode_seconds=now - first,
        total_seconds=now - group.arrived_at,
        inheritance=group.inheritance,
    )
