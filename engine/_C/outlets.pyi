"""Events of streams, those of a step in one call: csrc/bindings/bind_outlets.cpp."""

from collections.abc import Callable
from typing import Any, Final

class TokenTexts:  # of a vocabulary, as events have them
    # Called once for each token; b"": it has no text of its own.
    def __init__(self, spell: Callable[[int], bytes]) -> None: ...

class Outlet:  # where the events of one stream go while nothing else is to be told and the client takes them
    def __init__(self, head: bytes, tail: bytes) -> None: ...  # what stands around the text of each event
    is_open: Final[bool]
    num_written: Final[int]  # events
    # A transport of asyncio has write() and is_closing(), its protocol in aiohttp writing_paused.
    def open(self, transport: object, protocol: object, chunked: bool) -> None: ...
    def close(self) -> None: ...  # idempotent; lets the connection go

# Writes each token's event to the outlet of its sequence. The numbers of those that have to be told in another way: the
# token has no text of its own, or the outlet is closed, the client lags or is gone.
def pass_on(texts: TokenTexts, sequences: list[Any], tokens: list[int]) -> list[int]: ...
