"""LoRA adapters, as all but the device know them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bequest.engine.errors import InvalidAdapter

NO_ADAPTER = 0  # no handle of any


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter as it was loaded once. What was computed with it belongs to it, and to no later one of its name."""

    name: str
    handle: int  # that it was registered under: each load has another one
    digest: str  # of its files
    loaded_at: float = field(default=0.0, compare=False)  # seconds since 1970

    @property
    def identity(self) -> str:
        """What another engine must have loaded to go on with what this one has computed."""
        return f"{self.name}={self.digest}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterWeights:
    """What an adapter adds to the products of a model."""

    matrices: object  # the runner's: what whoever loaded it for that made of it
    digest: str
    rank: int  # the largest
    num_bytes: int
    directory: str


class LoadAdapter(Protocol):
    """Reads a PEFT directory: not for the event loop. Raises InvalidAdapter."""

    def __call__(self, directory: Path) -> AdapterWeights: ...


class PlaceAdapter(Protocol):
    """Brings what was loaded to where steps read it: not for the event loop. Raises InvalidAdapter."""

    def __call__(self, weights: AdapterWeights) -> AdapterWeights: ...


def none_because(reason: str) -> LoadAdapter:
    """Of a model that takes none, for a reason without a full stop."""

    def load(directory: Path) -> AdapterWeights:
        raise InvalidAdapter(f"This model takes no adapters here: {reason}.")

    return load


no_adapters = none_because("nothing here loads any")


def in_place(weights: AdapterWeights) -> AdapterWeights:
    """Steps read it where it is."""
    return weights


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where an engine's adapters come from, and how many it may have at once."""

    load: LoadAdapter = no_adapters
    most: int = 0
    seats: int | None = None  # adapters that steps can read at once; None: all that are loaded
    place: PlaceAdapter = in_place

    def read(self, directory: Path) -> AdapterWeights:
        """One that can be registered."""
        return self.place(self.load(directory))


NO_ADAPTERS = AdapterSource()
