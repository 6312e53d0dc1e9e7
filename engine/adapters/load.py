"""From a PEFT directory to what a runner registers. Called in a worker thread, beside serving."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bequest.engine.adapters.files import read_directory
from bequest.engine.adapters.fitting import check_copies, fit, with_ties
from bequest.engine.kernels.cpu_lora import LoraMatrices, LoraPart
from bequest.engine.models.any_config import OwnConfig
from bequest.engine.models.cutting import Cutting
from bequest.engine.models.loaded import LoadedModel
from bequest.engine.models.reader import Matrix
from bequest.engine.types.adapter import AdapterWeights, LoadAdapter, none_because


class Matrices(Protocol):
    """An adapter as a runner takes it."""

    @property
    def nbytes(self) -> int: ...


Place = Callable[[Mapping[int, Sequence[LoraPart]]], Matrices]


def loader_of(loaded: LoadedModel, max_rank: int, place: Place = LoraMatrices) -> LoadAdapter:
    """`place`: brings what an adapter adds at which products to where steps read it; else it is for a CPU."""
    if not isinstance(loaded.config, OwnConfig):
        return none_because("its layers are computed by the transformers library (model_impl)")
    return AdapterLoader(loaded.config, loaded.matrices, max_rank, place, loaded.cutting)


class AdapterLoader:
    """Makes adapters for one model."""

    def __init__(
        self,
        config: OwnConfig,
        matrices: Mapping[str, Matrix],
        max_rank: int,
        place: Place = LoraMatrices,
        cutting: Cutting | None = None,
    ) -> None:
        self._config, self._matrices, self._max_rank = config, matrices, max_rank
        self._place, self._cutting = place, cutting

    def __call__(self, directory: Path) -> AdapterWeights:
        """Raises InvalidAdapter, whose text has no path."""
        files = read_directory(directory, self._max_rank)
        check_copies(files.copies, self._matrices)
        modules = with_ties(files.modules, self._config) if files.ties else files.modules
        matrices = self._place(fit(modules, self._config, self._matrices, self._cutting))
        return AdapterWeights(
            matrices=matrices,
            digest=files.digest,
            rank=files.rank,
            num_bytes=matrices.nbytes,
            directory=str(directory),
        )
