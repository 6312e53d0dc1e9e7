"""Applies the result of a step to whom it concerns. Pure of I/O.

A sequence that ended or left since the launch is passed over: a step launched past its end changes nothing.
"""

from __future__ import annotations

import msgspec

from bequest.engine._C import take_samples
from bequest.engine.state.launch import Launch
from bequest.engine.state.sequence import Applied, Group, Sequence, Status
from bequest.engine.types import LogprobArrays, StepResult


def apply_result(launch: Launch, result: StepResult, now: float) -> Applied:
    applied = Applied(now)
    for expectation in launch.expected:
        expectation.apply(result, applied)
    return applied


class Samples(msgspec.Struct, frozen=True):
    """The tokens that a step samples."""

    sequences: tuple[Sequence, ...]  # as the plan's samples, up to those of beams
    drafts: tuple[int, ...] | None  # as the sequences: the token that was guessed to follow; None: the step has none
    commits: bool = True  # full blocks become findable

    def apply(self, result: StepResult, applied: Applied) -> None:
        num_before = applied.num_noted
        if self.drafts is not None:
            applied.one_each = False
            tokens = _tokens_of(result)
            drafts = self.drafts if result.drafts is None else result.drafts.tolist()
            self._take(self._accepted(tokens, drafts, applied), tokens, result.logprobs, applied)
        elif left := self._pass(result, applied):
            self._take(left, _tokens_of(result), result.logprobs, applied)
        applied.num_generated += applied.num_noted - num_before

    def _take(
        self, numbers: list[int], tokens: list[int | None], logprobs: LogprobArrays | None, applied: Applied
    ) -> None:
        finished, failed, sequences = Status.FINISHED, applied.failed, self.sequences
        for i in numbers:
            sequence = sequences[i]
            if sequence.status is not finished and sequence.group not in failed:
                sequence.work.take_sample(sequence, tokens[i], i, logprobs, applied)

    def _pass(self, result: StepResult, applied: Applied) -> list[int]:
        """Accepts tokens that no work has to look at: nearly all. Returns the numbers of the other samples."""
        passed, tokens, seconds, left = take_samples(
            self.sequences, result.tokens, result.bad_rows, applied.now, Status.RUNNING, self.commits
        )
        applied.passed += passed
        applied.passed_tokens += tokens
        applied.inter_token_seconds += seconds
        return left

    def _accepted(self, tokens: list[int | None], drafts: tuple[int, ...] | list[int], applied: Applied) -> list[int]:
        """The samples that count: those of a sequence until the first that is not what was guessed."""
        accepted: list[int] = []
        begin = 0
        while begin < len(self.sequences):
            sequence, end = self.sequences[begin], begin + 1
            while end < len(self.sequences) and self.sequences[end] is sequence:
                end += 1
            last = next(i for i in range(begin, end) if i == end - 1 or tokens[i] != drafts[i])
            sequence.num_in_flight -= end - begin
            if end - begin > 1:
                _learn(sequence, end - begin - 1, last - begin, applied)
            accepted += range(begin, last + 1)
            begin = end
        return accepted


def _tokens_of(result: StepResult) -> list[int | None]:
    """None: nothing could be sampled."""
    tokens: list[int | None] = result.tokens.tolist()
    bad = result.bad_rows.tolist()
    return [None if is_bad else token for token, is_bad in zip(tokens, bad, strict=True)] if True in bad else tokens


def _learn(sequence: Sequence, num_drafted: int, num_right: int, applied: Applied) -> None:
    applied.num_drafts += 1
    applied.num_drafted += num_drafted
    applied.num_right += num_right
    sequence.work.note_drafts(sequence, num_drafted, num_right)


class PromptLogprobsOf(msgspec.Struct, frozen=True):
    """A step tells log-probabilities of a prompt."""

    group: Group
    number: int  # in the result

    def apply(self, result: StepResult, applied: Applied) -> None:
        if not self.group.closed and self.group.prompt.logprobs is not None:
            self.group.prompt.logprobs.receive(result.prompt_logprobs[self.number])
