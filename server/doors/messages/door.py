"""Anthropic's Messages, as a door."""

from __future__ import annotations

from bequest.server.door import Door, DoorRoute, Operation
from bequest.server.doors.messages.body import (
    CountTokensBody,
    Message,
    MessageError,
    MessagesBody,
    MessageTokensCount,
)
from bequest.server.doors.messages.create import count_tokens, create
from bequest.server.doors.messages.errors import error_body
from bequest.server.doors.messages.known_turns import KNOWN_TURNS, KnownTurns

PATH = "/v1/messages"
ROUTES = (
    DoorRoute(
        "POST",
        PATH,
        create,
        Operation("Answers a conversation.", Message, MessagesBody, streams=True, error=MessageError),
    ),
    DoorRoute(
        "POST",
        f"{PATH}/count_tokens",
        count_tokens,
        Operation("Counts a conversation's tokens.", MessageTokensCount, CountTokensBody, error=MessageError),
    ),
)
DOOR = Door(
    routes=ROUTES,
    paths=(PATH,),
    error_form=error_body,
    error_header="anthropic-version",
    setup=lambda app: app.__setitem__(KNOWN_TURNS, KnownTurns()),
)
