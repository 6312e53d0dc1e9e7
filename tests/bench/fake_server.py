"""A server in a page, for the benchmark's tests: its next token is a hash of all before it, and it keeps records.

It can be told to lack things, and to misbehave in the ways that the benchmark must notice.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VOCABULARY = 50_000


@dataclass
class Faults:
    beams: bool = True
    continuation: str = "yes"  # "no": 400, "ignored": as if the field were unknown
    tokenizes: bool = True
    tells_ids: bool = True
    max_model_len: int | None = 4096
    key: str | None = None
    wrong_token: bool = False  # continuations answer something else
    wrong_sampling: bool = False  # stage 1 does not keep to its seed
    source: str = "blocks"
    computed_more: int = 0
    leases: bool = True  # False: 429
    outgrown: bool = False  # leases are lost on the way


@dataclass
class FakeServer:
    faults: Faults = field(default_factory=Faults)
    records: dict[str, list[int]] = field(default_factory=dict)
    leased: set[str] = field(default_factory=set)
    salts: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_delete("/v1/continuations/{id}", self._forget)
        if self.faults.tokenizes:
            app.router.add_post("/tokenize", self._tokenize)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.faults.key and request.headers.get("Authorization") != f"Bearer {self.faults.key}":
            return refusal(401, "invalid_api_key", "Wrong key.")
        response: web.StreamResponse = await handler(request)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "fake", "object": "model"}
        if self.faults.max_model_len is not None:
            model["max_model_len"] = self.faults.max_model_len  # type: ignore[assignment]
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = [1] * body["add_special_tokens"] + encode(body["prompt"])
        return web.json_response({"count": len(tokens), "tokens": tokens})

    async def _forget(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if self.records.pop(name, None) is None:
            return refusal(404, "continuation_parent_not_found", "Unknown.")
        self.leased.discard(name)
        return web.json_response({"id": name, "object": "continuation", "deleted": True})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body.get("use_beam_search") and not self.faults.beams:
            return refusal(400, "unsupported_parameter", "`use_beam_search` cannot be used here.")
        if body.get("continuation_of") and self.faults.continuation == "no":
            return refusal(400, "unsupported_parameter", "`continuation_of` cannot be used here.")
        if body.get("retain") and not self.faults.leases:
            return refusal(429, "insufficient_retention", "The budget is full.")
        answer = self._answer(body)
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events_of(answer):
            await response.write(event)
        return response

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        salt = body.get("cache_salt", "")
        self.salts[salt] += 1
        new = body["prompt"] if isinstance(body["prompt"], list) else encode(body["prompt"])
        parent = body.get("continuation_of") if self.faults.continuation == "yes" else None
        prompt = (self.records[parent] if parent else []) + new
        n = body.get("n", 1)
        noise = f"{body.get('seed')}" if body.get("temperature") else ""
        if self.faults.wrong_sampling and body.get("temperature"):
            noise = salt
        choices = [self._choice(prompt, index, noise, body, spoil=bool(parent)) for index in range(n)]
        name = f"cmpl-{len(self.bodies)}"
        self.records[name] = prompt + choices[0]["ids"]
        answer: dict[str, Any] = {"id": name, "object": "text_completion", "model": "fake"}
        if parent:
            computed = len(new) + 1 + self.faults.computed_more
            told = {"parent": parent, "at": len(prompt) - len(new), "inherited_tokens": len(prompt) - computed}
            answer["continuation"] = told | {"computed_tokens": computed, "source": self.faults.source}
        if body.get("retain"):
            answer["retained"] = None if self.faults.outgrown else {"id": name, "expires_at": 2e9, "tokens": 1}
            self.leased.add(name)
        cached = len(prompt) - 1 if self.salts[salt] > 1 and salt else 0
        sampled = sum(len(choice.pop("ids")) for choice in choices)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sampled}
        return answer | {"choices": choices, "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}}

    def _choice(self, prompt: list[int], index: int, noise: str, body: dict[str, Any], spoil: bool) -> dict[str, Any]:
        ids: list[int] = []
        for _ in range(body["max_tokens"]):
            ids.append(next_token(prompt + ids, f"{index}{noise}"))
        if spoil and self.faults.wrong_token:
            ids[-1] ^= 1
        choice = {"index": index, "text": decode(ids), "finish_reason": "length", "ids": ids}
        choice["cumulative_logprob"] = -float(index)
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": [-0.5] * len(ids)}
        if body.get("return_token_ids") and self.faults.tells_ids:
            choice["token_ids"] = ids
        return choice


def events_of(answer: dict[str, Any]) -> list[bytes]:
    """A token an event, as a stream has them; the last one has the usage."""
    [choice] = answer["choices"]
    head = {"id": answer["id"]}
    words = choice["text"].split(" ")[1:]
    events: list[dict[str, Any]] = []
    for place, word in enumerate(words):
        part: dict[str, Any] = {"index": 0, "text": f" {word}", "finish_reason": None}
        if "token_ids" in choice:
            part["token_ids"] = choice["token_ids"][place : place + 1]
        if "logprobs" in choice:
            part["logprobs"] = {"token_logprobs": [-0.5]}
        events.append(head | {"choices": [part]})
    if "continuation" in answer:
        events[0]["continuation"] = answer["continuation"]
    events.append(head | {"choices": [], "usage": answer["usage"]})
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


def refusal(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status)


def encode(text: str) -> list[int]:
    """A token for each word; words that `decode` wrote get their tokens back."""
    return [int(word[1:]) if word.startswith("t") and word[1:].isdigit() else hashed(word) for word in text.split()]


def decode(ids: list[int]) -> str:
    return "".join(f" t{token}" for token in ids)


def next_token(history: list[int], noise: str) -> int:
    return hashed(f"{history}{noise}")


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") % VOCABULARY
