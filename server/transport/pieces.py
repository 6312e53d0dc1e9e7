"""Large answers as they leave: bodies in pieces, and memory of the engine's that is given back when they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from bequest.engine.types import Delta

Piece = bytes | memoryview


class Body(Protocol):
    @property
    def size(self) -> int | None:
        """Of all pieces together, in bytes; None: only the end will tell."""

    def pieces(self) -> Iterator[Piece]: ...


def gathered(pieces: Iterable[Piece], least: int) -> Iterator[Piece]:
    """The same bytes, with small pieces put together until they are `least` bytes. None is empty, which would be the
    end of a body in chunks."""
    small: list[Piece] = []
    size = 0
    for piece in pieces:
        if len(piece) >= least:
            if size:
                yield b"".join(small)
                small, size = [], 0
            yield piece
            continue
        small.append(piece)
        size += len(piece)
        if size >= least:
            yield b"".join(small)
            small, size = [], 0
    if size:
        yield b"".join(small)


def release(*deliveries: Delta) -> None:
    """The states of these are sent, or nobody wants them any more."""
    for delivery in deliveries:
        if delivery.hidden_states is not None:
            delivery.hidden_states.release()
