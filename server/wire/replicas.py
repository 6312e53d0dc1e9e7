"""Servers of which several stand behind a router (docs/scale.md). A server that has a tag writes it into the ids that
it makes, so a router knows from an id alone where to send it. Headers say the rest:

    X-Bequest-Replica   answer: who answers, or, of a 421, who should have been asked
    X-Bequest-Record    answer: the id of the record that it leaves, of any server
    X-Bequest-Name      answer: the client's own name for its request, which the router learns
    X-Bequest-Holds     answer: a parent that is held here, though its id has another server's tag
    X-Bequest-Parent    request: the parent of a body that is too long for a router to read
    X-Bequest-Owner     answer: of a 421, the same server; request: `gone`, from a router that knows that the owner of
                        the parent does not run
    X-Bequest-Over-Rate request: the key has sent too many, says a router that counts for all servers; milliseconds
                        until it may send the next
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bequest.server.wire.errors import ApiError, invalid
from bequest.server.wire.reading import shorten

REPLICA_HEADER = "X-Bequest-Replica"
RECORD_HEADER = "X-Bequest-Record"
NAME_HEADER = "X-Bequest-Name"
HOLDS_HEADER = "X-Bequest-Holds"
PARENT_HEADER = "X-Bequest-Parent"
OWNER_HEADER = "X-Bequest-Owner"
OVER_RATE_HEADER = "X-Bequest-Over-Rate"

# Routers match it too: cluster/haproxy.py writes the same pattern.
TAGGED_ID = r"[a-z_]+[-_]([a-z0-9]{1,16})-[0-9a-f]{32}(?:-[0-9]+)?"
_TAGGED_ID = re.compile(TAGGED_ID + r"\Z")


def tag_of(reference: str) -> str | None:
    """Of the server that made this id; None: it has none, or a client made the name."""
    match = _TAGGED_ID.match(reference)
    return None if match is None else match[1]


def is_owner_gone(headers: Mapping[str, str]) -> bool:
    return headers.get(OWNER_HEADER) == "gone"


def over_rate(headers: Mapping[str, str]) -> float:
    """Seconds until the key may send its next request; 0: now."""
    said = headers.get(OVER_RATE_HEADER, "")
    return int(said) / 1000 if re.fullmatch("[0-9]{1,9}", said) else 0.0


def owner_elsewhere(reference: str | None, own: str | None, owner_gone: bool) -> str | None:
    """The tag of another server that made what `reference` names, and that may still run."""
    tag = None if own is None or owner_gone or reference is None else tag_of(reference)
    return None if tag == own else tag


def misdirected(reference: str, owner: str) -> ApiError:
    return ApiError(
        421,
        "wrong_replica",
        f"'{shorten(reference, 200)}' belongs to the replica '{owner}': send the request there, with the header "
        f"{PARENT_HEADER} if a router reads no bodies as long as this one.",
        details={"replica": owner},
        headers=owner_headers(owner),
    )


def owner_headers(owner: str) -> dict[str, str]:
    """Of a 421."""
    return {REPLICA_HEADER: owner, OWNER_HEADER: owner}


def redirected(error: ApiError, own: str | None, owner_gone: bool) -> ApiError:
    """What is not here may be with the server that made its id, or with one whose files have it: then it says so."""
    if error.status == 421:
        error.headers.update(owner_headers(str(error.details["replica"])))
        return error
    owner = owner_elsewhere(error.absent, own, owner_gone)
    return error if error.absent is None or owner is None else misdirected(error.absent, owner)


def check_parent_header(headers: Mapping[str, str], parent: str | None) -> None:
    """A router believed it: it must not say anything else than the body."""
    named = headers.get(PARENT_HEADER)
    if named is not None and named != parent:
        said = "the body names none" if parent is None else f"the body names '{shorten(parent, 200)}'"
        raise invalid(f"The header {PARENT_HEADER} names '{shorten(named, 200)}', but {said}.", PARENT_HEADER)
