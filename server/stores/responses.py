"""Responses that can be fetched and continued: a bounded store of finished ones, and the ones that run.

Apart from the engine's records: a stored response can be continued when its KV and its record are long gone, and the
other way round. Owned by the event-loop thread.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from bequest.engine.types.image import Image
from bequest.server.wire.errors import ApiError

_ENTRY_BYTES = 1024  # of an entry beyond its texts and tokens, about: objects, keys, links


@dataclass(slots=True, eq=False)
class Turn:
    """What one response added to a conversation. Children link to it, so a long conversation is held once."""

    id: str  # of the response
    parent: Turn | None
    items: bytes  # a JSON list: the input's items, then the output's
    num_input: int
    said: tuple[str, ...] = ()  # ids of the output's items, by which later requests may refer to them
    holders: int = field(default=0, init=False)  # entries and turns in the store that lead here

    def input_items(self) -> list[dict[str, Any]]:
        """Everything before the output: the ancestors' items, then this input's."""
        earlier = self.parent.all_items() if self.parent is not None else []
        own: list[dict[str, Any]] = orjson.loads(self.items)
        return earlier + own[: self.num_input]

    def said_items(self) -> dict[str, dict[str, Any]]:
        """The output's, by their ids. All at once: the input, which may be long, is read with them."""
        own: list[dict[str, Any]] = orjson.loads(self.items)
        return dict(zip(self.said, own[self.num_input :], strict=True))

    def all_items(self) -> list[dict[str, Any]]:
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return [item for turn in reversed(turns) for item in orjson.loads(turn.items)]


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """A finished response, in the forms in which it is needed again."""

    id: str
    name: str | None  # the client's own
    tenant: str
    body: bytes  # the object as JSON
    turn: Turn
    token_ids: array[int]  # prompt and sampled
    num_prompt: int
    prompt_text: str  # what the prompt's tokens were made of
    cache_salt: str
    pieces: array[int]  # characters and log-probabilities of each text delta, alternating: how it was streamed
    images: tuple[Image, ...] = ()  # of the prompt
    adapter: str | None = None  # its name: what is stored is text, and goes on under another load of it
    failure: bytes = b""  # the error that it ended with, as its stream told it; empty: it did not fail
    # Bytes, measured once: a text that is not ASCII grows when somebody encodes it, and what was counted when it came
    # must be what is taken off when it goes.
    size: int = field(init=False)

    def __post_init__(self) -> None:
        numbers = self.token_ids.itemsize * len(self.token_ids) + self.pieces.itemsize * len(self.pieces)
        pixels = sum(image.content.nbytes for image in self.images)
        size = len(self.body) + len(self.failure) + sys.getsizeof(self.prompt_text) + numbers + pixels + _ENTRY_BYTES
        object.__setattr__(self, "size", size)


class Archive(Protocol):
    """Where they outlive the process, if they do (server/stores/response_file.py)."""

    def put(self, response: StoredResponse) -> None: ...

    def drop(self, response: StoredResponse) -> None:
        """Nobody fetches it any more. Its turn stays as long as others lead to it."""


class _NoArchive:
    def put(self, response: StoredResponse) -> None:
        return

    def drop(self, response: StoredResponse) -> None:
        return


class _Shelf:
    """The responses of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._names: dict[str, str] = {}  # a client's name → id of the youngest so named
        self.turns: dict[str, Turn] = {}  # id of an item → the turn that said it
        self.size = 0  # bytes

    def put(self, response: StoredResponse) -> None:
        self.entries[response.id] = response
        if response.name is not None:
            self._names[response.name] = response.id
        self.size += response.size
        self._hold(response.turn)

    def get(self, reference: str) -> StoredResponse | None:
        """By id or by the client's name."""
        key = self._names.get(reference, reference)
        if key not in self.entries:
            return None
        self.entries.move_to_end(key)
        return self.entries[key]

    def drop(self, response: StoredResponse) -> None:
        del self.entries[response.id]
        self.size -= response.size
        if response.name is not None and self._names.get(response.name) == response.id:
            del self._names[response.name]
        self._release(response.turn)

    def _hold(self, turn: Turn | None) -> None:
        """Counts a turn and, the first time, its ancestors: they stay as long as a descendant does."""
        while turn is not None:
            turn.holders += 1
            if turn.holders > 1:
                return
            self.size += len(turn.items)
            self.turns.update(dict.fromkeys(turn.said, turn))
            turn = turn.parent

    def _release(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.holders -= 1
            if turn.holders > 0:
                return
            self.size -= len(turn.items)
            for item_id in turn.said:
                if self.turns.get(item_id) is turn:  # what comes from a file may be here twice
                    del self.turns[item_id]
            turn = turn.parent


class ResponseStore:
    """Finished responses by tenant and id. Where room is short, the tenant that has the most of it, and so at least an
    equal share, loses what it used least recently: nobody pushes out those who have less."""

    def __init__(self, most: int, most_bytes: int, archive: Archive | None = None) -> None:
        self._archive = archive or _NoArchive()
        self._most = most
        self._most_bytes = most_bytes
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()  # by tenant, the one not heard of for longest first

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(shelf.size for shelf in self._shelves.values())

    def put(self, response: StoredResponse) -> None:
        """Keeps it and, where room is short, drops others; one that would need all the room is not kept."""
        if self._alone(response) <= self._most_bytes:
            self._archive.put(response)
            self._keep(response)

    def restore(self, responses: Sequence[StoredResponse]) -> None:
        """Those that the archive has, oldest first. One that would need all the room goes, and no other for it."""
        for response in responses:
            if self._alone(response) <= self._most_bytes:
                self._keep(response)
            else:
                self._archive.drop(response)

    def _keep(self, response: StoredResponse) -> None:
        self._shelves.setdefault(response.tenant, _Shelf()).put(response)
        self._shelves.move_to_end(response.tenant)
        while len(self) > self._most:
            self._drop_oldest(max(self._shelves, key=lambda tenant: len(self._shelves[tenant].entries)))
        while self.size > self._most_bytes:
            self._drop_oldest(max(self._shelves, key=lambda tenant: self._shelves[tenant].size))

    def get(self, tenant: str, reference: str) -> StoredResponse | None:
        """By id or by the client's name."""
        shelf = self._shelves.get(tenant)
        if shelf is None:
            return None
        self._shelves.move_to_end(tenant)
        return shelf.get(reference)

    def turn_of(self, tenant: str, item_id: str) -> Turn | None:
        """The turn of a stored response, or of one that such a response goes on from, that said an item. The response
        is used by that as by its own id."""
        shelf = self._shelves.get(tenant)
        turn = None if shelf is None else shelf.turns.get(item_id)
        if turn is not None:
            self.get(tenant, turn.id)
        return turn

    def delete(self, tenant: str, reference: str) -> StoredResponse | None:
        response = self.get(tenant, reference)
        if response is not None:
            self._drop(response)
        return response

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(next(iter(self._shelves[tenant].entries.values())))

    def _drop(self, response: StoredResponse) -> None:
        self._archive.drop(response)
        shelf = self._shelves[response.tenant]
        shelf.drop(response)
        if not shelf.entries:
            del self._shelves[response.tenant]

    def _alone(self, response: StoredResponse) -> int:
        total, turn = response.size, response.turn
        while True:
            total += len(turn.items)
            if turn.parent is None or total > self._most_bytes:
                return total
            turn = turn.parent


class EventLog:
    """The events of a response that runs by itself: whoever comes may read them from any number on."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.closed = False
        self._grown = asyncio.Event()

    def add(self, data: bytes) -> None:
        """One event or several."""
        self.events += [event + b"\n\n" for event in data.split(b"\n\n") if event]
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    async def more(self, seen: int) -> None:
        """Waits until there are more than `seen`, or there will not be any."""
        while len(self.events) <= seen and not self.closed:
            await self._grown.wait()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


@dataclass(slots=True, eq=False)
class RunningResponse:
    """A response that will be stored when it ends, unless somebody deletes it before."""

    id: str
    head: dict[str, Any]  # the object as it stands: in progress
    fail: Callable[[ApiError], None] = field(default=lambda error: None)  # ends it with an error
    keep: bool = True
    log: EventLog | None = None  # of one that runs in the background
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RunningResponses:
    """Those that run, by tenant and by id or the client's name."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], RunningResponse] = {}
        self.tasks: set[asyncio.Task[None]] = set()  # of those in the background, which nobody else holds

    @contextmanager
    def begin(self, tenant: str, name: str | None, response: RunningResponse) -> Iterator[None]:
        """A name that is taken stays the other's: the engine will refuse this one."""
        keys = [(tenant, reference) for reference in (response.id, name) if reference is not None]
        keys = [key for key in keys if key not in self._running]
        self._running.update(dict.fromkeys(keys, response))
        try:
            yield
        finally:
            for key in keys:
                del self._running[key]
            response.ended.set()

    def get(self, tenant: str, reference: str) -> RunningResponse | None:
        """None for one that was deleted, too."""
        found = self._running.get((tenant, reference))
        return found if found is not None and found.keep else None
