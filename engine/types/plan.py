"""A step for the device: event-loop thread → device thread.

Numbers, arrays and handles, frozen. Arrays are numpy, int32 unless said otherwise; they belong to the plan and are not
written again. Dims: T tokens of the step, S sequences of the step, N sampled rows, MB blocks per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bequest.engine.types.arrays import FloatArray, IntArray
from bequest.engine.types.encoder import EncoderSpec
from bequest.engine.types.hidden import StepTaps
from bequest.engine.types.sampling import SamplingParams

if TYPE_CHECKING:
    from bequest.engine.constraints.masks import StepMasks


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Opens a sampler row: the device keeps the row's penalty counts, masks, seed and last token until it is closed."""

    row: int
    params: SamplingParams
    seed: int  # 64 bits
    choice: int
    prompt_token_ids: tuple[int, ...]  # for penalties and bad words
    output_token_ids: tuple[int, ...] = ()  # sampled before, when a preempted sequence comes back
    held_back: tuple[int, ...] = ()  # end tokens that must not come before min_tokens
    end_token_ids: tuple[int, ...] = ()  # that may follow an item of the catalogue, if there is one


@dataclass(frozen=True, slots=True)
class PromptLogprobSpec:
    """Asks for log-probabilities of `targets`: target i is the token after the step's token `first_token + i`."""

    request_id: str
    first_token: int  # index in [0, T)
    targets: IntArray
    top: int


@dataclass(frozen=True, slots=True)
class BeamSpec:
    """Asks for the best continuations of a group's beams: samples [first_sample, first_sample + R) of the step."""

    request_id: str
    params: SamplingParams
    first_sample: int
    scores: FloatArray  # [R] summed log-probabilities so far
    num_candidates: int
    held_back: tuple[int, ...]  # tokens that must not come: ends before min_tokens, the model's rules
    nodes: IntArray | None = None  # [R] where each beam stands in the catalogue, if there is one
    end_token_ids: tuple[int, ...] = ()  # that may follow an item of the catalogue


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for the device thread: swaps out, swaps in, copies, rows closed and opened, encoders, forward, sampling.

    input_ids holds token ids; -(row + 1) means "the last token sampled in sampler row `row`", which the device knows
    before the event-loop thread does.
    """

    step: int
    input_ids: IntArray  # [T]
    positions: IntArray  # [T]
    query_start: IntArray  # [S + 1]
    seq_lens: IntArray  # [S], computed tokens after this step
    slot_mapping: npt.NDArray[np.int64]  # [T], -1: not written
    block_tables: IntArray  # [S, MB], padded with block 0
    swaps_out: IntArray  # [C, 2] (device block, host block)
    swaps_in: IntArray  # [C, 2] (host block, device block)
    block_copies: IntArray  # [C, 2] (source, destination) in the device pool, copy on write
    close_rows: tuple[int, ...]  # sampler rows that no later step names under their old meaning
    open_rows: tuple[RowSpec, ...]
    sample_tokens: IntArray  # [N] index in [0, T) whose logits are sampled
    sample_rows: IntArray  # [N] sampler row of each; -1: a beam's, which is not sampled
    sample_positions: IntArray  # [N] absolute position of the sampled token: keys its random number
    num_logprobs: int | None  # the largest number of alternatives any sampled row wants; None: nobody wants any
    prompt_logprobs: tuple[PromptLogprobSpec, ...]
    beams: tuple[BeamSpec, ...] = ()
    masks: StepMasks | None = None  # of the rows with a grammar: the last sampled ones before the beams'
    taps: StepTaps | None = None  # None: nobody wants hidden states of this step
    encoders: tuple[EncoderSpec, ...] = ()
    cross_tables: IntArray | None = None  # [S, MBX], padded with block 0; None: the model has no encoder
    cross_lens: IntArray | None = None  # [S]

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])
