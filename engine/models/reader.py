"""Reading a checkpoint by the names of its tensors.

A family describes its model once, through a Reader. A Lister finds out so which tensors the model has; a Loader brings
them to a backend.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self, TypeVar

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.kernels.kv_format import UNSCALED, KvScales
from bequest.engine.layers.backend import Backend
from bequest.engine.layers.codes import Codes
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.parts import Activation, Chosen, Norm
from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.step_adapters import AdapterRows
from bequest.engine.layers.weight import Stored, Table, Weight
from bequest.engine.models.kv_scales import read_kv_scales
from bequest.engine.models.progress import shown
from bequest.engine.models.sites import site_of, site_of_experts
from bequest.engine.models.vocabulary_names import VOCABULARY
from bequest.engine.models.weights import WeightSource

Part = TypeVar("Part")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a checkpoint, as rows of a weight."""

    site: int  # the number of the weight
    first_row: int
    rows: int
    columns: int
    num_experts: int = 0  # of an expert's matrix: of so many
    is_table: bool = False  # rows are looked up, and nothing is multiplied
    known: Tensor | None = field(default=None, compare=False)  # of some of its rows (models/vocabulary.py)


class Reader(ABC):
    """Names are without the prefix that the reader stands at."""

    def __init__(self) -> None:
        self._prefix = ""

    def under(self, prefix: str) -> Self:
        """The reader at a longer prefix."""
        deeper = copy.copy(self)
        deeper._prefix = self._prefix + prefix
        return deeper

    def norm(self, name: str, size: int, eps: float, *, has_bias: bool = False) -> Norm:
        bias = self.vector(f"{name}.bias", size) if has_bias else None
        return Norm(self.vector(f"{name}.weight", size), eps, bias)

    def centred_norm(self, name: str, size: int, eps: float) -> Norm:
        """One that subtracts the mean, and has no bias."""
        return Norm(self.vector(f"{name}.weight", size), eps, self.placed(torch.zeros(size), as_weight=True))

    def offset_norm(self, name: str, size: int, eps: float, offset: float) -> Norm:
        """One that multiplies by offset + weight."""
        weight, left = self.offset_vector(f"{name}.weight", size, offset)
        return Norm(weight, eps, offset=left)

    def weight(self, name: str, rows: int, columns: int, *, has_bias: bool = False) -> Weight:
        """A matrix [rows, columns] and its bias [rows]."""
        return self.stacked([name], [rows], columns, [has_bias])

    @abstractmethod
    def stacked(self, names: Sequence[str], rows: Sequence[int], columns: int, has_bias: Sequence[bool]) -> Weight:
        """Several matrices that read the same rows. One without a bias beside others that have one gets zeros."""

    @abstractmethod
    def experts(
        self, names: Sequence[str], rows: Sequence[int], columns: int, num_experts: int, *, has_bias: bool = False
    ) -> ExpertWeights:
        """The same of each expert, whose number stands before the names."""

    @abstractmethod
    def vector(self, name: str, size: int) -> Tensor:
        """The weight or the bias of a norm, as kernels take it."""

    @abstractmethod
    def offset_vector(self, name: str, size: int, offset: float) -> tuple[Tensor, float]:
        """The weight of a norm that is offset + values: as kernels take it, and what they are still to add."""

    @abstractmethod
    def rounded(self, value: float) -> float:
        """As a value of the dtype that weights are kept in."""

    @abstractmethod
    def table(self, name: str, rows: int, columns: int, *, first: int = 0) -> Table:
        """Rows [first + rows, columns] that nothing is multiplied with, from row `first` on."""

    @abstractmethod
    def tensor(self, name: str, shape: Shape) -> Tensor:
        """What a family makes something else of (`placed`, `made`)."""

    @abstractmethod
    def optional(self, name: str) -> Tensor | None:
        """A tensor that a checkpoint may have."""

    @abstractmethod
    def made(self, matrix: Tensor, bias: Tensor | None) -> Weight:
        """A weight of a matrix [N, K] and of a bias that `vector` or `placed` gave."""

    @abstractmethod
    def placed(self, values: Tensor, *, as_weight: bool = False) -> Tensor:
        """On the device: float32, or as the weight of a norm is kept."""

    @abstractmethod
    def kv_scales(self) -> KvScales:
        """Of an fp8 cache, of the attention at this prefix."""

    @abstractmethod
    def each(self, make: Callable[[int], Part], count: int) -> list[Part]:
        """make(0), make(1), …: layers, which may be read side by side."""


class Lister(Reader):
    """Reads nothing and notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, Shape] = {}

    def stacked(self, names: Sequence[str], rows: Sequence[int], columns: int, has_bias: Sequence[bool]) -> Weight:
        for name, count, biased in zip(names, rows, has_bias, strict=True):
            self.tensor(f"{name}.weight", (count, columns))
            if biased:
                self.tensor(f"{name}.bias", (count,))
        return Unread(sum(rows), columns)

    def experts(
        self, names: Sequence[str], rows: Sequence[int], columns: int, num_experts: int, *, has_bias: bool = False
    ) -> ExpertWeights:
        for number in range(num_experts):
            self.under(f"{number}.").stacked(names, rows, columns, [has_bias] * len(names))
        return UnreadExperts(num_experts, sum(rows), columns)

    def vector(self, name: str, size: int) -> Tensor:
        return self.tensor(name, (size,))

    def offset_vector(self, name: str, size: int, offset: float) -> tuple[Tensor, float]:
        return self.vector(name, size), offset

    def rounded(self, value: float) -> float:
        return value

    def table(self, name: str, rows: int, columns: int, *, first: int = 0) -> Table:
        self.tensor(f"{name}.weight", (first + rows, columns))
        return Unread(rows, columns)

    def tensor(self, name: str, shape: Shape) -> Tensor:
        self.shapes[self._prefix + name] = shape
        return torch.zeros(()).expand(shape)  # which takes no memory

    def optional(self, name: str) -> Tensor | None:
        return None

    def made(self, matrix: Tensor, bias: Tensor | None) -> Weight:
        return Unread(*matrix.shape)

    def placed(self, values: Tensor, *, as_weight: bool = False) -> Tensor:
        return values

    def kv_scales(self) -> KvScales:
        return UNSCALED

    def each(self, make: Callable[[int], Part], count: int) -> list[Part]:
        return [make(index) for index in range(count)]


class Unread(Weight):
    """Has a shape alone."""

    format, nbytes = "nothing", 0

    def __init__(self, out_features: int, in_features: int) -> None:
        self._shape = (out_features, in_features)

    @property
    def out_features(self) -> int:
        return self._shape[0]

    @property
    def in_features(self) -> int:
        return self._shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("this weight was listed, not loaded")

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        raise AssertionError("this weight was listed, not loaded")

    def with_bias(self, bias: Tensor) -> Weight:
        return self


class UnreadExperts(ExpertWeights):
    """Has a shape alone."""

    format, nbytes = "nothing", 0
    num_experts, out_features, in_features = 0, 0, 0

    def __init__(self, num_experts: int, out_features: int, in_features: int) -> None:
        self.num_experts, self.out_features, self.in_features = num_experts, out_features, in_features

    def gated(self, x: Tensor, chosen: Chosen, activation: Activation) -> Tensor:
        raise AssertionError("these weights were listed, not loaded")

    def summed(self, x: Tensor, chosen: Chosen) -> Tensor:
        raise AssertionError("these weights were listed, not loaded")

    def with_adapters(
        self, down: ExpertWeights, x: Tensor, chosen: Chosen, activation: Activation, rows: AdapterRows
    ) -> Tensor:
        raise AssertionError("these weights were listed, not loaded")


class Loader(Reader):
    """Brings tensors of a checkpoint to a backend, in the dtype that they are kept in there."""

    def __init__(self, source: WeightSource, backend: Backend, dtype: torch.dtype, *, scales_kv: bool = False) -> None:
        """`scales_kv`: the cache is fp8."""
        super().__init__()
        self.tables: list[Stored] = []  # all that were made; norms and biases are too small to count
        self.matrices: dict[str, Matrix] = {}  # by the names of their tensors, without the ending
        self._source = source
        self._backend = backend
        self._dtype = dtype
        self._scales_kv = scales_kv

    def stacked(self, names: Sequence[str], rows: Sequence[int], columns: int, has_bias: Sequence[bool]) -> Weight:
        bias = None
        if any(has_bias):
            parts = [
                self._load(f"{name}.bias").float() if biased else torch.zeros(count)
                for name, count, biased in zip(names, rows, has_bias, strict=True)
            ]
            bias = self._backend.vector(torch.cat([part.to(parts[0].device) for part in parts]), self._dtype)
        weight = self._quantised(names, bias) or self._dense(names, bias)
        assert (weight.out_features, weight.in_features) == (sum(rows), columns), (names, weight)
        weight.site = site_of(self._prefix + names[0])
        self._number(weight.site, names, rows, columns)
        return self._kept(weight)

    def _number(self, site: int, names: Sequence[str], rows: Sequence[int], columns: int, num_experts: int = 0) -> None:
        begin = 0
        for name, count in zip(names, rows, strict=True):
            self.matrices[self._prefix + name] = Matrix(site, begin, count, columns, num_experts)
            begin += count

    def _dense(self, names: Sequence[str], bias: Tensor | None) -> Weight:
        return self._backend.weight([self._load(f"{name}.weight") for name in names], bias, self._dtype)

    def _quantised(self, names: Sequence[str], bias: Tensor | None) -> Weight | None:
        """A matrix stays in the codes of a checkpoint where the backend multiplies these."""
        if self._prefix + names[0] in VOCABULARY and not self._backend.tables_in_codes:
            return None
        codes = self._codes(names)
        if codes is None or not (self._backend.joins_codes or _is_of_one_kind(codes)):
            return None
        return self._backend.quantised_weight(codes, bias)

    def _codes(self, names: Sequence[str]) -> list[Codes] | None:
        """Of matrices that are one weight; None where they are not all in codes that may stay."""
        types = self._backend.code_types(self._dtype)
        if not types:
            return None
        codes = [self._source.load_codes(f"{self._prefix}{name}.weight") for name in names]
        parts = [part for part in codes if isinstance(part, types)]
        return parts if len(parts) == len(names) else None

    def experts(
        self, names: Sequence[str], rows: Sequence[int], columns: int, num_experts: int, *, has_bias: bool = False
    ) -> ExpertWeights:
        def of_expert(number: int, kind: str) -> list[Tensor]:
            return [self._load(f"{number}.{name}.{kind}") for name in names]

        bias = None
        if has_bias:
            bias = torch.stack([torch.cat(of_expert(number, "bias")) for number in range(num_experts)]).float()
        made = self._quantised_experts(names, num_experts, bias)
        if made is None:
            matrices = (of_expert(number, "weight") for number in range(num_experts))  # read when their turn comes
            made = self._backend.expert_weights(matrices, num_experts, bias, self._dtype)
        assert (made.num_experts, made.out_features, made.in_features) == (num_experts, sum(rows), columns), names
        made.site = first = site_of_experts(self._prefix + names[0])
        for number in range(num_experts):
            self._number(first + number, [f"{number}.{name}" for name in names], rows, columns, num_experts)
        return self._kept(made)

    def _quantised_experts(self, names: Sequence[str], num_experts: int, bias: Tensor | None) -> ExpertWeights | None:
        """The same of experts, as the first of them is stored."""
        first = self._codes([f"0.{name}" for name in names])
        if first is None or not _is_of_one_kind(first):
            return None

        def of_expert(number: int) -> list[Codes]:
            codes = self._codes([f"{number}.{name}" for name in names])
            if codes is None or not _is_of_one_kind([first[0], *codes]):
                stored = self._source.name_in_file(f"{self._prefix}{number}.{names[0]}.weight")
                described = f"{self._source.description}: {stored}"
                raise ModelError(f"{described} is stored otherwise than expert 0; convert the file again")
            return codes

        return self._backend.quantised_expert_weights(map(of_expert, range(num_experts)), num_experts, bias)

    def vector(self, name: str, size: int) -> Tensor:
        return self._backend.vector(self._load(name), self._dtype)

    def offset_vector(self, name: str, size: int, offset: float) -> tuple[Tensor, float]:
        return self._backend.offset_vector(self._load(name), offset, self._dtype)

    def rounded(self, value: float) -> float:
        return float(torch.tensor(value, dtype=self._dtype))

    def table(self, name: str, rows: int, columns: int, *, first: int = 0) -> Table:
        return self._kept(self._backend.table(self._load(f"{name}.weight")[first:], self._dtype))

    def tensor(self, name: str, shape: Shape) -> Tensor:
        return self._load(name)

    def optional(self, name: str) -> Tensor | None:
        return self._load(name) if self._prefix + name in self._source.names() else None

    def made(self, matrix: Tensor, bias: Tensor | None) -> Weight:
        return self._kept(self._backend.weight([matrix], bias, self._dtype))

    def placed(self, values: Tensor, *, as_weight: bool = False) -> Tensor:
        if as_weight:
            return self._backend.vector(values, self._dtype)
        return values.to(self._backend.device, torch.float32)

    def kv_scales(self) -> KvScales:
        return read_kv_scales(self._source, self._prefix) if self._scales_kv else UNSCALED

    def each(self, make: Callable[[int], Part], count: int) -> list[Part]:
        # Reading, dequantising and packing leave the interpreter, so threads help; each holds a layer's plain weights
        # on a CPU, and pieces of them on their way to a GPU.
        threads = 4 if self._backend.device.type == "cpu" else 8
        with ThreadPoolExecutor(min(threads, os.cpu_count() or 1)) as pool:
            made = pool.map(make, range(count))
            return list(shown(made, count))

    def finished(self, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
        """All that a family described of a stack, as it is to be run."""
        return list(layers)

    def _load(self, name: str) -> Tensor:
        return self._source.load(self._prefix + name)

    def _kept(self, table: AnyTable) -> AnyTable:
        self.tables.append(table)
        return table


AnyTable = TypeVar("AnyTable", bound=Stored)


def _is_of_one_kind(codes: Sequence[Codes]) -> bool:
    return len({part.kind for part in codes}) == 1
