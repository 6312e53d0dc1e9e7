"""Whether a mode gave what a fresh request gives. Fast and different is not fast.

With a tolerance, answers may differ where log-probabilities tie. Both sides took their best: if they computed the same
distribution, the values of their bests agree, whichever tokens these belong to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bequest.bench.client import Answer, Choice, Prompt
from bequest.bench.two_stage import JobResult, Mode, TwoStage


@dataclass(frozen=True, slots=True)
class Differences:
    """Jobs of a mode, by what was wrong with them."""

    stage1: int = 0  # sampled other tokens than the re-sending mode did
    stage2: int = 0  # answered otherwise than a fresh request with the same tokens
    leases: int = 0  # were not granted, or not honoured
    widest: float = 0.0  # how far the log-probabilities of stage 2 were apart, at most; infinite: not comparable

    def failing(self, tolerance: float) -> int:
        """Where ties may fall either way stage 1 may well sample something else; stage 2 is judged by what it got."""
        return self.stage2 + self.leases + (0 if tolerance else self.stage1)


async def check(
    bench: TwoStage, mode: Mode, results: Sequence[JobResult], references: Mapping[int, JobResult]
) -> Differences:
    """Compares with the re-sending mode's jobs; one whose stage 1 differs, or that has none, is sent afresh."""
    stage1 = stage2 = leases = 0
    widest = 0.0
    for result in results:
        reference = references.get(result.number)
        if reference is not None and reference.whole == result.whole:
            expected = reference.stage2
        else:
            stage1 += reference is not None
            expected = await bench.resend(result.whole)
        stage2 += not same(expected, result.stage2, bench.options.tolerance)
        widest = max(widest, gap(expected, result.stage2) or 0.0)
        leases += mode is Mode.LEASE and not lease_honoured(result, bench.workload.suffix)
    return Differences(stage1, stage2, leases, widest)


def same(expected: Answer, got: Answer, tolerance: float) -> bool:
    apart = gap(expected, got)
    return apart is None or 0 < tolerance >= apart


def gap(expected: Answer, got: Answer) -> float | None:
    """How far apart the log-probabilities of two answers are; None: they are equal, infinite: nothing compares."""
    if len(expected.choices) != len(got.choices):
        return math.inf
    if [choice.outcome for choice in expected.choices] == [choice.outcome for choice in got.choices]:
        return None
    if len(expected.choices) == 1:
        return _gap_where_they_part(expected.choices[0], got.choices[0])
    pairs = zip(expected.choices, got.choices, strict=True)
    return max(_apart(a.cumulative_logprob, b.cumulative_logprob) for a, b in pairs)


def lease_honoured(result: JobResult, suffix: Prompt) -> bool:
    """Nothing was recomputed: the new tokens, and the last one of stage 1, whose KV nobody had computed."""
    told = result.stage2.continuation
    if result.stage1.retained is None or told is None:
        return False
    if isinstance(suffix, str):
        before = result.stage1.usage["prompt_tokens"] + result.stage1.usage["completion_tokens"]
        suffix_len = result.stage2.usage["prompt_tokens"] - before
    else:
        suffix_len = len(suffix)
    return told["source"] in ("blocks", "host") and told["computed_tokens"] == suffix_len + 1


def _gap_where_they_part(expected: Choice, got: Choice) -> float:
    """Greedy: after the first different token the two go their own ways."""
    if expected.token_ids is None or got.token_ids is None or len(expected.token_ids) != len(got.token_ids):
        return math.inf
    pairs = enumerate(zip(expected.token_ids, got.token_ids, strict=True))
    at = next((i for i, (a, b) in pairs if a != b), math.inf)
    if at >= min(len(expected.logprobs), len(got.logprobs)):
        return math.inf
    return _apart(expected.logprobs[int(at)], got.logprobs[int(at)])


def _apart(a: float | None, b: float | None) -> float:
    return math.inf if a is None or b is None else abs(a - b)
