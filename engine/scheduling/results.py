"""Applies the result of a step to whom it concerns. Pure of I/O.

A sequence that ended or left since the launch is passed over: a step launched past its end changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bequest.engine.state.launch import Launch
from bequest.engine.state.sequence import Applied, Group, Sample, Sequence, Status
from bequest.engine.types import StepResult


def apply_result(launch: Launch, result: StepResult, now: float) -> Applied:
    applied = Applied(now)
    for expectation in launch.expected:
        expectation.apply(result, applied)
    return applied


@dataclass(frozen=True, slots=True)
class Samples:
    """The tokens that a step samples."""

    sequences: tuple[Sequence, ...]  # as the plan's samples, up to those of beams
    drafts: tuple[int, ...] | None  # as the sequences: the token that was guessed to follow; None: the step has none

    def apply(self, result: StepResult, applied: Applied) -> None:
        tokens, bad, logprobs = result.tokens.tolist(), result.bad_rows.tolist(), result.logprobs
        numbers = range(len(self.sequences)) if self.drafts is None else self._accepted(tokens)
        for i in numbers:
            sequence = self.sequences[i]
            if self.drafts is None:
                sequence.num_in_flight -= 1
            if sequence.status is not Status.FINISHED and sequence.group not in applied.failed:
                sequence.work.take_sample(sequence, Sample(tokens[i], bad[i], i, logprobs), applied)

    def _accepted(self, tokens: list[int]) -> Iterator[int]:
        """The samples that count: those of a sequence until the first that is not what was guessed."""
        assert self.drafts is not None
        begin = 0
        while begin < len(self.sequences):
            sequence, end = self.sequences[begin], begin + 1
            while end < len(self.sequences) and self.sequences[end] is sequence:
                end += 1
            last = next(i for i in range(begin, end) if i == end - 1 or tokens[i] != self.drafts[i])
            sequence.settle_samples(num_sampled=end - begin, num_accepted=last + 1 - begin)
            yield from range(begin, last + 1)
            begin = end


@dataclass(frozen=True, slots=True)
class PromptLogprobsOf:
    """A step tells log-probabilities of a prompt."""

    group: Group
    number: int  # in the result

    def apply(self, result: StepResult, applied: Applied) -> None:
        if not self.group.closed and self.group.prompt_logprobs is not None:
            self.group.prompt_logprobs.receive(result.prompt_logprobs[self.number])
