"""Ids of answers and the names clients give to their requests."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import ApiError, invalid

_PREFIXES = ("cmpl-", "chatcmpl-", "resp_", "hs-")
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_HEADER = re.compile(r"[\x21-\x7e]{1,128}\Z")


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def header_id(value: str | None) -> str | None:
    """A client's X-Request-Id, if it may be sent back."""
    return value if value is not None and _HEADER.match(value) else None


class RunningNames:
    """The `request_id`s in use: a name is one tenant's, and taken from its claim to the end of its request."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], str] = {}

    @contextmanager
    def claim(self, tenant: str, name: str | None, answer_id: str) -> Iterator[None]:
        if name is None:
            yield
            return
        _check_name(name)
        taken = self._answers.get((tenant, name))
        if taken is not None:
            raise ApiError(
                409,
                "request_id_in_use",
                f"`request_id` '{name}' is the name of a request that is still running ({taken}); "
                "wait for it, or choose another name.",
                param="request_id",
                details={"id": taken, "status": "running"},
                headers={"Retry-After": "1"},
            )
        self._answers[tenant, name] = answer_id
        try:
            yield
        finally:
            del self._answers[tenant, name]


def _check_name(name: str) -> None:
    if not _NAME.match(name):
        raise invalid("`request_id` must be 1 to 128 characters out of A-Z a-z 0-9 . _ : and -.", "request_id")
    if name.startswith(_PREFIXES):
        taken = ", ".join(_PREFIXES)
        raise invalid(f"`request_id` must not begin like one of the server's own ids ({taken}).", "request_id")
