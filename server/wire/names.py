"""Ids of answers and the names clients give to their requests."""

from __future__ import annotations

import re
import secrets

from bequest.server.wire.errors import invalid

_PREFIXES = ("cmpl-", "chatcmpl-", "resp_", "msg_", "hs-")
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_HEADER = re.compile(r"[\x21-\x7e]{1,128}\Z")


def new_id(prefix: str, tag: str | None = None) -> str:
    """`tag`: of the server, where it is one of several (server/wire/replicas.py)."""
    return f"{prefix}{'' if tag is None else tag + '-'}{secrets.token_hex(16)}"


def part_id(answer_id: str, index: int) -> str:
    """Of the request that is made of the index-th prompt of a list."""
    return f"{answer_id}-{index}" if index else answer_id


def header_id(value: str | None) -> str | None:
    """A client's X-Request-Id, if it may be sent back."""
    return value if value is not None and _HEADER.match(value) else None


def is_name(text: str) -> bool:
    """Whether a client may give this name to something of its own."""
    return _NAME.match(text) is not None


def check_name(name: str) -> str:
    """The name a client gives to its request, if it can be one. Whether it is taken is the engine's to say."""
    if not is_name(name):
        raise invalid("`request_id` must be 1 to 128 characters out of A-Z a-z 0-9 . _ : and -.", "request_id")
    if name.startswith(_PREFIXES):
        taken = ", ".join(_PREFIXES)
        raise invalid(f"`request_id` must not begin like one of the server's own ids ({taken}).", "request_id")
    return name
