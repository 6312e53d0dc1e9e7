"""Sampler rows: which sequence has which, and what the device must know of it. Owned by the event-loop thread."""

from __future__ import annotations

import math
from dataclasses import replace

from bequest.engine.state.sequence import NO_ROW, Sequence
from bequest.engine.types import RowSpec, SamplingParams

_RECOGNISED = 32  # tokens by which the beginning of a sequence is told from the rest of it


class SamplerRows:
    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._to_close: list[int] = []

    def open(self, sequence: Sequence) -> RowSpec:
        sequence.row = self._free.pop()
        request = sequence.group.request
        params = _with_rules(request.params, sequence)
        remembers_prompt = params.repetition_penalty != 1.0 or bool(params.bad_words)
        holds_back_eos = params.min_tokens > 0 and params.ends_at_eos
        return RowSpec(
            row=sequence.row,
            params=params,
            seed=sequence.group.seed,
            choice=sequence.choice,
            prompt_token_ids=request.prompt_token_ids if remembers_prompt else (),
            output_token_ids=tuple(sequence.tokens[sequence.num_prompt :]),
            held_back=self._eos if holds_back_eos else (),
            end_token_ids=() if params.catalogue is None else self._eos,
        )

    def release(self, sequence: Sequence) -> None:
        if sequence.row != NO_ROW:
            self._to_close.append(sequence.row)
            self._free.append(sequence.row)
            sequence.row = NO_ROW

    def take_closed(self) -> tuple[int, ...]:
        """Rows that no later step names under their old meaning."""
        closed, self._to_close = tuple(self._to_close), []
        return closed

    def check_all_free(self) -> None:
        assert len(self._free) == self._num_rows, "sampler rows lost"


def _with_rules(params: SamplingParams, sequence: Sequence) -> SamplingParams:
    """The model's rules in terms that every sampler knows: a bias that excludes, and words that begin with the whole
    prompt for what must not be the first token."""
    rules = params.rules
    if rules is None:
        return params
    bias = tuple((token, -math.inf) for token in rules.never)
    begins = sequence.num_output == (rules.opening(params.max_tokens) is not None)
    before = sequence.tokens[-_RECOGNISED:] if begins else []
    words = tuple((*before, token) for token in rules.not_first) if begins else ()
    return replace(params, logit_bias=params.logit_bias + bias, bad_words=params.bad_words + words)
