"""Sampler rows: which sequence has which, and what the device must know of it. Owned by the event-loop thread."""

from __future__ import annotations

from engine.sequence import NO_ROW, Sequence
from engine.types import RowSpec


class SamplerRows:
    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._to_close: list[int] = []

    def open(self, sequence: Sequence) -> RowSpec:
        sequence.row = self._free.pop()
        request = sequence.group.request
        params = request.params
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
