"""Sampling and log-probabilities on the CPU."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.host_arrays import FLOAT32, HostInts, host_ints, logit_stride
from bequest.engine.kernels.host_arrays import address as address_of
from bequest.engine.types import BoolArray, FloatArray, IntArray, RowSpec, mask_words


class Sampler:
    """Chooses tokens for `num_rows` sampler rows, each opened with a sequence's parameters and history.

    Masks and bias, penalties, temperature, min_p, top_k, top_p, draw. A row's token depends on its own logits,
    parameters, history and position alone, bit for bit.
    """

    __slots__ = ("_sampler", "_vocab_size")

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._sampler = _C.Sampler(num_rows, vocab_size)
        self._vocab_size = vocab_size

    def open_row(self, spec: RowSpec) -> None:
        draw, penalties, bounds = spec.draw, spec.penalties, spec.bounds
        self._sampler.open_row(
            spec.row,
            (draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.seed, draw.choice),
            (penalties.presence, penalties.frequency, penalties.repetition),
            (bounds.min_tokens, bounds.logit_bias, bounds.allowed_token_ids, bounds.bad_words, bounds.held_back),
            spec.prompt_token_ids,
            spec.output_token_ids,
        )

    def close_row(self, row: int) -> None:
        self._sampler.close_row(row)

    def resolve(self, input_ids: IntArray, input_rows: IntArray) -> IntArray:
        """A copy of input_ids [T] with the last token of row input_rows[i] in place i, unless that is NO_ROW."""
        resolved = input_ids.copy()
        address, (count,) = host_ints(resolved)
        rows_address, rows_shape = host_ints(input_rows)
        assert rows_shape == (count,)
        self._sampler.resolve(address, rows_address, count)
        return resolved

    def sample(
        self, logits: Tensor, rows: HostInts, positions: HostInts, masks: IntArray | None = None
    ) -> tuple[IntArray, BoolArray]:
        """Tokens [N] for logits f32 [N, V] of distinct rows [N], and which of them are bad.

        positions [N] are those of the sampled tokens; they key the random numbers. masks [N, ceil(V / 32)]: tokens
        whose bit is not set are not sampled. Bad: NaN or +inf in the logits, or nothing left to sample; the token is 0
        and the row stays as it was.
        """
        address, (num,) = host_ints(rows)
        positions_address, positions_shape = host_ints(positions)
        assert logits.shape == (num, self._vocab_size) and positions_shape == (num,)
        tokens = np.empty(num, np.int32)
        bad = np.empty(num, np.bool_)
        masks_address = 0
        if masks is not None:
            masks_address, masks_shape = host_ints(masks)
            assert masks_shape == (num, mask_words(self._vocab_size))
        rows_of_logits = (logits.data_ptr(), num, logit_stride(logits))
        self._sampler.sample(
            rows_of_logits, address, positions_address, masks_address, address_of(tokens), address_of(bad)
        )
        return tokens, bad

    def guess(self, logits: Tensor, rows: HostInts, positions: HostInts) -> IntArray:
        """What `sample` would choose for logits f32 [N, V] of rows [N], which stay as they are; 0 where that is bad."""
        address, (num,) = host_ints(rows)
        positions_address, positions_shape = host_ints(positions)
        assert logits.shape == (num, self._vocab_size) and positions_shape == (num,)
        tokens, bad = np.empty(num, np.int32), np.empty(num, np.bool_)
        rows_of_logits = (logits.data_ptr(), num, logit_stride(logits))
        self._sampler.guess(rows_of_logits, address, positions_address, address_of(tokens), address_of(bad))
        return tokens


def logprobs(logits: Tensor, chosen: HostInts, top: int) -> tuple[FloatArray, IntArray, IntArray, FloatArray]:
    """Log-softmax of logits f32 [N, V]: of the chosen tokens [N], their ranks [N], the best ids and values [N, top].

    Rank is 1 + the number of greater logits; equal ones are listed by lower id. A row with NaN gives NaN.
    """
    num, vocab_size = logits.shape
    chosen_address, chosen_shape = host_ints(chosen)
    assert chosen_shape == (num,)
    chosen_logprob = np.empty(num, np.float32)
    rank = np.empty(num, np.int32)
    top_ids = np.empty((num, top), np.int32)
    top_logprob = np.empty((num, top), np.float32)
    out = (address_of(chosen_logprob), address_of(rank), address_of(top_ids), address_of(top_logprob))
    _C.logprobs((logits.data_ptr(), num, vocab_size, logit_stride(logits), FLOAT32), chosen_address, top, out)
    return chosen_logprob, rank, top_ids, top_logprob
