"""What families of decoders share: norms of the hidden size, and tables of rotation."""

from __future__ import annotations

from torch import Tensor

from bequest.engine.layers.parts import Norm
from bequest.engine.models.config import DecoderConfig, RopeConfig
from bequest.engine.models.reader import Reader
from bequest.engine.models.rope import Turns, cos_sin_table, query_scales


class Ropes:
    """Tables [P, R] of the rotary embedding: one, or one more for layers with a window."""

    def __init__(self, config: DecoderConfig, read: Reader, num_positions: int) -> None:
        self._config = config
        kinds = {self._kind(layer) for layer in range(config.num_layers)} | {(config.rope, config.rotary_dim)}
        self._tables = {kind: read.placed(cos_sin_table(*kind, num_positions)) for kind in kinds}
        scales = {rope: query_scales(rope, num_positions) for rope, _ in kinds}
        self._query_scales = {rope: read.placed(each) for rope, each in scales.items() if each is not None}
        self.turns: Turns | None = None
        if config.vision is not None and config.vision.axes:
            self.turns = Turns(self._tables[config.rope, config.rotary_dim], config.vision.axes)
            self._tables[config.rope, config.rotary_dim] = self.turns.table

    def of_layer(self, index: int) -> Tensor | None:
        return None if index in self._config.unrotated_layers else self._tables[self._kind(index)]

    def query_scales_of(self, index: int) -> Tensor | None:
        """[P]; None: queries stay as they are."""
        return self._query_scales.get(self._config.rope_of(index))

    def _kind(self, layer: int) -> tuple[RopeConfig, int]:
        return self._config.rope_of(layer), self._config.rotary_dim_of(layer)


def model_norm(config: DecoderConfig, at: Reader, name: str) -> Norm:
    hidden, eps, style = config.hidden_size, config.rms_norm_eps, config.style
    if style.centred:
        return at.centred_norm(name, hidden, eps)
    return at.offset_norm(name, hidden, eps, style.norm_offset)


def optional_norm(config: DecoderConfig, at: Reader, name: str | None) -> Norm | None:
    return None if name is None else model_norm(config, at, name)
