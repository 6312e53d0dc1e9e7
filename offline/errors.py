"""Errors as a script sees them, with the sentences that clients of the server read.

BequestError
├── RequestError     the request must change; also a ValueError
└── EngineFailed     the engine could not answer; also a RuntimeError
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bequest.engine.errors import EngineError
from bequest.server.wire.errors import ApiError, from_engine


class BequestError(Exception):
    """`code` says what went wrong, `param` which argument, `details` holds the numbers of the message."""

    def __init__(self, message: str, code: str, param: str | None, details: Mapping[str, object]) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.details = dict(details)


class RequestError(BequestError, ValueError):
    pass


class EngineFailed(BequestError, RuntimeError):
    pass


@contextmanager
def own_errors() -> Iterator[None]:
    """Errors of the server and of the engine leave as ours."""
    try:
        yield
    except ApiError as error:
        raise _own(error) from None
    except EngineError as error:
        raise _own(from_engine(error)) from None


def _own(error: ApiError) -> BequestError:
    kind = RequestError if error.status < 500 else EngineFailed
    return kind(error.message, error.code, error.param, error.details)
