"""What a process that follows is told at its start, on its standard input."""

from __future__ import annotations

import msgspec

from bequest.engine.config import EngineConfig


class Order(msgspec.Struct, frozen=True):
    config: EngineConfig
    path: str  # of the model, absolute
    meeting: str  # the file that ranks find each other by
    rank: int
    size: int
    socket: int  # descriptors: of its side of the channel,
    memory: int  # and of the memory behind it


READY = b"r"  # what it answers when its libraries are loaded


def encode_order(order: Order) -> bytes:
    return msgspec.msgpack.encode(order)


def decode_order(data: bytes) -> Order:
    return msgspec.msgpack.decode(data, type=Order)
