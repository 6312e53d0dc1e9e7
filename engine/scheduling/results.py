"""Applies the result of a step to the sequences it concerns: tokens, log-probabilities, ends. Pure of I/O.

A sequence that ended or left since the launch is passed over: a step launched past its end changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.beams.search import Alternatives
from bequest.engine.constraints.grammar import UNSPELLABLE
from bequest.engine.errors import EngineError, GrammarTooLarge, InternalError, InvalidRequest
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.scheduling.sequence import Group, Sequence, Status
from bequest.engine.scheduling.step import Launch
from bequest.engine.types import (
    BeamSpec,
    FinishReason,
    LogprobArrays,
    SamplingParams,
    StepResult,
    StopReason,
    TokenLogprob,
)
from bequest.engine.types.hidden import Indices
from bequest.engine.types.states import StatesArray


@dataclass(frozen=True, slots=True)
class Applied:
    moved: tuple[Group, ...]  # have something to deliver, in the order of the plan
    failed: tuple[tuple[Group, EngineError], ...]
    generated_tokens: int  # sampled, and those of the answers of searches that ended
    first_token_seconds: tuple[float, ...]
    inter_token_seconds: tuple[float, ...]  # a step of a search is one token, however many beams it has


def apply_result(
    scheduler: Scheduler, launch: Launch, result: StepResult, eos_token_ids: tuple[int, ...], now: float
) -> Applied:
    scheduler.extractions.ran(launch, result.device_seconds)
    for group, arrays in zip(launch.prompt_logprobs, result.prompt_logprobs, strict=True):
        if not group.closed:
            _extend_prompt_logprobs(group, arrays)
    moved: dict[Group, None] = {}
    failed: dict[Group, EngineError] = {}
    first: list[float] = []
    inter: list[float] = []
    tokens = result.tokens.tolist()
    bad = result.bad_rows.tolist()
    for i, sequence in enumerate(launch.sampled):
        sequence.num_in_flight -= 1
        group = sequence.group
        if sequence.status is Status.FINISHED or sequence.owing or group in failed:
            continue
        if bad[i]:
            scheduler.distrust(sequence)
            failed[group] = _why_nothing_was_sampled(sequence)
            continue
        (inter if sequence.last_token_at else first).append(now - (sequence.last_token_at or group.arrived_at))
        sequence.last_token_at = now
        if group.first_token_at is None:
            group.first_token_at = now
        logprob = None
        if group.request.params.logprobs is not None and result.logprobs is not None:
            logprob = _logprob_of(result.logprobs, i, tokens[i], group.request.params.logprobs)
        _accept(scheduler, sequence, tokens[i], logprob, eos_token_ids)
        moved[group] = None
    num_generated = len(first) + len(inter)
    for number, (group, search) in enumerate(launch.beams):
        if group.closed or group.search is not search:
            continue
        if result.beams[number].bad:
            scheduler.distrust(group.sequences[0])
            failed[group] = InternalError("The model produced NaN for this request; it was stopped.")
            continue
        leader = group.sequences[0]
        before = leader.last_token_at or group.first_token_at  # it may have started again
        (inter if before else first).append(now - (before or group.arrived_at))
        leader.last_token_at = now
        if group.first_token_at is None:
            group.first_token_at = now
        top = group.request.params.logprobs
        alternatives = _alternatives(launch.plan.beams[number], result.logprobs, top)
        scheduler.advance_beams(group, result.beams[number], alternatives)
        if not group.sequences:
            failed[group] = InvalidRequest("No beam could be completed: nothing is allowed to follow.")
        elif group.finished:
            moved[group] = None
    for group in launch.prompt_ended:
        if not group.closed:
            for sequence in group.sequences:
                sequence.output.finish("length", None)
                scheduler.finish(sequence)
            moved[group] = None
    num_tapped = len(launch.tapped)
    for (sequence, positions), values in zip(launch.tapped, result.states[:num_tapped], strict=True):
        if sequence.status is not Status.FINISHED and sequence.group not in failed:
            _receive_states(scheduler, sequence, positions, values)
            if sequence.group.finished:
                moved[sequence.group] = None
    for (group, positions), values in zip(launch.encoded, result.states[num_tapped:], strict=True):
        if not group.closed and group not in failed:
            _receive_encoder_states(scheduler, group, positions, values)
            if group.finished:
                moved[group] = None
    num_generated += sum(group.completion_tokens for group in moved if group.request.params.beams is not None)
    return Applied(tuple(moved), tuple(failed.items()), num_generated, tuple(first), tuple(inter))


def _receive_states(scheduler: Scheduler, sequence: Sequence, positions: Indices, values: StatesArray) -> None:
    assert sequence.capture is not None
    sequence.capture.receive(positions, values)
    if sequence.capture.complete:
        _finish_owing(scheduler, sequence)


def _receive_encoder_states(scheduler: Scheduler, group: Group, positions: Indices, values: StatesArray) -> None:
    """All its choices have them in common; those that have ended meanwhile have waited for these alone."""
    capture = group.sequences[0].capture
    assert capture is not None
    capture.receive(positions, values)
    if capture.complete:
        for sequence in group.sequences:
            if sequence.owing:
                _finish_owing(scheduler, sequence)


def _finish_owing(scheduler: Scheduler, sequence: Sequence) -> None:
    if sequence.output.finish_reason is None:  # an extraction has no other end
        sequence.output.finish("length", None)
    scheduler.finish(sequence)


def _why_nothing_was_sampled(sequence: Sequence) -> EngineError:
    """A sampler row says that it found no token, not why. Where something must be left to sample, it is NaN."""
    params = sequence.group.request.params
    if sequence.matcher is not None and (why := sequence.matcher.failed) is not None:
        if why == UNSPELLABLE:
            return InvalidRequest(f"The grammar cannot be followed to its end: {why}.", param="structured_outputs")
        return GrammarTooLarge(f"The grammar became too large while it was followed: {why}.")
    excludes = params.min_tokens > 0 or bool(params.bad_words)
    allows = [part for part in (params.allowed_token_ids, params.grammar) if part is not None]
    if params.catalogue is None and len(allows) < 2 and not (allows and excludes):
        return InternalError("The model produced NaN for this request; it was stopped.")
    return InvalidRequest(
        "Nothing is allowed to follow: what a grammar, `catalogue` or `allowed_token_ids` allow, one of the others, "
        "`min_tokens` or `bad_words` exclude.",
        param=_narrowest(params),
    )


def _narrowest(params: SamplingParams) -> str:
    if params.catalogue is not None:
        return "catalogue"
    return "structured_outputs" if params.grammar is not None else "allowed_token_ids"


def _accept(
    scheduler: Scheduler, sequence: Sequence, token: int, logprob: TokenLogprob | None, eos: tuple[int, ...]
) -> None:
    """Adds one sampled token to its sequence and ends the sequence if the token does."""
    params = sequence.group.request.params
    closing = None if params.rules is None else params.rules.closing(params.max_tokens)
    if closing is not None and sequence.num_output + 1 == params.max_tokens:
        token = closing  # whatever was sampled
        logprob = None if logprob is None else TokenLogprob(token, 0.0, 1, logprob.top)
    scheduler.accept_token(sequence, token)
    ended: tuple[FinishReason, StopReason] | None = None
    if sequence.num_output >= params.min_tokens:
        if token in eos and params.ends_at_eos:
            ended = ("stop", None)
        elif token in params.stop_token_ids:
            ended = ("stop", token)
    shown = ended is None or params.include_stop_str_in_output
    stop_string = sequence.output.push(token, logprob, shown)
    if ended is None and stop_string is not None:
        ended = ("stop", stop_string)
    if ended is None and sequence.num_output >= params.max_tokens:
        ended = ("length", None)
    if ended is not None:
        sequence.output.finish(*ended)
        scheduler.end(sequence)


def _alternatives(spec: BeamSpec, arrays: LogprobArrays | None, top: int | None) -> list[Alternatives] | None:
    """The `top` likeliest tokens of each beam, if its request wants them."""
    if not top or arrays is None:
        return None
    rows = range(spec.first_sample, spec.first_sample + len(spec.scores))
    return [tuple(zip(arrays.top_ids[i, :top].tolist(), arrays.top[i, :top].tolist(), strict=True)) for i in rows]


def _logprob_of(arrays: LogprobArrays, i: int, token: int, top: int) -> TokenLogprob:
    best = zip(arrays.top_ids[i, :top].tolist(), arrays.top[i, :top].tolist(), strict=True)
    return TokenLogprob(token, float(arrays.chosen[i]), int(arrays.rank[i]), tuple(best))


def _extend_prompt_logprobs(group: Group, arrays: LogprobArrays) -> None:
    top = group.request.params.prompt_logprobs or 0
    done = len(group.prompt_logprobs)
    targets = group.request.prompt_token_ids[done : done + len(arrays.chosen)]
    group.prompt_logprobs.extend(_logprob_of(arrays, i, token, top) for i, token in enumerate(targets))
