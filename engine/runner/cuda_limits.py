"""What bounds the steps of a GPU's runner."""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.types import MAX_BEAM_WIDTH


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks_per_sequence: int
    states_rows: int  # hidden states, of one token and one layer each, that a step may store
    max_cross_blocks: int = 0  # of an encoder-decoder model
    max_num_encoder_tokens: int = 0
    tokens_of_piece: int = 0  # a layer of so many is a piece of a step that yields; 0: none does

    @property
    def max_tokens(self) -> int:
        """And sequences of one step. A group of beams may be wider than other steps."""
        return max(self.max_num_batched_tokens, MAX_BEAM_WIDTH)

    @property
    def max_samples(self) -> int:
        return self.max_num_seqs + MAX_BEAM_WIDTH
