"""Which tokens of a step somebody reads the hidden states of: the last layer computes no others.

On a CPU they are the last ones of each sequence, from the first that is sampled, scored or delivered as a hidden state
of the last layer on, so that attention sees them as a shorter chunk. A chunk in the middle of a prompt has none. On a
GPU they are the sampled ones, or all: graphs are made for either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bequest.engine.types import IntArray, StepPlan

_NO_TOKENS: npt.NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ReadTokens:
    rows: npt.NDArray[np.int64]  # [R] in [0, T), ascending
    query_start: IntArray  # [S + 1], as the plan's, of these alone

    def places(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Where tokens [N] in [0, T) are among the rows. REQUIRES: they are."""
        return np.searchsorted(self.rows, tokens)


def samples_each(plan: StepPlan) -> bool:
    """Whether every token of the step is sampled from, once and in order, as in most steps that decode."""
    num_tokens, tokens = plan.num_tokens, plan.samples.tokens
    # Their bytes: of a few numbers, in a third of the time that an array of truths takes.
    return len(tokens) == num_tokens and tokens.tobytes() == np.arange(num_tokens, dtype=tokens.dtype).tobytes()


def reads_samples_alone(plan: StepPlan, num_layers: int) -> bool:
    """Whether nobody reads the last layer's states of a token that is not sampled."""
    is_tapped = plan.taps is not None and len(plan.taps.tokens_of_layer(num_layers)) > 0
    return not (is_tapped or plan.prompt_logprobs)


def read_tokens(plan: StepPlan, num_layers: int) -> ReadTokens | None:
    """None: all are read."""
    if samples_each(plan):
        return None
    query_start = plan.batch.query_start
    starts, ends = query_start[:-1], query_start[1:]
    first = ends.copy()  # [S]
    scored = [spec.first_token for spec in plan.prompt_logprobs]
    tapped = _NO_TOKENS if plan.taps is None else plan.taps.tokens_of_layer(num_layers)
    read = np.concatenate([plan.samples.tokens, scored, tapped]).astype(np.int32)
    np.minimum.at(first, np.searchsorted(query_start, read, side="right") - 1, read)
    counts = ends - first
    if counts.sum() == plan.num_tokens:
        return None
    rows = np.flatnonzero(np.arange(plan.num_tokens) >= np.repeat(first, ends - starts))
    return ReadTokens(rows, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
