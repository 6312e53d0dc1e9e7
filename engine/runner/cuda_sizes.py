"""The sizes that graphs are captured for, and which of them serves a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from bequest.engine.runner.read_rows import reads_samples_alone
from bequest.engine.types import MAX_BEAM_WIDTH, StepPlan
from bequest.engine.types.plan import MIXED_SIZES

# Steps of more tokens run eagerly: their kernels are long enough to hide the launches.
MOST_GRAPH_TOKENS = 2048
# Decode graphs up to this size come with and without the merge of cut tiles. Short contexts are not cut, and a launch
# that finds nothing takes 1.1 µs of each layer: of the 28 layers of a 0.6B model 31 µs, where a step of 32 has 1.04 ms.
_MOST_WITHOUT_MERGES = 64
# Steps of a few tokens of one sequence or two: drafts that are checked, or what a child adds to its parent. All of
# their tokens may be sampled.
_FEW = [2, 4, 8, 16]
CHECKED_ROWS = (1, *_FEW)  # of a sequence alone
# A step of so many tokens may sample each of them, whoever's they are: drafts have no sequence of their own.
_MOST_CHECKED = 64
# Tokens of prompts that come alone, between the sizes that the scheduler aims at: products of 1,429 rows of a 7B model
# take 25.9 ms in 1,440 rows and 29.1 in 1,536, and with some streams beside it 26.5 in 1,488.
_BETWEEN = (896, 1152, 1440, 1488, 1664, 1920)
# From so many tokens on the last layer is worth a graph that computes sampled rows alone: of 1,440 tokens of a 7B model
# its products take 0.15 ms instead of 0.95, of a few hundred they read the same bytes of weights either way.
_FEWEST_NARROWED = 1024
# Such a step has most often few samples: 64 of a vocabulary of 152,064 take 0.25 ms, 256 take 0.4.
_FEW_SAMPLES = 64
# Of steps with more samples than sequences may run otherwise: those of beams.
_BEAM_DECODE = [384, 512, 768, 1024]
_BEAM_MIXED = [512, 1024, 1536, 2048]


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a graph is padded to, and what its attention may have.

    `prefill`: prefill tiles, as of sequences with several queries; `merges`: tiles that were cut; `adapted`: rows may
    have adapters; `narrow`: behind its attention the last layer goes on with the samples.
    """

    num_tokens: int
    num_samples: int
    prefill: bool
    merges: bool = True
    adapted: bool = False
    narrow: bool = False

    def narrowed(self, num_samples: int) -> StepSize | None:
        """Its twin for so many samples; None: the last layer has little to save."""
        room = min(self.num_samples, _FEW_SAMPLES) if num_samples <= _FEW_SAMPLES else self.num_samples
        is_long = self.num_tokens >= max(_FEWEST_NARROWED, 2 * room)
        return replace(self, num_samples=room, narrow=True) if is_long and room and not self.adapted else None


def decode_ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes of decode graphs: fine steps where a padded row costs much of the time, coarse ones above."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, 4097, 64)]
    below = [size for size in sizes if size < max_num_seqs]
    return [*below, max_num_seqs]


def mixed_ladder(max_num_batched_tokens: int) -> list[int]:
    """Token counts of graphs for steps that carry a prefill."""
    most = min(max_num_batched_tokens, MOST_GRAPH_TOKENS)
    return [*(size for size in sorted((*MIXED_SIZES, *_BETWEEN)) if size < most), most]


class Ladder:
    """All sizes of an engine."""

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, *, adapted: bool = False, num_layers: int | None = None
    ) -> None:
        """`adapted`: each size has a twin for steps with adapters. `num_layers`: of a model the last of which goes on
        with samples where nobody reads other rows; None: somebody always does."""
        self._adapted = adapted
        self._num_layers = num_layers
        most_samples = max(max_num_seqs, _MOST_CHECKED)
        self._decode = decode_ladder(max_num_seqs)
        self._decode += [size for size in _BEAM_DECODE if size > max_num_seqs]
        tokens = mixed_ladder(max_num_batched_tokens)
        # Few steps sample more rows than they have tokens, and the product over the vocabulary is a large part of a
        # short one. The last size takes any step that is not beams'.
        few = [size for size in _FEW if size < tokens[0]]
        self._mixed = [StepSize(size, min(size, most_samples), prefill=True) for size in few + tokens[:-1]]
        self._mixed.append(StepSize(tokens[-1], most_samples, prefill=True))
        self._mixed_beams = [
            StepSize(size, min(size, MAX_BEAM_WIDTH + max_num_seqs), prefill=True)
            for size in _BEAM_MIXED
            if max_num_seqs < size <= tokens[-1]
        ]
        self._narrow = {} if num_layers is None else dict.fromkeys(self._narrow_sizes(most_samples))

    def _narrow_sizes(self, most_samples: int) -> Iterator[StepSize]:
        """Steps with many samples, which others run beside, are of sizes that the scheduler aims at."""
        for size in reversed(self._mixed):
            aimed_at = size.num_tokens in MIXED_SIZES
            for room in {_FEW_SAMPLES, most_samples if aimed_at else _FEW_SAMPLES}:
                if (twin := size.narrowed(room)) is not None:
                    yield twin

    def sizes(self) -> list[StepSize]:
        """Largest first: smaller graphs then fit into the memory of larger ones."""
        decode = [StepSize(size, size, prefill=False) for size in reversed(self._decode)]
        uncut = [replace(size, merges=False) for size in decode if size.num_tokens <= _MOST_WITHOUT_MERGES]
        mixed = self._mixed_beams[::-1] + self._mixed[::-1]
        sizes = mixed + decode + uncut
        return sizes + [*self._narrow] + [replace(size, adapted=True) for size in sizes if self._adapted]

    def size_of(self, plan: StepPlan, *, prefill: bool, merges: bool) -> StepSize | None:
        """As `size_for`, the twin for what the step has and reads."""
        counts = _num_rows(plan), len(plan.batch.seq_lens), len(plan.samples)
        size = self.size_for(*counts, prefill=prefill, merges=merges)
        twin = None if size is None else self._twin(size, plan)
        return size if twin is None or (twin.narrow and twin not in self._narrow) else twin

    def exact_size(self, plan: StepPlan) -> StepSize:
        """Of a step that runs eagerly."""
        return self._twin(StepSize(_num_rows(plan), len(plan.samples), prefill=True), plan)

    def _twin(self, size: StepSize, plan: StepPlan) -> StepSize:
        if plan.batch.adapters is not None:
            return replace(size, adapted=True)
        twin = size.narrowed(len(plan.samples))
        if twin is None or self._num_layers is None or not reads_samples_alone(plan, self._num_layers):
            return size
        return twin

    def size_for(
        self, num_tokens: int, num_sequences: int, num_samples: int, *, prefill: bool, merges: bool
    ) -> StepSize | None:
        """The smallest size that holds the step; None: run it eagerly. `prefill`, `merges`: what its attention has."""
        decodes = num_tokens == num_sequences and num_samples <= num_tokens and not prefill
        if decodes and num_tokens <= self._decode[-1]:
            padded = self._decode[bisect_left(self._decode, num_tokens)]
            return StepSize(padded, padded, prefill=False, merges=merges or padded > _MOST_WITHOUT_MERGES)
        sizes = chain(self._mixed, self._mixed_beams)
        fitting = (s for s in sizes if s.num_tokens >= num_tokens and s.num_samples >= num_samples)
        return next(fitting, None)


def _num_rows(plan: StepPlan) -> int:
    """Of a graph: as many as there are tokens. But kernels of a step of one token take its position for its place in
    its sequence, which it is not behind an image that turns by rows and columns; so such a token has company."""
    if plan.num_tokens != 1:
        return plan.num_tokens
    batch, images = plan.batch, plan.images
    is_of_image = images is not None and bool(images.gathered)
    return 2 if is_of_image or batch.positions[0] != batch.seq_lens[0] - 1 else 1


def is_plain(plan: StepPlan) -> bool:
    """A step that is its graph and nothing else."""
    swaps = len(plan.moves.swaps_out) + len(plan.moves.swaps_in) + len(plan.moves.states)
    moves = swaps + len(plan.moves.copies)
    rows = len(plan.rows.open) + len(plan.rows.close)
    told = plan.samples.num_logprobs is not None or plan.prompt_logprobs or plan.beams or plan.taps is not None
    return not (moves or rows or told or plan.encoders or plan.images is not None)
