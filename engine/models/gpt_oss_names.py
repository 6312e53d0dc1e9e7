"""gpt-oss' checkpoints: rows of gates and of ups in turns, matrices of all experts in one tensor, often in MXFP4."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.formats import mxfp4
from bequest.engine.layers.codes import Codes, IntegerRows
from bequest.engine.models.file_names import name_by_others
from bequest.engine.models.weights import SourceOver, WeightSource

BLOCKS, SCALES = "_blocks", "_scales"
_ZERO = 128  # the code of zero
# Tensors of all experts of a layer, and whose rows they have in turns.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class _Place:
    """Every `stride`-th row of one expert's part of a stored tensor, from `first` on; or all of a stored tensor."""

    stored: str
    expert: int | None = None
    first: int = 0
    stride: int = 1


class GptOssNames(SourceOver):
    """A WeightSource over another: each matrix of each expert has a name."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._places = {name: place for stored in source.names() for name, place in _places(source, stored)}

    def names(self) -> Collection[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        shape = self._source.shape(place.stored)
        if place.expert is None:
            return shape
        if place.stored.endswith(BLOCKS):
            return (shape[1] // place.stride, shape[2] * shape[3] * 2)
        # Matrices are stored [K, N], biases [N].
        return (shape[-1] // place.stride, *shape[1:-1])

    def load(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = self._source.load(place.stored)
        if place.expert is None:
            return tensor
        if place.stored.endswith(BLOCKS):
            return mxfp4.decode(*self._blocks(place))
        own = tensor[place.expert]
        return (own if own.ndim == 1 else own.T)[place.first :: place.stride]

    def load_codes(self, name: str) -> Codes | None:
        place = self._places[name]
        if place.expert is None or not place.stored.endswith(BLOCKS):
            return None
        return mxfp4_rows(*self._blocks(place))

    def name_in_file(self, name: str) -> str:
        stored = {ours: place.stored for ours, place in self._places.items()}
        return self._source.name_in_file(name_by_others(name, stored))

    def _blocks(self, place: _Place) -> tuple[Tensor, Tensor]:
        """Blocks and scales of an expert's rows."""
        blocks, scales = (
            self._source.load(place.stored.removesuffix(BLOCKS) + part)[place.expert, place.first :: place.stride]
            for part in (BLOCKS, SCALES)
        )
        return blocks, scales


def mxfp4_rows(blocks: Tensor, scales: Tensor) -> IntegerRows:
    """MXFP4 is integers of few bits with a scale for each group."""
    values, factors = mxfp4.integers(blocks, scales)
    zeros = torch.full(factors.shape, _ZERO, dtype=torch.int16, device=factors.device)
    return IntegerRows(8, (values + _ZERO).to(torch.uint8), factors, zeros, mxfp4.GROUP)


def _places(source: WeightSource, stored: str) -> Iterator[tuple[str, _Place]]:
    layer, among_experts, rest = stored.partition(".mlp.experts.")
    if not among_experts:
        yield stored.replace(".mlp.router.", ".mlp.gate."), _Place(stored)
        return
    if rest.endswith(SCALES):
        return
    if rest.endswith(BLOCKS):
        _check_scales(source, stored)
    kind = "bias" if rest.endswith("_bias") else "weight"
    parts = _FUSED.get(rest.removesuffix("_bias").removesuffix(BLOCKS))
    if parts is None:
        yield stored, _Place(stored)  # which is then named as one too many
        return
    for expert in range(source.shape(stored)[0]):
        for first, part in enumerate(parts):
            yield f"{layer}.mlp.experts.{expert}.{part}.{kind}", _Place(stored, expert, first, len(parts))


def _check_scales(source: WeightSource, blocks: str) -> None:
    name, shape = blocks.removesuffix(BLOCKS) + SCALES, source.shape(blocks)
    if name not in source.names():
        raise ModelError(f"{source.description}: {name} is missing")
    if len(shape) != 4 or shape[3] != mxfp4.GROUP // 2 or source.shape(name) != shape[:3]:
        shapes = f"{list(shape)} and {list(source.shape(name))}"
        raise ModelError(f"{source.description}: {blocks} and {name} of shapes {shapes} are not MXFP4")
