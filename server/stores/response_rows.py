"""Rows of stored responses: deleted, and moved from file to file.

Where directories of other servers stand beside this one's (`--estate-peers`), so do their responses. Those of a server
that has ended move here when somebody asks for them: the response, and the turns that lead to it. Of a server that runs
they are its own, and it is the one to ask. Every call waits for the disk.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from bequest.engine.vault.neighbours import locked

_log = logging.getLogger("bequest.server")

Row = tuple[str, str, str | None, bytes, int, bytes | None, bytes | None]  # of the table in response_file.py
COLUMNS = "tenant, id, parent, items, num_input, body, rest"
# A turn that becomes a response keeps its place: rows are read in their order, and its children come behind it.
WRITE = """
INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (tenant, id) DO UPDATE SET body = excluded.body, rest = excluded.rest
"""
_BUSY_SECONDS = 5.0


class RunsElsewhere(Exception):
    """Its owner runs."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


def delete(database: sqlite3.Connection, tenant: str, response_id: str | None) -> None:
    """And with it the turns before it that nobody goes on from any more."""
    database.execute("UPDATE responses SET body = NULL, rest = NULL WHERE tenant = ? AND id = ?", (tenant, response_id))
    while response_id is not None:
        key = (tenant, response_id)
        [children] = database.execute("SELECT count(*) FROM responses WHERE tenant = ? AND parent = ?", key).fetchone()
        found = database.execute("SELECT parent, body IS NULL FROM responses WHERE tenant = ? AND id = ?", key)
        parent, is_deleted = found.fetchone() or (None, False)
        if children or not is_deleted:
            return
        database.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", key)
        response_id = parent


def has_row(database: sqlite3.Connection, tenant: str, response_id: str) -> bool:
    """Of a response, or of a turn that others go on from."""
    found = database.execute("SELECT 1 FROM responses WHERE tenant = ? AND id = ?", (tenant, response_id))
    return found.fetchone() is not None


def take(own: Path, database: sqlite3.Connection, tenant: str, response_id: str) -> list[Row]:
    """Moves a response from a file beside `own` into `database`; its rows, oldest first; none: nobody has it. Raises
    RunsElsewhere or OSError."""
    for folder in _beside(own):
        with _readable(folder), _owned(folder / own.name, tenant, response_id) as theirs:
            if theirs is not None:
                return _move(theirs, database, tenant, response_id)
    return []


def check(own: Path, tenant: str, response_id: str) -> None:
    """Raises RunsElsewhere where a server has it that runs, or OSError."""
    for folder in _beside(own):
        with _readable(folder), _owned(folder / own.name, tenant, response_id):
            pass


def _beside(own: Path) -> list[Path]:
    return sorted(folder for folder in own.parent.parent.iterdir() if folder.name != own.parent.name)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """One that cannot be read is nobody else's fault: the others are looked at all the same."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        _log.warning("the responses in %s were not looked at: %s", folder, error)


@contextmanager
def _owned(path: Path, tenant: str, response_id: str) -> Iterator[sqlite3.Connection | None]:
    """A server's file that has the response; None: it has not. Nobody begins to use it until the block ends. Raises
    RunsElsewhere, sqlite3.Error or OSError."""
    if not path.is_file():
        yield None
        return
    with closing(sqlite3.connect(path, isolation_level=None, timeout=_BUSY_SECONDS)) as theirs:
        if not _has(theirs, tenant, response_id):
            yield None
            return
        with locked(path.parent) as is_free:
            if not is_free:
                raise RunsElsewhere(path.parent.name)
            yield theirs


def _has(database: sqlite3.Connection, tenant: str, response_id: str) -> bool:
    found = database.execute(
        "SELECT 1 FROM responses WHERE tenant = ? AND id = ? AND body IS NOT NULL", (tenant, response_id)
    )
    return found.fetchone() is not None


def _move(theirs: sqlite3.Connection, ours: sqlite3.Connection, tenant: str, response_id: str) -> list[Row]:
    """First it is here as a whole, then it is not there any more. Turns stay there as long as others lead to them."""
    rows = _chain(theirs, tenant, response_id)
    if not rows:
        return []
    turns = [(*row[:5], None, None) for row in rows[:-1]]
    ours.execute("BEGIN")
    try:
        ours.executemany("INSERT OR IGNORE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", turns)
        ours.execute(WRITE, rows[-1])
    except sqlite3.Error:
        ours.execute("ROLLBACK")
        raise
    ours.execute("COMMIT")
    delete(theirs, tenant, response_id)
    return [*turns, rows[-1]]


def _chain(database: sqlite3.Connection, tenant: str, response_id: str) -> list[Row]:
    """It and its ancestors, oldest first; nothing, if its conversation is not whole."""
    rows: list[Row] = []
    wanted: str | None = response_id
    while wanted is not None:
        found = database.execute(f"SELECT {COLUMNS} FROM responses WHERE tenant = ? AND id = ?", (tenant, wanted))
        row: Row | None = found.fetchone()
        if row is None:
            return []
        rows.append(row)
        wanted = row[2]
    return rows[::-1]
