"""What a router answers itself: in JSON, as a server does, so that a client reads one kind of error."""

from __future__ import annotations

from collections.abc import Sequence

from bequest.server.wire.errors import RETRY_SECONDS, ApiError
from bequest.server.wire.replicas import REPLICA_HEADER

_SOON = {"Retry-After": str(RETRY_SECONDS)}
_FAILED = ApiError(
    502, "replica_failed", "The replica ended before it answered: send the request again.", headers=_SOON
)
_OWN = (
    ApiError(400, "invalid_value", "The request is not valid HTTP/1.1."),
    ApiError(408, "request_timeout", "The request did not arrive in time."),
    ApiError(500, "internal_error", "The router failed."),
    _FAILED,
    ApiError(503, "no_replica", "No replica takes requests at the moment: send the request again later."),
    ApiError(504, "replica_timeout", "The replica did not answer in time.", headers={"x-should-retry": "false"}),
)
_NAMED = "(named)"  # in a message, where the request's own word goes


def own_errors() -> list[str]:
    """Lines of the section `defaults`."""
    return [
        f"    http-error status {error.status} content-type application/json string {_quoted(error)}{_headers(error)}"
        for error in _OWN
    ]


def refuse_unknown(variable: str, tags: Sequence[str]) -> str:
    """A line that ends requests whose `variable` is none of these tags."""
    there = f"there are {', '.join(tags)}" if tags else "there is none"
    error = ApiError(404, "replica_not_found", f"No replica is called {_NAMED}: {there}.", param=REPLICA_HEADER)
    known = f" !{{ var({variable}) -m str {' '.join(tags)} }}" if tags else ""
    text = _quoted(error).replace(_NAMED, f"%[var({variable}),json(utf8s)]")
    return (
        f"    http-request return status 404 content-type application/json lf-string {text} "
        f"if {{ var({variable}) -m found }}{known}"
    )


def refuse_metrics(query: str) -> str:
    """A line that ends requests for the metrics of nobody in particular."""
    told = f"Metrics are those of one replica: scrape each of them, or name one with ?{query}=TAG."
    text = _quoted(ApiError(404, "unknown_url", told))
    return (
        f"    http-request return status 404 content-type application/json string {text} "
        "if { path /metrics } !{ var(txn.asked) -m found }"
    )


def ask_once_more(answered_by_another: str) -> str:
    """A line that ends requests for a replica which has ended, and is not known to have: another one answers for it."""
    error = ApiError(503, _FAILED.code, _FAILED.message)
    return (
        f"    http-response return status 503 content-type application/json string {_quoted(error)}"
        f"{_headers(error)} if {answered_by_another}"
    )


def _headers(error: ApiError) -> str:
    return "".join(f" hdr {name} {value}" for name, value in error.headers.items())


def _quoted(error: ApiError) -> str:
    """HAProxy reads nothing between single quotes. REQUIRES: the message has none"""
    text = error.body().decode()
    assert "'" not in text, text
    return f"'{text}'"
