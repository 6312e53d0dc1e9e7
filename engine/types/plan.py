"""A step for the device: event-loop thread → device thread.

Data (engine/types/data.py): numbers, arrays and handles. Arrays are numpy, int32 unless said otherwise; they belong to
the plan and are not written again. What a handle stands for was registered with the runner before, and masks come on a
channel of their own (engine/types/device.py).

Dims: T tokens of the step, S sequences of the step, N samples, MB blocks per row, G strips of the cache.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from bequest.engine.types.arrays import FloatArray, IntArray
from bequest.engine.types.data import Data
from bequest.engine.types.encoder import EncoderSpec
from bequest.engine.types.hidden import StepTaps
from bequest.engine.types.image import StepImages
from bequest.engine.types.row import CatalogueSpec, RowSpec

NO_ROW = -1  # no sampler row: of an input token, that its id is known; of a sample, that it is a beam's
NO_TOKEN = 2**31 - 1  # of rows that pad a step on a GPU: their states are NaN, and nobody reads them
NO_SLOT = -1  # the token's keys and values are there already, and are not written again
NO_STATE = -1  # a sequence begins, or nobody wants the state behind a token
NO_DRAFT = -1  # nothing was drafted to follow a sample
# Tokens of steps that carry prompts: what a GPU has graphs for, and what the scheduler aims at, so that few are padded.
MIXED_SIZES = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048)
MOST_ENDS_FOLLOWED = 16
DRAFTED = -2  # the device's draft model says what follows a sample: the step's token behind it, whose id is 0


class StepBatch(Data, frozen=True, kw_only=True, eq=False):
    """The tokens of a step, sequence by sequence, and where their keys and values lie."""

    input_ids: IntArray  # [T]; 0 where a sampler row has the token, or an image has
    input_rows: IntArray  # [T] the row whose last token it is, which the device knows before others do; or NO_ROW
    positions: IntArray  # [T] of rotation: those of tokens, but behind images that have grids
    slot_mapping: npt.NDArray[np.int64]  # [G, T], or NO_SLOT
    query_start: IntArray  # [S + 1]
    seq_lens: IntArray  # [S], computed tokens after this step
    block_tables: IntArray  # [G, S, MB], padded with block 0, which also stands for what slid out of a window
    cross_tables: IntArray | None = None  # [S, MBX], padded with block 0; None: the model has no encoder
    cross_lens: IntArray | None = None  # [S]
    adapters: IntArray | None = None  # [S] handles of LoRA adapters, 0: none; None: no sequence has one
    state_starts: IntArray | None = None  # [S] slots that recurrent layers go on from; -1: a sequence begins
    state_slots: IntArray | None = None  # [T] slots that get the state behind a token; -1: nobody wants it


def no_pairs() -> IntArray:
    return np.empty((0, 2), np.int32)


class StepMoves(Data, frozen=True, kw_only=True, eq=False):
    """What happens to blocks before anything is computed, in this order."""

    swaps_out: IntArray  # [C, 2] (device block, host block)
    swaps_in: IntArray  # [C, 2] (host block, device block)
    copies: IntArray  # [C, 2] (source, destination) in the device pool, copy on write
    states: IntArray = msgspec.field(default_factory=no_pairs)  # [C, 2] (slot, slot), one after the other


class StepRows(Data, frozen=True, kw_only=True, eq=False):
    """Sampler rows that change before the step samples; those to be closed come first."""

    close: tuple[int, ...] = ()  # that no later step names under their old meaning
    open: tuple[RowSpec, ...] = ()


class MaskSpec(Data, frozen=True, kw_only=True, eq=False):
    """Samples [first_sample, first_sample + num_rows) have token masks, which come on the channel as `number`."""

    number: int
    first_sample: int
    num_rows: int

    @property
    def part(self) -> slice:
        return slice(self.first_sample, self.first_sample + self.num_rows)


class StepSamples(Data, frozen=True, kw_only=True, eq=False):
    """What is sampled. The samples of rows with a grammar are the last ones, but for those of beams.

    A row may be sampled several times where tokens were drafted: its samples are consecutive and their positions
    ascend. The later ones count only while each earlier one equals its draft, and only those that count move what the
    row remembers; the tokens of the others mean nothing.
    """

    tokens: IntArray  # [N] index in [0, T) whose logits are sampled
    rows: IntArray  # [N] sampler row of each; NO_ROW: a beam's, which is not sampled
    positions: IntArray  # [N] absolute position of the sampled token: keys its random number
    # [N] the token that was drafted to follow, NO_DRAFT, or DRAFTED; None: nobody drafts
    drafts: IntArray | None = None
    num_logprobs: int | None = None  # the largest number of alternatives any sample wants; None: nobody wants any
    masks: MaskSpec | None = None

    def __len__(self) -> int:
        return len(self.tokens)


class PromptLogprobSpec(Data, frozen=True, kw_only=True, eq=False):
    """Asks for log-probabilities of `targets`: target i is the token after the step's token `first_token + i`."""

    request_id: str
    first_token: int  # index in [0, T)
    targets: IntArray
    top: int


class Following(Data, frozen=True, kw_only=True, eq=False):
    """Beams that the device chooses: they continue the best candidates of the last step that ranked any, but those that
    end. In the plan their tokens, scores and nodes are 0. Where there are too few candidates, the last beams get the
    score -inf, and nothing continues them. The copies of a beam are of the blocks of its parent: the plan has the
    sources of beam i for the children of beam i."""

    group: int  # in the plan of that step
    ends: tuple[int, ...]  # tokens that no beam goes on behind; at most MOST_ENDS_FOLLOWED
    first_copy: int  # of the plan's moves
    num_copies: int  # as many for each beam, beam by beam


class BeamSpec(Data, frozen=True, kw_only=True, eq=False):
    """Asks for the best continuations of a group's beams: samples [first_sample, first_sample + R) of the step."""

    request_id: str
    first_sample: int
    scores: FloatArray  # [R] summed log-probabilities so far
    num_candidates: int
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    held_back: tuple[int, ...] = ()  # tokens that must not come: ends before min_tokens, the model's rules
    catalogue: CatalogueSpec | None = None
    nodes: IntArray | None = None  # [R] where each beam stands in the catalogue, if there is one
    following: Following | None = None  # None: the plan knows the beams


class StepPlan(Data, frozen=True, kw_only=True, eq=False):
    """One step for the device thread: moves, rows closed and opened, encoders, forward, sampling."""

    step: int
    batch: StepBatch
    moves: StepMoves
    rows: StepRows
    samples: StepSamples
    prompt_logprobs: tuple[PromptLogprobSpec, ...] = ()
    beams: tuple[BeamSpec, ...] = ()
    taps: StepTaps | None = None  # None: nobody wants hidden states of this step
    encoders: tuple[EncoderSpec, ...] = ()
    images: StepImages | None = None  # None: the step has nothing to do with any
    yields: bool = False  # steps that are planned later may pass it (engine/passing.py); nothing is sampled in it

    @property
    def num_tokens(self) -> int:
        return len(self.batch.input_ids)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody goes on only when its result is known: beams, while others plan ahead."""
        return len(self.beams) > 0
