"""Sampler rows: which sequence has which, and what the device must know of it. Owned by the event-loop thread."""

from __future__ import annotations

import math
from dataclasses import replace

from bequest.engine.scheduling.catalogue_handles import CatalogueHandles
from bequest.engine.state.sequence import Sequence
from bequest.engine.types import (
    NO_ROW,
    CatalogueSpec,
    DrawParams,
    Penalties,
    RowSpec,
    SamplingParams,
    TimestampSpec,
    TokenBounds,
)

_RECOGNISED = 32  # tokens by which the beginning of a sequence is told from the rest of it


def row_spec(
    row: int,
    params: SamplingParams,
    *,
    seed: int,
    choice: int = 0,
    prompt: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    end_token_ids: tuple[int, ...] = (),
    catalogue: int | None = None,
) -> RowSpec:
    """What a row samples with. `catalogue`: the handle of the parameters' one."""
    ends = end_token_ids if params.ends_at_eos else ()
    return RowSpec(
        row=row,
        draw=DrawParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=seed,
            choice=choice,
        ),
        penalties=Penalties(
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
        ),
        bounds=TokenBounds(
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=params.bad_words,
            held_back=(*ends, *sorted(params.stop_token_ids)) if params.min_tokens else (),
            min_tokens=params.min_tokens,
        ),
        max_tokens=params.max_tokens,
        prompt_token_ids=prompt,
        output_token_ids=outputs,
        catalogue=None if catalogue is None else CatalogueSpec(handle=catalogue, end_token_ids=end_token_ids),
        timestamps=_timestamps(params),
    )


class SamplerRows:
    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        self.catalogues = CatalogueHandles()
        self._eos = eos_token_ids
        self._num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._to_close: list[int] = []

    def forget_closed(self) -> None:
        """The device that had them is not there any more. REQUIRES: nothing runs"""
        self._to_close.clear()

    def open(self, sequence: Sequence) -> RowSpec:
        sequence.row = self._free.pop()
        request = sequence.group.request
        params = _with_rules(request.params, sequence)
        remembers_prompt = params.repetition_penalty != 1.0 or bool(params.bad_words)
        catalogue = params.catalogue
        return row_spec(
            sequence.row,
            params,
            seed=sequence.group.seed,
            choice=sequence.choice,
            prompt=request.said_token_ids if remembers_prompt else (),
            outputs=tuple(sequence.tokens[sequence.num_prompt :]),
            end_token_ids=self._eos,
            catalogue=None if catalogue is None else self.catalogues.handle_of(catalogue),
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


def _timestamps(params: SamplingParams) -> TimestampSpec | None:
    rules = params.rules
    if rules is None or rules.timestamps is None:
        return None
    return TimestampSpec(first=rules.timestamps.first, end=rules.timestamps.end, never=rules.never)


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
