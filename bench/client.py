"""A client of any server with OpenAI's completions, that keeps time.

The clock starts when the body is ready to be sent, and stops before the answer is parsed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson

Prompt = tuple[int, ...] | str


class BenchError(Exception):
    """The run cannot go on; the message says what to change."""


# What to change when the server refuses with a code.
_HINTS = {
    "context_length_exceeded": "lower --prompt-tokens or --stage1-tokens",
    "insufficient_retention": "lower --concurrency, or serve with more --retain-fraction, --host-cache-gb or blocks",
    "retention_too_large": "lower --prompt-tokens or --stage1-tokens, or serve with more --retain-fraction",
    "invalid_api_key": "give the key with --api-key",
    "model_not_found": "name the model with --model",
    "queue_full": "lower --concurrency",
    "rate_limit_exceeded": "lower --concurrency",
}


class ServerError(BenchError):
    """The server refused a request."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        hint = f" ({_HINTS[code]})" if code in _HINTS else ""
        super().__init__(f"{status} {code or 'error'}: {message}{hint}")
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer; `token_ids` is None where the server does not tell."""

    text: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] = ()  # of its tokens, if asked for
    cumulative_logprob: float | None = None

    @property
    def outcome(self) -> Prompt:
        return self.text if self.token_ids is None else self.token_ids


@dataclass(frozen=True, slots=True)
class Answer:
    id: str
    choices: tuple[Choice, ...]
    usage: Mapping[str, Any]
    continuation: Mapping[str, Any] | None
    retained: Mapping[str, Any] | None
    first_seconds: float  # to the first token of a stream, to the end of an answer that is not streamed
    total_seconds: float

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that the server had to compute, as far as it tells."""
        if self.continuation is not None:
            return int(self.continuation["computed_tokens"])
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return int(self.usage["prompt_tokens"]) - int(cached)


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed answer, of which only times and counts are kept."""

    first_seconds: float
    total_seconds: float
    gaps: tuple[float, ...]  # seconds between its events
    prompt_tokens: int
    output_tokens: int


class Client:
    """One session of connections to one server; `async with` opens and closes it."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON."""
        async with self._request(method, path, None if body is None else orjson.dumps(body)) as response:
            data = await self._read(response)
        return _parse(data, f"{method} {path}")

    async def complete(self, body: Mapping[str, Any]) -> Answer:
        """POST /v1/completions, streamed if the body says so."""
        data = orjson.dumps(body)
        began = time.perf_counter()
        async with self._request("POST", "/v1/completions", data) as response:
            if response.status == 200 and body.get("stream"):
                events, times = await _events(response)
                first = times[0]
            else:
                events, first = [await self._read(response)], time.perf_counter()
        seconds = time.perf_counter() - began
        parsed = [_parse(event, "POST /v1/completions") for event in events]
        return _answer(parsed, first - began, seconds)

    async def stream(self, path: str, body: Mapping[str, Any]) -> Streamed:
        """Any streamed endpoint. Servers that tell no usage are taken to send a token with each event."""
        data = orjson.dumps(body)
        began = time.perf_counter()
        async with self._request("POST", path, data) as response:
            if response.status != 200:
                await self._read(response)
            events, times = await _events(response)
        total = time.perf_counter() - began
        last = _parse(events[-1], path)
        for event in (_parse(events[0], path), last):
            _refuse_failure(event)
        usage = last.get("usage") or {}
        # The first event may hold nothing but the role, and comes with the first token all the same.
        gaps = tuple(b - a for a, b in itertools.pairwise(times))
        return Streamed(
            first_seconds=times[0] - began,
            total_seconds=total,
            gaps=gaps,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            output_tokens=int(usage.get("completion_tokens") or len(events)),
        )

    @asynccontextmanager
    async def _request(self, method: str, path: str, data: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response; failures of the connection become errors that a person can act on."""
        assert self._session is not None, "used outside of `async with`"
        try:
            async with self._session.request(method, self.base_url + path, data=data) as response:
                yield response
        except aiohttp.ClientConnectorError:
            raise BenchError(
                f"no server answers at {self.base_url}: start one with `bequest serve`, or say where with --base-url"
            ) from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{self.base_url}{path} (--base-url): {type(error).__name__}: {error}") from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        data = await response.read()
        if response.status >= 400:
            raise _refusal(response.status, data)
        return data


async def _events(response: aiohttp.ClientResponse) -> tuple[list[bytes], list[float]]:
    """The payloads of a stream's events, and when each came."""
    events: list[bytes] = []
    times: list[float] = []
    async for line in response.content:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            events.append(line[6:])
        elif line.startswith(b"data: [DONE]") and events:
            return events, times
    raise BenchError("a stream ended without [DONE], or without one event before it")


def _parse(data: bytes, what: str) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        raise BenchError(f"{what}: the answer is not JSON; is this an OpenAI-compatible server?") from None


def _refuse_failure(event: Mapping[str, Any]) -> None:
    if event.get("error") is not None:
        raise BenchError(f"the server failed in mid-stream: {event['error'].get('message')}")


def _refusal(status: int, data: bytes) -> BenchError:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        body = {}
    error = body.get("error", body) if isinstance(body, dict) else {}
    error = error if isinstance(error, dict) else {"message": str(error)}
    code = error.get("code")
    return ServerError(
        status,
        code if isinstance(code, str) else None,
        str(error.get("message") or data[:200].decode(errors="replace")),
    )


def _answer(events: list[dict[str, Any]], first: float, total: float) -> Answer:
    """The answer that one whole body, or the events of a stream, add up to."""
    for event in events:
        _refuse_failure(event)
    parts: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for choice in event["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return Answer(
        id=events[0]["id"],
        choices=tuple(_choice(parts[index]) for index in sorted(parts)),
        usage=_last(events, "usage") or {},
        continuation=_last(events, "continuation"),
        retained=_last(events, "retained"),
        first_seconds=first,
        total_seconds=total,
    )


def _choice(parts: list[dict[str, Any]]) -> Choice:
    ids = [part.get("token_ids") for part in parts]
    logprobs = [value for part in parts for value in (part.get("logprobs") or {}).get("token_logprobs") or ()]
    return Choice(
        text="".join(part.get("text") or "" for part in parts),
        token_ids=None if None in ids else tuple(token for some in ids if some for token in some),
        logprobs=tuple(logprobs),
        cumulative_logprob=_last(parts, "cumulative_logprob"),
    )


def _last(objects: list[dict[str, Any]], name: str) -> Any:
    return next((found[name] for found in reversed(objects) if found.get(name) is not None), None)
