"""Where tensors come from, by the names of Hugging Face checkpoints; loaders of other formats translate theirs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.layers.codes import Codes
from bequest.engine.models.file_names import name_by_others

MOST_NAMED = 10  # tensors that an error lists


class WeightSource(Protocol):
    """An open checkpoint. May be read from several threads."""

    @property
    def description(self) -> str:
        """The file or directory, for errors."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What the checkpoint's matrices are stored in; float32 where that is a quantised format."""
        ...

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str) -> Tensor:
        """The tensor, in any float type; may be a view of the file."""
        ...

    def load_codes(self, name: str) -> Codes | None:
        """A matrix in the codes of the file, where it is quantised in a way that kernels read; else None."""
        ...

    def name_in_file(self, name: str) -> str:
        """What the file calls a tensor, or would call one that it lacks: for errors."""
        ...


class SourceOver:
    """What a WeightSource that makes something of another has in common with it."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    @property
    def description(self) -> str:
        return self._source.description

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    def names(self) -> Collection[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def load(self, name: str) -> Tensor:
        return self._source.load(name)

    def name_in_file(self, name: str) -> str:
        return self._source.name_in_file(name)


class PrefixedSource(SourceOver):
    """A WeightSource whose `bare` names get a prefix."""

    def __init__(self, source: WeightSource, prefix: str, bare: frozenset[str]) -> None:
        super().__init__(source)
        self._prefix = prefix
        self._bare = bare

    def names(self) -> Collection[str]:
        return {self._prefix + name if name in self._bare else name for name in self._source.names()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._own(name))

    def load(self, name: str) -> Tensor:
        return self._source.load(self._own(name))

    def load_codes(self, name: str) -> Codes | None:
        return self._source.load_codes(self._own(name))

    def name_in_file(self, name: str) -> str:
        stored = {self._prefix + bare: bare for bare in self._bare}
        return self._source.name_in_file(name_by_others(name, stored))

    def _own(self, name: str) -> str:
        bare = name.removeprefix(self._prefix)
        return bare if bare in self._bare else name


def check_shapes(
    source: WeightSource, names: Collection[str], expected: Mapping[str, tuple[int, ...]], architecture: str
) -> None:
    """Refuses a checkpoint that lacks a tensor, has one of another shape, or has one among `names` (those that are not
    to be overlooked) that nobody would read."""
    present = set(names)
    missing = [name for name in expected if name not in present]
    unread = sorted(present - expected.keys())
    wrong = [name for name, shape in expected.items() if name in present and source.shape(name) != shape]
    faults = [f"{name} is missing" for name in _in_file(source, missing)]
    faults += [f"{name} is not a tensor of this architecture" for name in _in_file(source, unread)]
    for name in wrong:
        shapes = f"{list(source.shape(name))}, not {list(expected[name])}"
        faults.append(f"{_as_part(source, name)} has shape {shapes}")
    if faults:
        more = [f"and {len(faults) - MOST_NAMED} more"] if len(faults) > MOST_NAMED else []
        listed = "; ".join([*faults[:MOST_NAMED], *more])
        raise ModelError(f"{source.description} does not fit {architecture} as configured: {listed}")


def _in_file(source: WeightSource, names: Collection[str]) -> list[str]:
    """One tensor of a file may have several of our names."""
    return [*dict.fromkeys(source.name_in_file(name) for name in names)]


def _as_part(source: WeightSource, name: str) -> str:
    """With our name of it, where a tensor of the file has several."""
    stored = source.name_in_file(name)
    is_part = sum(source.name_in_file(other) == stored for other in source.names()) > 1
    return f"{stored} (as {name})" if is_part else stored
