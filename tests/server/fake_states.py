"""What the fake engine delivers as hidden states: arrays that follow from layer, position and token alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from bequest.engine.types import Delta, ModelInfo, Request
from bequest.engine.types.hidden import HiddenStatesParams, present_positions
from bequest.engine.types.states import ChoiceStates, ExtractedStates, StatesArray, StatesPart, convert

NUM_LAYERS, HIDDEN = 4, 8


def states_of(
    token_ids: Sequence[int], layers: Sequence[int], positions: Sequence[int], hidden: int = HIDDEN
) -> npt.NDArray[np.float32]:
    """[K, P, H] float32: what the fake model computes. A hash of it all, with all its bits in use."""
    tokens = np.asarray(token_ids, np.float64)[list(positions)]
    layer, column = np.asarray(layers, np.float64)[:, None, None], np.arange(hidden)
    mixed = np.sin(1.1 * tokens[None, :, None] + 0.7 * np.asarray(positions)[None, :, None] + 1.3 * layer + column)
    return mixed.astype(np.float32)


class FakeStates:
    """The engine's side of hidden states. `held` counts answers that were not released."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.held = 0
        self.most_held = 0
        self.spoil: Any = None  # changes the array [R, layers, H] that a request gets
        self._sampled: dict[str, dict[int, list[int]]] = {}

    def follow(self, request: Request, delta: Delta) -> Delta:
        wanted = request.hidden_states
        if wanted is None:
            return delta
        sampled = self._sampled.setdefault(request.id, {})
        for choice in delta.choices:
            sampled.setdefault(choice.index, []).extend(choice.token_ids)
        if delta.usage is None:
            return delta
        choices = tuple(self._states(request, wanted, index, ids) for index, ids in sorted(sampled.items()))
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        computed = request.states_lens[0] if request.extracts else 1
        if request.terms.lineage is not None:
            computed = len(choices[0].positions)
        return structs.replace(delta, hidden_states=ExtractedStates(choices, computed, self._on_release))

    def _on_release(self) -> None:
        self.held -= 1

    def _states(self, request: Request, wanted: HiddenStatesParams, index: int, sampled: list[int]) -> ChoiceStates:
        token_ids = (*request.prompt_token_ids, *sampled)
        counts_from = 0 if request.extracts or wanted.include_prompt else len(request.prompt_token_ids)
        if request.states_of_encoder and request.encoder is not None:
            token_ids, counts_from = request.encoder.token_ids or tuple(range(request.encoder.length)), 0
        positions = counts_from + present_positions(wanted.positions, len(token_ids) - counts_from)
        if wanted.pooling == "last":
            positions = positions[-1:]
        rows = np.unique(positions)
        values = self._tapped(token_ids, wanted.tapped_layers, rows)
        middle = len(rows) // 2  # as if two steps had brought them
        parts = tuple(StatesPart(rows[cut], values[cut]) for cut in (slice(middle), slice(middle, None)))
        info = self.info
        return ChoiceStates(
            index=index,
            layers=wanted.layers,
            positions=positions,
            pooling=wanted.pooling,
            dtype=wanted.dtype or info.states_dtype,
            hidden_size=info.hidden_size,
            tapped_layers=wanted.tapped_layers,
            tapped_dtype=info.states_dtype,
            parts=tuple(part for part in parts if len(part.positions)),
        )

    def _tapped(self, token_ids: Sequence[int], layers: Sequence[int], rows: npt.NDArray[np.int64]) -> StatesArray:
        """[R, layers, H]"""
        values = states_of(token_ids, layers, rows.tolist(), self.info.hidden_size).transpose(1, 0, 2)
        if self.spoil is not None:
            values = self.spoil(values.copy())
        return convert(np.ascontiguousarray(values), "float32", self.info.states_dtype)
