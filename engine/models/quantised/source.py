"""A checkpoint in codes as a WeightSource: matrices by the names and shapes that they would have in numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.layers.codes import Codes
from bequest.engine.models.quantised.described import Quantisation
from bequest.engine.models.quantised.layouts import LAYOUTS, Layout, Stored
from bequest.engine.models.safetensors_loader import FLOAT_TYPES, SafetensorsSource


def kinds_of(quantisation: Quantisation) -> Mapping[str, frozenset[str]]:
    """How names end that hold codes or their scales, and what their numbers may be."""
    found: dict[str, frozenset[str]] = {}
    for name in quantisation.layouts:
        for part, kinds in LAYOUTS[name].kinds.items():
            found[f".{part}"] = found.get(f".{part}", frozenset()) | kinds
    return found


class QuantisedSource:
    """A WeightSource over files that hold such a checkpoint."""

    def __init__(self, files: SafetensorsSource, quantisation: Quantisation) -> None:
        self.description = files.description
        self._files = files
        self._matrices: dict[str, tuple[Layout, Stored]] = {}  # by our names
        parts = set[str]()
        for layout in (LAYOUTS[name](quantisation) for name in quantisation.layouts):
            for stem in _stems(files, layout):
                self._matrices[f"{stem}.weight"] = layout, Stored(files, stem)
                parts |= {f"{stem}.{part}" for part in layout.kinds}
        self._plain = {name for name in files.names() if name not in parts}
        self._refuse_scales_alone()

    @property
    def dtype(self) -> torch.dtype:
        """That of the matrices that are left in numbers: embeddings, if nothing else."""
        kinds = [kind for name in self._plain if (kind := self._files.kind(name)) in FLOAT_TYPES]
        return FLOAT_TYPES[max(sorted(set(kinds)), key=kinds.count)] if kinds else torch.float32

    def names(self) -> Collection[str]:
        return self._plain | self._matrices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._matrices:
            return self._files.shape(name)
        layout, stored = self._matrices[name]
        return layout.shape(stored)

    def load(self, name: str) -> Tensor:
        if name not in self._matrices:
            return self._files.load(name)
        layout, stored = self._matrices[name]
        return layout.read(stored).values()

    def load_codes(self, name: str) -> Codes | None:
        if name not in self._matrices:
            return None
        layout, stored = self._matrices[name]
        return layout.read(stored)

    def name_in_file(self, name: str) -> str:
        return name

    def _refuse_scales_alone(self) -> None:
        """A matrix in numbers beside scales would have to be rounded first, or is broken."""
        for name in sorted(self._plain):
            stem, _, part = name.rpartition(".")
            if part in ("weight_scale", "weight_scale_inv", "weight_zero_point", "qzeros"):
                stored = (
                    f"{stem}.weight is {self._files.kind(f'{stem}.weight')}" if self._has(stem) else "there is none"
                )
                raise ModelError(f"{self.description}: {name} is for a matrix in codes, but {stored}")

    def _has(self, stem: str) -> bool:
        return f"{stem}.weight" in self._plain


def _stems(files: SafetensorsSource, layout: Layout) -> list[str]:
    ending = f".{layout.codes}"
    kinds = layout.kinds[layout.codes]
    return [name.removesuffix(ending) for name in files.names() if name.endswith(ending) and files.kind(name) in kinds]
