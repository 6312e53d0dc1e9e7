"""Hidden states on their way in: what a request asks for, and what a step taps for it. No torch.

Layers are numbered as in Hugging Face's `output_hidden_states`: 0 is the embedding's output, i the output of block i,
and L, the number of blocks, the last one's after the final norm. Positions are token indices of a whole sequence, of
prompt and completion, or of what an encoder reads. What comes back is in engine/types/states.py.

Dims: T tokens of a step, E positions of its encoders, R tapped tokens, P positions of an answer, K layers that were
asked for, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from bequest.engine.errors import InvalidRequest
from bequest.engine.types.data import Data

Pooling = Literal["none", "mean", "last"]
Stack = Literal["decoder", "encoder"]
StatesDType = Literal["float32", "bfloat16", "float16"]
Indices: TypeAlias = npt.NDArray[np.int64]

MOST_LAYERS = 128  # bits of a tap's mask
NOT_TAPPED = -1  # among the rows of a step's tokens: nobody wants this token's states


# --- what a request asks for -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, end); negative ones count from the end, None is the end."""

    start: int = 0
    end: int | None = None


Positions: TypeAlias = Literal["last", "all"] | Span | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HiddenStatesParams:
    """Which states of a request are wanted, and how.

    With max_tokens 0 the request is an extraction, and `positions` count in its prompt. Of a generation they count in
    the sampled tokens, or with `include_prompt` in the prompt and these; positions that the completion did not come to
    are left out. Those of an encoder's stack count in what it reads, with and without a generation.
    """

    layers: tuple[int, ...]  # in [0, L], as the answer has them
    positions: Positions = "last"
    pooling: Pooling = "none"  # over the positions; "last": the last one of them
    dtype: StatesDType | None = None  # None: as the model computes them
    include_prompt: bool = False
    stack: Stack = "decoder"  # of an encoder-decoder model: whose layers

    def __post_init__(self) -> None:
        assert self.stack == "decoder" or not self.include_prompt
        assert self.layers and all(0 <= layer < MOST_LAYERS for layer in self.layers)
        assert self.positions, "at least one position"

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """What a step stores for each token: every layer once, ascending."""
        return tuple(sorted(set(self.layers)))


def resolve_layers(layers: Literal["last", "all"] | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers in [0, L]; -1 is L. Raises InvalidRequest."""
    if layers == "last":
        return (num_layers,)
    if layers == "all":
        return tuple(range(num_layers + 1))
    wrong = next((layer for layer in layers if not -num_layers - 1 <= layer <= num_layers), None)
    if wrong is not None or not layers:
        raise InvalidRequest(
            f"Layers are from {-num_layers - 1} to {num_layers}: {'none is given' if wrong is None else wrong}.",
            reason="no_layers" if wrong is None else "layer_out_of_range",
            field="layers",
            details={"num_layers": num_layers},
            first=-num_layers - 1,
            layer=wrong,
        )
    return tuple(int(layer) % (num_layers + 1) for layer in layers)


def select_positions(positions: Positions, length: int) -> Indices:
    """[P] positions in [0, length), in the order asked for. Raises InvalidRequest for one that is not there."""
    if isinstance(positions, tuple) and not _all_present(positions, length):
        wrong = next(p for p in positions if not -length <= p < length)
        raise InvalidRequest(
            f"Position {wrong} is not among {length} tokens.",
            reason="position_out_of_range",
            field="positions",
            details={"num_tokens": length},
            position=wrong,
            last=length - 1,
            first=-length,
        )
    selected = present_positions(positions, length)
    if not len(selected):
        raise InvalidRequest(
            f"None of {length} tokens is selected.",
            reason="no_positions",
            field="positions",
            details={"num_tokens": length},
        )
    return selected


def present_positions(positions: Positions, length: int) -> Indices:
    """The same without those that are not there."""
    if positions == "last":
        return np.arange(max(0, length - 1), length)
    if positions == "all":
        return np.arange(length)
    if isinstance(positions, Span):
        return np.arange(length)[positions.start : positions.end]
    if not _all_present(positions, length):
        positions = tuple(p for p in positions if -length <= p < length)
    return np.mod(np.asarray(positions, np.int64), max(1, length))


def _all_present(positions: tuple[int, ...], length: int) -> bool:
    """There may be very many, and mostly all are."""
    return -length <= min(positions) and max(positions) < length


def most_positions(params: HiddenStatesParams, num_prompt: int, max_tokens: int) -> int:
    """The most rows that one choice can come to hold."""
    if params.pooling == "last" or params.positions == "last":
        return 1
    length = num_prompt + max_tokens if params.include_prompt or max_tokens == 0 else max_tokens
    if isinstance(params.positions, tuple):
        return min(len(set(params.positions)), length)
    if isinstance(params.positions, Span) and max_tokens == 0:
        return len(present_positions(params.positions, length))
    return length  # a span whose ends count from an end that is not known yet may be anything


# --- what a step taps --------------------------------------------------------------------------------------------


class TapSpec(Data, frozen=True, eq=False):
    """R tokens of the step whose states one sequence wants, of the same layers."""

    tokens: npt.NDArray[np.int32]  # [R] in [0, T), ascending
    num_layers: int


class EncoderTap(Data, frozen=True, eq=False):
    """R positions of one encoder input whose states are wanted: rows [R, layers] from `first_row` on."""

    tokens: Indices  # [R] in [0, E), of the packed inputs of the step
    layers: tuple[int, ...]  # of the encoder, ascending
    first_row: int

    @property
    def num_rows(self) -> int:
        return len(self.tokens) * len(self.layers)


class StepTaps(Data, frozen=True, kw_only=True, eq=False):
    """Where the states of a step's tokens go: token t's layers, ascending, into rows from `rows[t]` on."""

    rows: npt.NDArray[np.int32]  # [T] in [0, num_rows), or NOT_TAPPED
    layers: npt.NDArray[np.uint64]  # [T, 2] bit i: layer i is wanted
    num_rows: int
    specs: tuple[TapSpec, ...]  # rows are numbered in their order, without gaps
    encoders: tuple[EncoderTap, ...] = ()  # their rows follow

    def split(self, ring: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
        """The rows [num_rows, H] of each spec, then of each encoder, as [R, layers, H]."""
        parts, first = [], 0
        counts = [(len(spec.tokens), spec.num_layers) for spec in self.specs]
        for num_tokens, num_layers in counts + [(len(tap.tokens), len(tap.layers)) for tap in self.encoders]:
            end = first + num_tokens * num_layers
            parts.append(ring[first:end].reshape(num_tokens, num_layers, ring.shape[1]))
            first = end
        return tuple(parts)

    def tokens_of_layer(self, layer: int) -> Indices:
        """The tokens in [0, T) whose states of this layer are wanted."""
        word, bit = divmod(layer, 64)
        return np.flatnonzero((self.rows != NOT_TAPPED) & (self.layers[:, word] >> np.uint64(bit) & np.uint64(1) > 0))
