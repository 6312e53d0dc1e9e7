"""Checkpoints that name experts otherwise than Qwen's, or keep all experts of a layer in one tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import Tensor

from bequest.engine.layers.codes import Codes
from bequest.engine.models.file_names import name_by_others
from bequest.engine.models.weights import SourceOver, WeightSource

_RENAMED = {
    ".block_sparse_moe.": ".mlp.",  # Mixtral's
    ".w1.weight": ".gate_proj.weight",
    ".w3.weight": ".up_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".mlp.shared_experts.": ".mlp.shared_expert.",  # GLM's
}
# Tensors [E, rows, columns] that newer checkpoints have, and what their rows are.
_FUSED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


class _Place(NamedTuple):
    """Where a tensor lies: all of a stored one, or rows [begin, end) of one expert's part of it."""

    stored: str
    expert: int | None = None
    begin: int = 0
    end: int = 0
    turned: bool = False  # its rows are columns of what is stored


class ExpertNames(SourceOver):
    """A WeightSource over another: each matrix of each expert has a name."""

    def __init__(self, source: WeightSource, sizes: tuple[int, int], drafting: int | None = None) -> None:
        """`sizes`: the hidden one and an expert's. `drafting`: the layer from which on layers draft tokens; those are
        left out."""
        super().__init__(source)
        stored = [name for name in source.names() if drafting is None or _layer_of(name) < drafting]
        self._places = {name: place for one in stored for name, place in _places(source, one, sizes)}

    def names(self) -> Collection[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        shape = self._source.shape(place.stored)
        if place.expert is None:
            return shape
        return (place.end - place.begin, shape[1]) if place.turned else (place.end - place.begin, *shape[2:])

    def load(self, name: str) -> Tensor:
        """Of one expert a view, where the source has views: the whole tensor is not copied for each."""
        place = self._places[name]
        tensor = self._source.load(place.stored)
        if place.expert is None:
            return tensor
        own = tensor[place.expert].T if place.turned else tensor[place.expert]
        return own[place.begin : place.end]

    def load_codes(self, name: str) -> Codes | None:
        place = self._places[name]
        return self._source.load_codes(place.stored) if place.expert is None else None

    def name_in_file(self, name: str) -> str:
        stored = {ours: place.stored for ours, place in self._places.items()}
        return self._source.name_in_file(name_by_others(name, stored))


def _layer_of(name: str) -> int:
    match name.split("."):
        case ["model", "layers", layer, *_] if layer.isdigit():
            return int(layer)
    return -1


def _places(source: WeightSource, stored: str, sizes: tuple[int, int]) -> Iterator[tuple[str, _Place]]:
    name = stored
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    ending = next((ending for ending in _FUSED if name.endswith(ending)), None)
    if ending is None:
        yield name, _Place(stored)
        return
    layer, (num_experts, *shape), parts = name.removesuffix(ending), source.shape(stored), _FUSED[ending]
    turned = _is_turned(tuple(shape), len(parts), *sizes)
    num_rows = shape[-1] if turned else shape[0]
    for expert in range(num_experts):
        for number, part in enumerate(parts):
            begin, end = num_rows * number // len(parts), num_rows * (number + 1) // len(parts)
            yield f"{layer}.experts.{expert}.{part}.weight", _Place(stored, expert, begin, end, turned)


def _is_turned(shape: tuple[int, ...], num_parts: int, hidden: int, inner: int) -> bool:
    """Published files of Qwen3-VL's experts have matrices [columns, rows], the transformers library writes [rows,
    columns]. A square one is taken for the latter, as that library does."""
    rows, columns = (hidden, inner) if num_parts == 1 else (num_parts * inner, hidden)
    return shape == (columns, rows) and rows != columns
