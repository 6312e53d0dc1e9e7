"""One holder's references on the blocks of an encoder input. Owned by the event-loop thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bequest.engine._C import BlockTable


class Moving(Protocol):
    """A group, as far as its cross table is concerned."""

    @property
    def runs(self) -> bool: ...


@dataclass(slots=True, eq=False)
class CrossTable:
    salt: bytes
    table: BlockTable
    group: Moving | None  # that holds it; None: a lease does
    trusted: bool = True  # its content may be shared with others
