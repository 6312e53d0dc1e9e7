"""Which kind of work a request is. A new kind is a file of its own and a line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bequest.engine.state.sequence import Group, Kind, Lane
from bequest.engine.types import ModelInfo, Request
from bequest.engine.work.desk import Desk
from bequest.engine.work.extraction import Encoding, Extraction
from bequest.engine.work.generation import Generation
from bequest.engine.work.reading import Reading
from bequest.engine.work.scoring import Scoring
from bequest.engine.work.search import Search


class KindClass(Protocol):
    """The class of a kind."""

    @property
    def lane(self) -> Lane:
        """Where it waits."""

    def __call__(self, group: Group, desk: Desk) -> Kind: ...

    def takes(self, request: Request) -> bool:
        """Whether a request is of this kind."""

    def check(self, request: Request, info: ModelInfo, desk: Desk) -> None:
        """Raises the EngineError that says why a request of this kind cannot be carried out here."""


KINDS: tuple[KindClass, ...] = (Encoding, Extraction, Search, Scoring, Reading, Generation)  # the first that takes it


def kind_of(request: Request, kinds: Sequence[KindClass] = KINDS) -> KindClass:
    for kind in kinds:
        if kind.takes(request):
            return kind
    raise AssertionError("no kind takes the request")
