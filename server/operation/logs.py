"""Log lines: text for people or JSON for machines, each line of a request with the request's id."""

from __future__ import annotations

import json
import logging
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from aiohttp import web

from bequest.server.access.marks import ANSWER_ID, FALLBACK_ID
from bequest.server.operation.log_writer import LineWriter
from bequest.server.wire.names import header_id, new_id

# The request that the running task works for.
CURRENT: ContextVar[web.Request | None] = ContextVar("current", default=None)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}\Z")
_STDERR = 2  # the descriptor: there may be no sys.stderr (server/__main__.py)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "trace_id"}


def request_id_of(request: web.Request) -> str:
    """The client's own id, or that of the answer, or one that was made up before there was an answer."""
    known = header_id(request.headers.get("X-Request-Id")) or request.get(ANSWER_ID) or request.get(FALLBACK_ID)
    if known is None:
        known = request[FALLBACK_ID] = new_id("req-")
    return known


def trace_id_of(request: web.Request) -> str | None:
    """The trace that the client's `traceparent` header names."""
    match = _TRACEPARENT.match(request.headers.get("traceparent", ""))
    return match[1] if match and set(match[1]) != {"0"} and set(match[2]) != {"0"} else None


class RequestFilter(logging.Filter):
    """Gives every record a request_id and a trace_id; empty where it belongs to no request."""

    def filter(self, record: logging.LogRecord) -> bool:
        # The engine's callbacks serve all requests, whoever set them off; where it means one, it names it itself.
        request = None if record.name.startswith("bequest.engine") else CURRENT.get()
        if not hasattr(record, "request_id"):
            record.request_id = "" if request is None else request_id_of(request)
        record.trace_id = "" if request is None else trace_id_of(request) or ""
        return True


# A line is one line, whatever a client has put into it.
_UNPRINTABLE = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))}
_UNPRINTABLE |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record).translate(_UNPRINTABLE)
        request_id = getattr(record, "request_id", "")
        return f"{line} [{request_id}]" if request_id else line


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, the ids, and whatever the line has besides."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "trace_id"):
            if value := getattr(record, name, ""):
                line[name] = value
        line.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str).decode()
        except TypeError:  # bytes that are no text, in a path for example
            return json.dumps(line, default=str)


def configure_logging(level: str, form: Literal["text", "json"] = "text") -> None:
    handler = LineWriter(_STDERR)
    handler.addFilter(RequestFilter())
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
