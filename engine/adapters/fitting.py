"""An adapter on a model: its modules by the products of the layers, checked tensor by tensor.

Families name and order matrices in one way; checkpoints, and with them adapters, in several: joined, turned, head by
head. What a checkpoint's reader does with the rows of a matrix it does here with their numbers, which then say what
becomes of the rows of B. A reads the same rows in any case.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.adapters.config import FILE
from bequest.engine.adapters.files import OUTPUT_NAME, WEIGHTS, Copy, Module
from bequest.engine.errors import InvalidAdapter
from bequest.engine.kernels.cpu_lora import LoraPart
from bequest.engine.kernels.cpu_weights import QuantisedRows
from bequest.engine.models.any_config import OwnConfig
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.cutting import Cut, Cutting
from bequest.engine.models.naming import has_turned_experts, named_by_families
from bequest.engine.models.padding import heads_along, without_padding
from bequest.engine.models.reader import Matrix

_ENDING = ".weight"
NO_ROW = -1
_ROUNDING = 0.02  # of values in bfloat16, of the largest in a matrix


def fit(
    modules: Sequence[Module], config: OwnConfig, matrices: Mapping[str, Matrix], cutting: Cutting | None = None
) -> dict[int, list[LoraPart]]:
    """What the adapter adds to each product, by the products' numbers. `cutting`: of the model whose part has these
    products. Raises InvalidAdapter."""
    whole = config if cutting is None else cutting.whole
    plain = without_padding(whole)
    padding = HeadPadding(plain.head_dim, whole.head_dim)
    numbers = RowNumbers(modules, turned=has_turned_experts(whole))
    named = named_by_families(numbers, plain)
    sites: dict[int, list[LoraPart]] = {}
    for name in named.names():
        matrix = matrices.get(name.removesuffix(_ENDING))
        if matrix is None:
            raise InvalidAdapter(f"{WEIGHTS}: {_told(name, numbers.nearest(name))}.")
        try:
            module, rows = padding.apply(name, *numbers.find(named.load(name)[:, 0]))
        except RuntimeError:  # rows that do not divide into heads
            raise _misfit(numbers.nearest(name), matrix) from None
        if module.is_table != matrix.is_table:
            raise InvalidAdapter(f"{WEIGHTS}: {_told(name, module)}.")
        columns = slice(None)
        if cutting is not None:
            rows, columns = _own_part(cutting.of(name, (len(rows), module.a.shape[1])), rows)
        sites.setdefault(matrix.site, []).append(_part(module, rows, columns, matrix))
    _check_experts(modules, matrices)
    return sites


class HeadPadding:
    """Heads that kernels take larger than a checkpoint has them (engine/models/padding.py): to what is behind the
    values of a head nothing is added, and from there nothing is read."""

    def __init__(self, head_dim: int, padded: int) -> None:
        self._head_dim, self._behind = head_dim, padded - head_dim

    def apply(self, name: str, module: Module, rows: Tensor) -> tuple[Module, Tensor]:
        """Rows of B behind a head are NO_ROW, and columns of A there are zeros."""
        along = heads_along(name) if self._behind else None
        if along == "rows":
            heads = rows.unflatten(0, (-1, self._head_dim))
            return module, F.pad(heads, (0, self._behind), value=NO_ROW).flatten()
        if along == "columns":
            heads = module.a.unflatten(1, (-1, self._head_dim))
            return replace(module, a=F.pad(heads, (0, self._behind)).flatten(1)), rows
        return module, rows


def check_copies(copies: Sequence[Copy], matrices: Mapping[str, Matrix]) -> None:
    """What PEFT saves of the base model beside an adapter must be this model's. Raises InvalidAdapter."""
    for copy in copies:
        ending = copy.name.rsplit(".", 1)[-1]
        matrix = next((own for name, own in matrices.items() if name.rsplit(".", 1)[-1] == ending), None)
        if matrix is None or (matrix.rows, matrix.columns) != copy.shape:
            raise InvalidAdapter(
                f"{WEIGHTS}: {copy.stored} has shape {list(copy.shape)}, which this model's own matrix has not: the "
                "adapter's vocabulary is another one."
            )
        if matrix.known is None:
            continue
        if float((copy.rows - matrix.known).abs().max()) > _ROUNDING * float(matrix.known.abs().max()):
            raise InvalidAdapter(
                f"{WEIGHTS}: {copy.stored} holds other values than this model's own matrix; whole matrices are not "
                "replaced here: merge the adapter into the model."
            )


def with_ties(modules: Sequence[Module], config: OwnConfig) -> list[Module]:
    """As PEFT ties them: what is added to the embedding of a tied model is added to its output matrix, too. Raises
    InvalidAdapter."""
    tables = [module for module in modules if module.is_table]
    if not config.tie_word_embeddings or not tables or any(module.name == OUTPUT_NAME for module in modules):
        return list(modules)
    if not isinstance(config, DecoderConfig):
        message = "ensure_weight_tying is not supported for encoder-decoder models"
        raise InvalidAdapter(f"{FILE}: {message}.", field="ensure_weight_tying")
    return [*modules, *(replace(table, name=OUTPUT_NAME, is_table=False) for table in tables)]


def _check_experts(modules: Sequence[Module], matrices: Mapping[str, Matrix]) -> None:
    """A parameter of all experts is of as many as the model has."""
    counts = {matrix.num_experts for matrix in matrices.values() if matrix.num_experts}
    for module in modules:
        if module.num_experts and module.num_experts not in counts:
            raise InvalidAdapter(
                f"{WEIGHTS}: {module.stored}.lora_A.weight is of {module.num_experts} experts, but this model has "
                f"{max(counts)} of them: the adapter is of another one."
            )


def _own_part(cut: Cut | None, rows: Tensor) -> tuple[Tensor, slice]:
    """Which rows of B, and which columns of A, are a rank's: what it adds is then its part of a sum, too. Each adds
    to the vocabulary of all."""
    if cut is None or cut.along == "vocabulary":
        return rows, slice(None)
    if cut.along == "columns":
        return rows, cut.parts[0]
    return torch.cat([rows[part] for part in cut.parts]), slice(None)


class RowNumbers:
    """A WeightSource: in place of each module's matrix [N, K] the numbers [N, 1] that its rows have among all, and in
    place of a parameter of experts those of all of them, [E, N, 1], or [E, 1, N] where it is stored `turned`."""

    description, dtype = "the adapter", torch.int64

    def __init__(self, modules: Sequence[Module], *, turned: bool = False) -> None:
        self._modules = {_tensor_of(module): module for module in modules}
        counts = [len(module.b) * max(1, module.num_experts) for module in modules]
        self._starts = (0, *accumulate(counts))
        self._ranges = dict(zip(self._modules, pairwise(self._starts), strict=True))
        self._in_order = tuple(self._modules.values())
        self._turned = turned
        self._last: tuple[str, Tensor] | None = None  # experts of one parameter are asked for one after another

    def names(self) -> Collection[str]:
        return self._modules.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        module = self._modules[name]
        rows = len(module.b)
        if not module.num_experts:
            return (rows, 1)
        return (module.num_experts, 1, rows) if self._turned else (module.num_experts, rows, 1)

    def load(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            numbers = torch.arange(*self._ranges[name])
            module = self._modules[name]
            if module.num_experts:
                numbers = numbers.view(module.num_experts, len(module.b))
                numbers = numbers[:, None] if self._turned else numbers[:, :, None]
            else:
                numbers = numbers[:, None]
            self._last = (name, numbers)
        return self._last[1]

    def load_codes(self, name: str) -> QuantisedRows | None:
        return None

    def name_in_file(self, name: str) -> str:
        return name

    def nearest(self, name: str) -> Module:
        """For errors: the module of this name, or one that a reader makes it of."""
        beside = name.removesuffix(_ENDING).rsplit(".", 1)[0]
        parents = (beside, beside.rsplit(".", 1)[0]) if ".experts." in name else (beside,)
        near = [module for parent in parents for module in self._in_order if module.name.startswith(parent)]
        return self._modules.get(name) or (near or self._in_order)[0]

    def find(self, numbers: Tensor) -> tuple[Module, Tensor]:
        """The module that rows are of, or the part of it that is one expert's, and which of its own they are."""
        at = bisect_right(self._starts, int(numbers[0])) - 1
        module, rows = self._in_order[at], numbers - self._starts[at]
        if module.num_experts:
            expert = int(rows[0]) // len(module.b)
            module, rows = module.of_expert(expert), rows - expert * len(module.b)
        assert int(rows.min()) >= 0 and int(rows.max()) < len(module.b), "no matrix is made of two"
        return module, rows


def _tensor_of(module: Module) -> str:
    """As checkpoints name it."""
    return module.name if module.num_experts else module.name + _ENDING


def _part(module: Module, rows: Tensor, columns: slice, matrix: Matrix) -> LoraPart:
    a = module.a[:, columns]
    if len(rows) != matrix.rows or a.shape[1] != matrix.columns:
        raise _misfit(module, matrix)
    b = module.b[rows].T.contiguous()  # [R, C]
    b[:, rows == NO_ROW] = 0
    if matrix.is_table:
        return LoraPart(b, a.contiguous(), 0, module.scale)
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
    tensor = f"{module.stored}.lora_embedding_A" if module.is_table else f"{module.stored}.lora_A.weight"
    if "layers." not in name and "block." not in name:
        return f"{tensor} is of an embedding that this model does not have, or whose adapters are not supported"
    return f"{tensor} is of a module that this model does not have"
