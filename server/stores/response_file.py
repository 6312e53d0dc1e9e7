"""Stored responses in a file of SQLite, so that they outlive the process. One thread of its own waits for the disk.

A row is a response and the turn that it added to its conversation. One that was deleted, and whose turn others go on
from, has no body any more; the row goes with the last of those. What cannot be written is in memory all the same: a
disk that fails costs nobody an answer. A response whose conversation is not whole in the file is not brought back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import orjson

from bequest.server.stores.response_rows import COLUMNS, WRITE, Row, check, delete, has_row, take
from bequest.server.stores.responses import StoredResponse, Turn

_log = logging.getLogger("bequest.server")

_MOST_WAITING = 1000  # changes that wait for the disk; beyond it responses are in memory alone
_SECONDS_TO_CLOSE = 5.0
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, parent TEXT, items BLOB NOT NULL, num_input INTEGER NOT NULL,
    body BLOB, rest BLOB, PRIMARY KEY (tenant, id));
CREATE INDEX IF NOT EXISTS children ON responses (tenant, parent);
"""


class _Rest(msgspec.Struct):
    """What is needed to go on from a response, beside its body and its items."""

    name: str | None
    token_ids: bytes
    num_prompt: int
    prompt_text: str
    cache_salt: str
    pieces: bytes
    model: str
    adapter: str | None = None
    failure: bytes = b""


class ResponseFile:
    def __init__(self, path: Path, model: str, has_neighbours: bool = False) -> None:
        """`model`: tokens of another one are not brought back, but what was said is. `has_neighbours`: other servers
        have such files in folders beside this one's."""
        self._path = path
        self._has_neighbours = has_neighbours
        self._model = model
        self._thread = ThreadPoolExecutor(1, "bequest-responses")
        self._database: sqlite3.Connection | None = None  # the thread's
        self._num_waiting = 0
        self._behind = False

    async def load(self) -> list[StoredResponse]:
        """Those of earlier processes, oldest first."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._open)

    async def check(self, tenant: str, response_id: str) -> None:
        """Raises RunsElsewhere where a server has it that runs."""
        if self._has_neighbours:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._check, tenant, response_id)

    async def seek(self, tenant: str, response_id: str) -> StoredResponse | None:
        """One that a server left which has ended: it is in this file from now on. Raises RunsElsewhere."""
        if not self._has_neighbours:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._take, tenant, response_id)

    def put(self, response: StoredResponse) -> None:
        if self._num_waiting >= _MOST_WAITING:
            if not self._behind:
                _log.warning("%s: the disk is too slow; some responses will not outlive the process", self._path)
            self._behind = True
            return
        self._behind = False
        self._submit(lambda database: _insert(database, response, self._model))

    def drop(self, response: StoredResponse) -> None:
        self._submit(lambda database: delete(database, response.tenant, response.id))

    async def close(self) -> None:
        """Waits for what is on its way to the disk, but not for ever."""
        closed = self._thread.submit(self._close)
        self._thread.shutdown(wait=False)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(closed), _SECONDS_TO_CLOSE)

    def _submit(self, change: Callable[[sqlite3.Connection], None]) -> None:
        loop = asyncio.get_running_loop()
        self._num_waiting += 1

        def ended(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody counts any more
                loop.call_soon_threadsafe(self._passed)

        self._thread.submit(self._change, change).add_done_callback(ended)

    def _passed(self) -> None:
        self._num_waiting -= 1

    # --- the thread ----------------------------------------------------------------------------------------------

    def _open(self) -> list[StoredResponse]:
        try:
            return self._read()
        except sqlite3.OperationalError as error:
            _log.error("%s: responses will not outlive the process: %s", self._path, error)
        except (sqlite3.DatabaseError, msgspec.DecodeError, UnicodeError, ValueError) as error:
            _log.error("%s is broken (%s): it is set aside, and its responses are lost", self._path, error)
            self._set_aside()
        except OSError as error:
            _log.error("%s: responses will not outlive the process: %s", self._path, error.strerror)
        return []

    def _read(self) -> list[StoredResponse]:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # what users say is nobody else's
        self._close()
        database = self._database = sqlite3.connect(self._path, isolation_level=None)
        # A log beside the file needs memory that all who open it share: those of other machines do not.
        database.execute(f"PRAGMA journal_mode={'TRUNCATE' if self._has_neighbours else 'WAL'}")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("PRAGMA secure_delete=ON")
        database.executescript(_TABLE)
        return _responses(database, self._model)

    def _check(self, tenant: str, response_id: str) -> None:
        with suppress(OSError):  # who seeks it will log that
            check(self._path, tenant, response_id)

    def _take(self, tenant: str, response_id: str) -> StoredResponse | None:
        if self._database is None:
            return None
        try:
            rows = take(self._path, self._database, tenant, response_id)
            found = _from_rows(rows, self._model)
        except (sqlite3.Error, OSError, msgspec.DecodeError, UnicodeError, ValueError) as error:
            _log.warning("responses of other servers were not looked at: %s", error)
            return None
        return found[-1] if found else None

    def _set_aside(self) -> None:
        self._close()
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                os.replace(f"{self._path}{suffix}", f"{self._path}.broken{suffix}")
        with suppress(sqlite3.Error, OSError):
            self._read()

    def _change(self, change: Callable[[sqlite3.Connection], None]) -> None:
        if self._database is None:
            return
        try:
            self._database.execute("BEGIN")
            change(self._database)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            _log.warning("%s: a response is in memory alone: %s", self._path, error)
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()


def _insert(database: sqlite3.Connection, response: StoredResponse, model: str) -> None:
    turn = response.turn
    rest = _Rest(
        name=response.name,
        # Ids of images mean something in this process alone; a conversation can be told again without its tokens.
        token_ids=b"" if response.images else response.token_ids.tobytes(),
        num_prompt=response.num_prompt,
        prompt_text=response.prompt_text,
        cache_salt=response.cache_salt,
        pieces=response.pieces.tobytes(),
        model=model,
        adapter=response.adapter,
        failure=response.failure,
    )
    parent = None if turn.parent is None else turn.parent.id
    row = (response.tenant, response.id, parent, turn.items, turn.num_input, response.body)
    values = (*row, msgspec.msgpack.encode(rest))
    _insert_missing(database, response.tenant, turn.parent)
    database.execute(WRITE, values)


def _insert_missing(database: sqlite3.Connection, tenant: str, turn: Turn | None) -> None:
    """The turns before a response that are not there: dropped while it ran, or not written because the disk was slow.
    Without them its conversation would not be whole."""
    missing: list[Turn] = []
    while turn is not None and not has_row(database, tenant, turn.id):
        missing.append(turn)
        turn = turn.parent
    for turn in reversed(missing):
        parent = None if turn.parent is None else turn.parent.id
        database.execute(WRITE, (tenant, turn.id, parent, turn.items, turn.num_input, None, None))


def _responses(database: sqlite3.Connection, model: str) -> list[StoredResponse]:
    return _from_rows(database.execute(f"SELECT {COLUMNS} FROM responses ORDER BY rowid"), model)


def _from_rows(rows: Iterable[Row], model: str) -> list[StoredResponse]:
    """Parents come before their children."""
    turns: dict[tuple[str, str], Turn] = {}
    found: list[StoredResponse] = []
    for tenant, response_id, parent, items, num_input, body, rest in rows:
        before = None if parent is None else turns.get((tenant, parent))
        if parent is not None and before is None:
            _log.warning("the response %s is lost: its conversation is not whole", response_id)
            continue
        said = tuple(item["id"] for item in orjson.loads(items)[num_input:])
        turn = turns[tenant, response_id] = Turn(response_id, before, items, num_input, said)
        if body is not None:
            kept = msgspec.msgpack.decode(rest or b"", type=_Rest)
            found.append(_stored(response_id, tenant, body, turn, kept, kept.model == model))
    return found


def _stored(response_id: str, tenant: str, body: bytes, turn: Turn, kept: _Rest, same_model: bool) -> StoredResponse:
    token_ids, pieces = array("i"), array("I")
    token_ids.frombytes(kept.token_ids if same_model else b"")
    pieces.frombytes(kept.pieces)
    return StoredResponse(
        id=response_id,
        name=kept.name,
        tenant=tenant,
        body=body,
        turn=turn,
        token_ids=token_ids,
        num_prompt=kept.num_prompt if same_model else 0,
        prompt_text=kept.prompt_text if same_model else "",
        cache_salt=kept.cache_salt,
        adapter=kept.adapter,
        pieces=pieces,
        failure=kept.failure,
    )
