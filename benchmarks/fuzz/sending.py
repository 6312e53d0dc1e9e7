"""Sends requests and judges their answers."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from io import BytesIO

import aiohttp
from yarl import URL

from benchmarks.fuzz.harvest import Harvest
from benchmarks.fuzz.shots import Shot

PATIENCE = 60.0  # seconds
_IN_STREAM = re.compile(rb'^data: (\{"error":.*)$', re.MULTILINE)
_LAST_EVENT = re.compile(rb"^event: (response\.(completed|incomplete)|message_stop)$", re.MULTILINE)
_ERROR_FIELDS = {"message", "type", "param", "code", "details"}
_PLAIN = "a plain text"  # the code of an error that is a text
# The server's own word that it is not at fault: the client's deadline passed.
_ASKED_FOR = {"deadline_exceeded"}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    code: str  # of its error, or ""
    fault: str  # what the server did wrong, or ""
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Gun:
    """Fires at one server as one tenant."""

    session: aiohttp.ClientSession
    url: str
    key: str | None
    tenant: str
    harvest: Harvest
    may_wait: bool = False  # what it asks for takes long, and that is its own fault

    async def fire(self, shot: Shot) -> Answer:
        try:
            async with asyncio.timeout(shot.leaves_after or PATIENCE):
                return self._judged(shot, *await self._exchange(shot))
        except TimeoutError:
            if shot.leaves_after is not None or self.may_wait or _yields(shot):
                return Answer(0, "left", "")
            return Answer(0, "", f"no answer in {PATIENCE:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Answer(0, "", f"no answer: {type(error).__name__} {error}")

    async def _exchange(self, shot: Shot) -> tuple[int, str, bytes]:
        headers = dict(shot.headers)
        if self.key is not None and "Authorization" not in headers:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if shot.data is None else BytesIO(shot.data)  # aiohttp warns of large bytes
        where = URL(self.url + shot.path, encoded=True)
        async with self.session.request(shot.method, where, data=data, headers=headers) as answer:
            return answer.status, answer.content_type, await answer.read()

    def _judged(self, shot: Shot, status: int, kind: str, content: bytes) -> Answer:
        if status in (200, 202):
            return self._kept(shot, kind, content)
        error = error_of(content)
        if error is None:
            return Answer(status, "", f"{status} without an error object", content)
        code = str(error["code"])
        fault = f"{status} {code}" if status >= 500 and code not in _ASKED_FOR else ""
        return Answer(status, code, fault, content)

    def _kept(self, shot: Shot, kind: str, content: bytes) -> Answer:
        if shot.target is not None and not shot.spoilt and self.harvest.is_foreign(self.tenant, shot.target):
            return Answer(200, "", f"200 for an id of another tenant: {shot.target}", content)
        if kind == "text/event-stream":
            return _judged_stream(self, content)
        self._remember(shot)
        self.harvest.take(self.tenant, content)
        return Answer(200, "", "", content)

    def _remember(self, shot: Shot) -> None:
        if isinstance(shot.body, dict):
            if isinstance(name := shot.body.get("request_id"), str):
                self.harvest.keep(self.tenant, name, "named")
            if shot.operation == "POST /v1/catalogues" and isinstance(name := shot.body.get("name"), str):
                self.harvest.keep(self.tenant, name, "catalogue")


def _yields(shot: Shot) -> bool:
    """Whether it asks to be served behind everybody who does not, for as long as there are any."""
    priority = shot.body.get("priority") if isinstance(shot.body, dict) else None
    return isinstance(priority, int) and priority > 0


def _judged_stream(gun: Gun, content: bytes) -> Answer:
    gun.harvest.take(gun.tenant, content)
    if found := _IN_STREAM.search(content):
        error = error_of(found[1]) or {"code": "an error without its object", "type": "server_error"}
        code = str(error["code"])
        at_fault = error["type"] == "server_error" and code not in _ASKED_FOR
        fault = f"in a stream: {code}" if at_fault else ""
        return Answer(200, code, fault, content)
    ended = content.endswith(b"data: [DONE]\n\n") or _LAST_EVENT.search(content)
    return Answer(200, "", "" if ended else "a stream without its end", content)


def error_of(content: bytes) -> dict[str, object] | None:
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(error, str) and error:
        return {"message": error, "code": _PLAIN, "type": ""}  # Ollama's
    return error if isinstance(error, dict) and error.keys() >= _ERROR_FIELDS else None
