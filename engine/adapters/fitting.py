"""An adapter on a model: its modules by the products of the layers, checked tensor by tensor.

Families name and order matrices in one way; checkpoints, and with them adapters, in several: joined, turned, head by
head. What a checkpoint's reader does with the rows of a matrix it does here with their numbers, which then say what
becomes of the rows of B. A reads the same rows in any case.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from bequest.engine.adapters.files import WEIGHTS, Module
from bequest.engine.errors import InvalidAdapter
from bequest.engine.kernels.cpu_lora import LoraPart
from bequest.engine.kernels.cpu_weights import QuantisedRows
from bequest.engine.models.any_config import OwnConfig
from bequest.engine.models.cutting import Cut, Cutting
from bequest.engine.models.naming import as_families_name
from bequest.engine.models.reader import Matrix

_ENDING = ".weight"


def fit(
    modules: Sequence[Module], config: OwnConfig, matrices: Mapping[str, Matrix], cutting: Cutting | None = None
) -> dict[int, list[LoraPart]]:
    """What the adapter adds to each product, by the products' numbers. `cutting`: of the model whose part has these
    products. Raises InvalidAdapter."""
    numbers = RowNumbers(modules)
    named = as_families_name(numbers, config if cutting is None else cutting.whole)
    sites: dict[int, list[LoraPart]] = {}
    for name in named.names():
        stored = numbers.nearest(name)
        matrix = matrices.get(name.removesuffix(_ENDING))
        if matrix is None:
            raise InvalidAdapter(f"{WEIGHTS}: {_told(name, stored)}.")
        try:
            module, rows = numbers.find(named.load(name)[:, 0])
        except RuntimeError:  # rows that do not divide into heads
            raise _misfit(stored, matrix) from None
        columns = slice(None)
        if cutting is not None:
            rows, columns = _own_part(cutting.of(name, (len(rows), module.a.shape[1])), rows)
        sites.setdefault(matrix.site, []).append(_part(module, rows, columns, matrix))
    return sites


def _own_part(cut: Cut | None, rows: Tensor) -> tuple[Tensor, slice]:
    """Which rows of B, and which columns of A, are a rank's: what it adds is then its part of a sum, too."""
    if cut is None:
        return rows, slice(None)
    if cut.along == "columns":
        return rows, cut.parts[0]
    return torch.cat([rows[part] for part in cut.parts]), slice(None)


class RowNumbers:
    """A WeightSource: in place of each module's matrix [N, K] the numbers [N, 1] that its rows have among all."""

    description, dtype = "the adapter", torch.int64

    def __init__(self, modules: Sequence[Module]) -> None:
        self._modules = {module.name + _ENDING: module for module in modules}
        ends = accumulate(len(module.b) for module in modules)
        self._starts = dict(zip(self._modules, (0, *ends), strict=False))

    def names(self) -> Collection[str]:
        return self._modules.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return (len(self._modules[name].b), 1)

    def load(self, name: str) -> Tensor:
        start = self._starts[name]
        return torch.arange(start, start + len(self._modules[name].b))[:, None]

    def load_codes(self, name: str) -> QuantisedRows | None:
        return None

    def nearest(self, name: str) -> Module:
        """For errors: the module of this name, or one that a reader makes it of."""
        beside = name.removesuffix(_ENDING).rsplit(".", 1)[0]
        near = [module for module in self._modules.values() if module.name.startswith(beside)]
        return self._modules.get(name) or (near or list(self._modules.values()))[0]

    def find(self, numbers: Tensor) -> tuple[Module, Tensor]:
        """The module that rows are of, and which of its own they are."""
        starts = list(self._starts.values())
        at = bisect_right(starts, int(numbers[0])) - 1
        module, rows = list(self._modules.values())[at], numbers - starts[at]
        assert int(rows.min()) >= 0 and int(rows.max()) < len(module.b), "no matrix is made of two"
        return module, rows


def _part(module: Module, rows: Tensor, columns: slice, matrix: Matrix) -> LoraPart:
    a = module.a[:, columns]
    if len(rows) != matrix.rows or a.shape[1] != matrix.columns:
        raise _misfit(module, matrix)
    b = module.b[rows].T.contiguous()  # [R, C]
    return LoraPart(a.contiguous(), b, matrix.first_row, module.scale)


def _misfit(module: Module, matrix: Matrix) -> InvalidAdapter:
    a, b = list(module.a.shape), list(module.b.shape)
    rank, rows, columns = module.rank, matrix.rows, matrix.columns
    whole = f"[{rank}, {columns}] and [{rows}, {rank}]" if len(module.b) == rows or a[1] != columns else "others"
    return InvalidAdapter(
        f"{WEIGHTS}: {module.stored}.lora_A.weight and lora_B.weight have shapes {a} and {b}, but this model needs "
        f"{whole}: the adapter is of another one."
    )


def _told(name: str, module: Module) -> str:
    tensor = f"{module.stored}.lora_A.weight"
    if ".experts." in name:
        return f"{tensor} is of an expert, and adapters of experts are not supported"
    if "layers." not in name and "block." not in name:
        return f"{tensor} is of an embedding or of the output, whose adapters are not supported"
    return f"{tensor} is of a module that this model does not have"
