"""A rank's part of a checkpoint, and how it becomes a rank's part of a model.

Files are mapped, not read: of a tensor that is cut nobody touches the pages of the other ranks' rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.layers.backend import Backend
from bequest.engine.layers.codes import Codes
from bequest.engine.layers.ranks import Ranks
from bequest.engine.layers.spec import Attention, LayerSpec, Sublayer
from bequest.engine.layers.vocabulary import VocabularyPart, rows_of_rank
from bequest.engine.layers.weight import Weight
from bequest.engine.models.cutting import Cut, Cutting
from bequest.engine.models.reader import Loader
from bequest.engine.models.vocabulary_names import VOCABULARY
from bequest.engine.models.weights import SourceOver, WeightSource


class CutSource(SourceOver):
    """A WeightSource over that of a whole model."""

    def __init__(self, source: WeightSource, cutting: Cutting) -> None:
        super().__init__(source)
        self._cutting = cutting

    def names(self) -> Collection[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.load(name).shape)

    def load(self, name: str) -> Tensor:
        tensor = self._source.load(name)
        cut = self._cutting.of(name, tuple(tensor.shape))
        return tensor if cut is None else self._taken(tensor, cut)

    def _taken(self, tensor: Tensor, cut: Cut) -> Tensor:
        match cut.along:
            case "rows":
                return tensor[cut.parts[0]] if len(cut.parts) == 1 else torch.cat([tensor[part] for part in cut.parts])
            case "columns":
                return tensor[:, cut.parts[0]]
            case "first":
                return tensor if self._cutting.rank == 0 else torch.zeros_like(tensor)
            case "vocabulary":
                count = rows_of_rank(len(tensor), self._cutting.size)
                part = tensor[self._cutting.rank * count : (self._cutting.rank + 1) * count]
                return part if len(part) == count else F.pad(part, (0, 0, 0, count - len(part)))

    def load_codes(self, name: str) -> Codes | None:
        """None, too, where a cut would part what shares a scale: the values are then loaded."""
        codes = self._source.load_codes(name)
        cut = None if codes is None else self._cutting.of(name, self._source.shape(name))
        if codes is None or cut is None:
            return codes
        if cut.along == "columns":
            return codes.take_columns(cut.parts[0])
        return codes.take(cut.parts[0]) if cut.along == "rows" and len(cut.parts) == 1 else None


class RankLoader(Loader):
    """Brings a rank's part to its backend."""

    def __init__(
        self,
        source: WeightSource,
        backend: Backend,
        dtype: torch.dtype,
        cutting: Cutting,
        ranks: Ranks,
        *,
        scales_kv: bool = False,
    ) -> None:
        """`source`: of the whole model."""
        super().__init__(CutSource(source, cutting), backend, dtype, scales_kv=scales_kv)
        self._cutting = cutting
        self._ranks = ranks

    def stacked(self, names: Sequence[str], rows: Sequence[int], columns: int, has_bias: Sequence[bool]) -> Weight:
        if self._prefix + names[0] not in VOCABULARY:
            return super().stacked(names, rows, columns, has_bias)
        (count,) = rows
        part = super().stacked(names, [rows_of_rank(count, self._ranks.size)], columns, has_bias)
        return VocabularyPart(part, count, self._ranks)

    def finished(self, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
        """What their mixers give is to be added up."""
        return [replace(layer, sublayers=tuple(map(self._summed, layer.sublayers))) for layer in layers]

    def _summed(self, sublayer: Sublayer) -> Sublayer:
        is_part = self._cutting.cuts_heads or not isinstance(sublayer.mixer, Attention)
        return replace(sublayer, ranks=self._ranks) if is_part else sublayer


def loader_of(
    source: WeightSource,
    backend: Backend,
    dtype: torch.dtype,
    cutting: Cutting | None,
    ranks: Ranks,
    *,
    scales_kv: bool,
) -> Loader:
    """Of a whole model, or of a rank's part. `source`: of the whole one."""
    if cutting is None:
        return Loader(source, backend, dtype, scales_kv=scales_kv)
    return RankLoader(source, backend, dtype, cutting, ranks, scales_kv=scales_kv)
