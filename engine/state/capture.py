"""Which hidden states of a sequence are wanted, which of them launched steps bring, and which are here.

Owned by the event-loop thread. A position's states are stored when a step computes it, as long as it is known that they
are wanted and there is room for them on the device. What is missing when the sequence's tokens are final is *owed*: it
is computed for its own sake, from the KV that is there. An extraction owes all it wants from the beginning.

A launched step always brings its states, so nothing that is planned is ever planned again, whatever happens to the
sequence meanwhile: no row is lost, and none is computed twice. Drafted tokens that turn out wrong are the exception:
their rows are taken back before anything else is done with the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bequest.engine.types import BoolArray, ModelInfo, Request
from bequest.engine.types.hidden import HiddenStatesParams, Indices, Span, present_positions, select_positions
from bequest.engine.types.states import ChoiceStates, StatesArray, StatesPart


class Capture:
    def __init__(self, params: HiddenStatesParams, num_prompt: int, max_tokens: int) -> None:
        """Of an extraction (max_tokens 0) all is known now. Raises InvalidRequest for positions that are not there."""
        self.params = params
        self._num_prompt = num_prompt
        self.num_layers = len(params.tapped_layers)  # rows of memory that a token's states take
        self.mask = _mask_of(params.tapped_layers)  # [2]
        self.ended = False
        self._counts_from = 0 if params.include_prompt or max_tokens == 0 else num_prompt
        self._lender: Capture | None = None  # the first choice's: brings the states of the prompt
        self._for_others: Indices = np.empty(0, np.int64)  # positions that other choices count on
        self._asked: Indices = np.empty(0, np.int64)  # once it has ended
        self._length = 0  # likewise
        self._wanted = np.zeros(num_prompt + max_tokens, np.bool_)  # by position
        self._planned = np.zeros_like(self._wanted)
        self._here = np.zeros_like(self._wanted)
        self._parts: list[StatesPart] = []
        if max_tokens == 0:
            select_positions(params.positions, num_prompt)
            self.end(num_prompt)
        else:
            candidates = self._wanted[self._counts_from :]
            candidates[_wanted_anyway(params, len(candidates))] = True

    def sibling(self) -> Capture:
        """Of another choice of the same request: it has the prompt's states in common with this one."""
        other = Capture(self.params, self._num_prompt, len(self._wanted) - self._num_prompt)
        other._lender = self
        other._wanted[: self._num_prompt] = False
        return other

    # --- planning ------------------------------------------------------------------------------------------------

    def most_tokens(self, begin: int, count: int, num_rows: int) -> int:
        """How much of a chunk at `begin` to compute, so that there is room for its states; at least one token."""
        if count == 1:
            return 1
        wanted = np.flatnonzero(self._missing(begin, begin + count))
        most = num_rows // self.num_layers
        return count if len(wanted) <= most else max(1, int(wanted[most]))

    def plan(self, begin: int, end: int, num_rows: int) -> Indices | None:
        """Takes note that a step stores what is wanted of positions [begin, end), if there is room for all of it."""
        if end - begin == 1:  # a decode step: most calls
            if not self._wanted[begin] or self._planned[begin] or num_rows < self.num_layers:
                return None
            self._planned[begin] = True
            return np.asarray([begin])
        positions = begin + np.flatnonzero(self._missing(begin, end))
        if not len(positions) or len(positions) * self.num_layers > num_rows:
            return None
        self._planned[positions] = True
        return positions

    def take_back(self, begin: int) -> None:
        """From position `begin` on, launched steps have computed tokens that were drafted wrong."""
        self._planned[begin:] = False

    def still_planned(self, positions: Indices) -> BoolArray:
        return self._planned[positions]

    def _missing(self, begin: int, end: int) -> BoolArray:
        return self._wanted[begin:end] & ~self._planned[begin:end]

    # --- once the tokens are final -------------------------------------------------------------------------------

    def end(self, length: int) -> None:
        """The sequence has `length` tokens, and will not have more."""
        asked = self._counts_from + present_positions(self.params.positions, length - self._counts_from)
        self._asked = asked[-1:] if self.params.pooling == "last" else asked
        self._length = length
        self._wanted[:] = False
        self._wanted[self._asked] = True
        self._wanted[self._for_others] = True
        self.ended = True
        if self._lender is not None:
            self._lender.lend(self)

    def lend(self, other: Capture) -> None:
        """Another choice wants states of the prompt: it computes only those that this one is not going to have."""
        prompt = np.flatnonzero(other._wanted[: other._num_prompt])
        if not self.ended:
            self._for_others = np.union1d(self._for_others, prompt)
            self._wanted[prompt] = True
        other._wanted[prompt[self._wanted[prompt]]] = False

    @property
    def complete(self) -> bool:
        return self.ended and bool(self._here[self._wanted].all())

    @property
    def covers_last(self) -> bool:
        """Whether the last token's state is wanted: then its KV is there in the end."""
        return self.ended and bool(self._wanted[self._length - 1])

    @property
    def goal_len(self) -> int:
        """Tokens whose KV is needed for what is owed; 0: nothing is."""
        owed = np.flatnonzero(self._missing(0, self._length))
        return int(owed[-1]) + 1 if len(owed) else 0

    @property
    def first_owed(self) -> int:
        """The first position whose states no launched step brings; behind all, if there is none."""
        owed = np.flatnonzero(self._missing(0, len(self._wanted)))
        return int(owed[0]) if len(owed) else len(self._wanted)

    @property
    def first_possible(self) -> int:
        """No states of positions before it are going to be computed, however many tokens there will be."""
        return self.first_owed if self.ended else self._counts_from

    def num_owed(self, end: int | None = None) -> int:
        """Rows that no launched step brings; only those before `end`, if it is given."""
        return int(np.count_nonzero(self._missing(0, self._length if end is None else end)))

    def owed_runs(self, end: int) -> Iterator[tuple[int, int]]:
        """Owed positions before `end` as half-open intervals, ascending."""
        owed = np.flatnonzero(self._missing(0, end))
        parts = np.split(owed, np.flatnonzero(np.diff(owed) > 1) + 1) if len(owed) else []
        yield from ((int(part[0]), int(part[-1]) + 1) for part in parts)

    # --- results -------------------------------------------------------------------------------------------------

    def receive(self, positions: Indices, values: StatesArray) -> None:
        """A launched step brings the states [R, layers, H] of positions that were planned."""
        assert self._planned[positions].all() and not self._here[positions].any(), "a row came twice, or from nowhere"
        self._here[positions] = True
        self._parts.append(StatesPart(positions, values))

    def states(self, index: int, info: ModelInfo) -> ChoiceStates:
        """What the choice is answered with. REQUIRES: complete, and the first choice's too."""
        lent = () if self._lender is None else tuple(self._lender._parts)
        return ChoiceStates(
            index=index,
            layers=self.params.layers,
            positions=self._asked,
            pooling=self.params.pooling,
            dtype=self.params.dtype or info.states_dtype,
            hidden_size=info.hidden_size,
            tapped_layers=self.params.tapped_layers,
            tapped_dtype=info.states_dtype,
            parts=(*lent, *self._parts),
        )


class EncoderCapture(Capture):
    """Of an encoder's states, which all choices of a request have in common. All is known when it begins; runs of the
    encoder bring it, and chunks of the decoder nothing. A run that fills cross blocks brings what there is room for."""

    def sibling(self) -> Capture:
        return self

    def most_tokens(self, begin: int, count: int, num_rows: int) -> int:
        return count

    def plan(self, begin: int, end: int, num_rows: int) -> Indices | None:
        return None

    def take_back(self, begin: int) -> None:
        """The encoder reads what is known."""

    def plan_run(self, num_rows: int) -> Indices | None:
        """Takes note that a run of the encoder stores what is missing, as far as there is room."""
        positions = np.flatnonzero(self._missing(0, self._length))[: num_rows // self.num_layers]
        if not len(positions):
            return None
        self._planned[positions] = True
        return positions

    @property
    def covers_last(self) -> bool:
        return False

    @property
    def goal_len(self) -> int:
        return 0

    def num_owed(self, end: int | None = None) -> int:
        """An encoder reads the whole input, or nothing."""
        return self._length if self._missing(0, self._length).any() else 0

    def owed_runs(self, end: int) -> Iterator[tuple[int, int]]:
        return iter(())


def capture_of(request: Request) -> Capture | None:
    """Of the first choice of a request; None: it wants no hidden states. Raises InvalidRequest."""
    if request.hidden_states is None:
        return None
    if request.states_of_encoder:
        return EncoderCapture(request.hidden_states, *request.states_lens)
    return Capture(request.hidden_states, *request.states_lens)


def _mask_of(layers: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """[2] bit i of the 128: layer i is wanted."""
    bits = sum(1 << layer for layer in layers)
    return np.asarray([bits & (2**64 - 1), bits >> 64], np.uint64)


def _wanted_anyway(params: HiddenStatesParams, length: int) -> slice | list[int]:
    """Of `length` tokens at most, those that are wanted however many there will be. Those that count from the end are
    computed when it is known: the last one has to be in any case."""
    positions = params.positions
    if positions == "last" or params.pooling == "last":
        return slice(0, 0)
    if isinstance(positions, Span):
        if positions.start < 0:
            return slice(0, 0)
        return slice(positions.start, None if positions.end is None or positions.end < 0 else positions.end)
    if isinstance(positions, tuple):
        return [p for p in positions if 0 <= p < length]
    return slice(None)
