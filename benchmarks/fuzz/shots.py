"""Requests, made of operations: mostly valid, some of them spoilt.

Fields go together in themes: a beam search takes no temperature, a continuation no `echo`. A body has what its route
needs, one theme, and a few fields that go with anything. How likely a field is follows from how often bodies that had
it were answered with 200, so fields that this server refuses become rare by themselves.
"""

from __future__ import annotations

import gzip
import json
import random
import wave
from collections import defaultdict
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any
from urllib.parse import quote, urlencode

from benchmarks.fuzz.document import FORM, JSON, Operation
from benchmarks.fuzz.hostile import HOSTILE
from benchmarks.fuzz.mutations import spoilt_bytes, spoilt_path, spoilt_value
from benchmarks.fuzz.values import Values

THEMES: dict[str, set[str]] = {
    "sampling": {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop"}
    | {"repetition_penalty", "logit_bias", "n", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids"}
    | {"ignore_eos", "include_stop_str_in_output", "max_completion_tokens", "stream", "stream_options"},
    "beams": {"use_beam_search", "beam_width", "best_of", "n", "length_penalty", "early_stopping", "catalogue"},
    "continuation": {"continuation_of", "continuation_at", "continuation_suffix", "continuation_token_ids"}
    | {"continuation_fallback", "continuation_choice", "stream"},
    "scoring": {"continuation_of", "continuation_suffixes"},
    "grammar": {"structured_outputs", "response_format", "text", "stream", "temperature"},
    "tools": {"tools", "tool_choice", "parallel_tool_calls", "max_tool_calls"},
    "looking": {"logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids", "return_hidden_states"}
    | {"return_tokens_as_token_ids", "stream", "layers", "positions", "pooling", "dtype", "encoding_format"},
    "responses": {"previous_response_id", "instructions", "truncation", "include", "reasoning", "stream"},
    "prompts": {"suffix", "truncate_prompt_tokens", "chat_template", "continue_final_message", "add_generation_prompt"},
}
_THEMED = set().union(*THEMES.values())
# What a field needs beside it, and what cannot stand beside it.
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "continuation_at": {"continuation_of": None},
    "continuation_choice": {"continuation_of": None},
    "continuation_suffix": {"continuation_of": None},
    "continuation_token_ids": {"continuation_of": None},
    "continuation_fallback": {"continuation_of": None},
    "continuation_suffixes": {"max_tokens": 0},
    "tool_choice": {"tools": None},
    "parallel_tool_calls": {"tools": None},
    "beam_width": {"use_beam_search": True},
    "best_of": {"use_beam_search": True},
    "length_penalty": {"use_beam_search": True},
    "early_stopping": {"use_beam_search": True},
}
BARS: dict[str, set[str]] = {
    "use_beam_search": {"stream", "stream_options", "temperature", "stop"},
    "continuation_suffixes": {"prompt", "stream", "n"},
    "continuation_of": {"echo", "prompt_logprobs", "suffix", "truncate_prompt_tokens", "prompt", "input", "cache_salt"},
    "continuation_suffix": {"continuation_token_ids", "continuation_suffixes"},
    "structured_outputs": {"response_format", "text"},
    "suffix": {"echo", "prompt_logprobs"},
    "max_completion_tokens": {"max_tokens"},
    "messages": {"prompt"},
    "beam_width": {"best_of"},
    "retain": {"store"},
}
# Of a route, what it needs: one of these.
BASICS = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/v1/hidden_states": ("input",),
    "/v1/embeddings": ("input",),
    "/v1/responses": ("input",),
    "/v1/responses/input_tokens": ("input",),
    "/tokenize": ("prompt", "messages"),
    "/v1/tokenize": ("prompt", "messages"),
    "/detokenize": ("tokens",),
    "/v1/detokenize": ("tokens",),
}
# Of a route, what it needs: all of these.
NEEDED = {
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
    "/api/chat": ("messages",),
    "/api/embed": ("input",),
    "/api/show": ("model",),
    "/api/pull": ("model",),
    **dict.fromkeys(("/score", "/v1/score"), ("text_1", "text_2")),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), ("query", "documents")),
}
ODD_HEADERS = [
    ("Authorization", "Bearer nobody's"),
    ("Authorization", "Basic Zg=="),
    ("Expect", "100-continue"),
    ("Expect", "200-ok"),
    ("X-Request-Id", "x" * 3000),
    ("traceparent", "00-" + "0" * 32 + "-" + "1" * 16 + "-01"),
    ("Content-Encoding", "br"),
    ("Origin", "http://evil.example"),
    ("Host", "evil.example"),
    ("Range", "bytes=0-1"),
    ("Accept-Encoding", "gzip"),
]
SHORT = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}  # or an answer fills the window


@dataclass(frozen=True)
class Shot:
    """One request, complete."""

    operation: str  # by which it is counted
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None  # JSON, where it is some
    data: bytes | None = None  # what is sent
    spoilt: bool = False
    target: str | None = None  # the id that its path names
    leaves_after: float | None = None  # seconds

    def with_body(self, body: Any) -> Shot:
        return replace(self, body=body, data=json.dumps(body).encode(errors="surrogatepass"))


class Chances:
    """How likely each field of a route is: shared by all clients."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[int]] = defaultdict(lambda: [1, 2])  # answered with 200, sent

    def of(self, operation: str, name: str) -> float:
        good, sent = self._seen[operation, name]
        return max(0.02, good / sent) * 0.3

    def learn(self, shot: Shot, status: int) -> None:
        if shot.spoilt or not isinstance(shot.body, dict):
            return
        for name in shot.body:
            counts = self._seen[shot.operation, name]
            counts[0] += status == 200
            counts[1] += 1


class Maker:
    """Makes the requests of one client."""

    def __init__(self, operations: list[Operation], values: Values, chances: Chances, hostile: bool) -> None:
        self.operations, self.values, self.chances, self.hostile = operations, values, chances, hostile
        self.draw: random.Random = values.draw
        self._weights = [_weight(operation) for operation in operations]
        self.unasked: list[Operation] = []  # come first, each once

    def shot(self) -> Shot:
        [operation] = self.draw.choices(self.operations, self._weights)
        if self.unasked:
            operation = self.unasked.pop()
        shot = self._valid(operation)
        if self.draw.random() < 0.25:
            shot = self._spoilt(shot, operation)
        if self.draw.random() < 0.03:
            shot = replace(shot, leaves_after=self.draw.choice([0.0005, 0.005, 0.05]))
        if self.draw.random() < 0.05:
            name, value = self.draw.choice(ODD_HEADERS)
            shot = replace(shot, headers={**shot.headers, name: value}, spoilt=True)
        return shot

    def _valid(self, operation: Operation) -> Shot:
        path, target = operation.path, None
        for name in operation.parameters:
            target = self._target(operation.path, name)
            path = path.replace(f"{{{name}}}", quote(target, safe=""))
        path += self._query(operation)
        shot = Shot(operation.name, operation.method, path, target=target)
        if operation.fields is None:
            return shot
        if FORM in operation.media:
            return self._form(shot, operation)
        shot = replace(shot, headers={"Content-Type": JSON}).with_body(self.body(operation))
        return self._other_media(shot, operation)

    def body(self, operation: Operation) -> dict[str, Any]:
        assert operation.fields is not None
        path, fields = operation.path, operation.fields
        basics = BASICS.get(path)
        wanted = [*operation.required, *NEEDED.get(path, ()), *([self.draw.choice(basics)] if basics else ())]
        theme = THEMES[self.draw.choice(list(THEMES))]
        for name in self.draw.sample(list(fields), len(fields)):
            chance = self.chances.of(operation.name, name)
            if name in theme:
                chance = min(0.6, 2 * chance)
            elif name in _THEMED or name == "model":
                chance *= 0.02
            if self.draw.random() < chance and len(wanted) < 8:
                wanted.append(name)
        if path in SHORT:
            wanted.append(SHORT[path])
        return self._consistent({name: self.values.of(path, name, fields[name]) for name in wanted}, operation)

    def _consistent(self, body: dict[str, Any], operation: Operation) -> dict[str, Any]:
        """Fields bring what they need, and of two that exclude each other one stays."""
        fields = operation.fields or {}
        for name in list(body):
            for needed, value in NEEDS.get(name, {}).items():
                if needed in fields:
                    body[needed] = self.values.of(operation.path, needed, fields[needed]) if value is None else value
        for name in list(body):
            for barred in BARS.get(name, set()) if name in body else ():
                body.pop(barred, None)
        if body.get("n", 1) and body.get("use_beam_search"):
            body["n"] = min(body.get("n", 1), 2)
        return body

    def _target(self, path: str, name: str) -> str:
        values, draw = self.values, self.draw
        if draw.random() < 0.05:  # another tenant's
            values = Values(draw, values.harvest, draw.choice(values.harvest.tenants), values.vocabulary)
        if "responses" in path:
            return values.response()
        if "catalogues" in path:
            return values.catalogue()
        return values.parent() if "continuations" in path else "no/such/model"

    def _query(self, operation: Operation) -> str:
        good: dict[str, list[str]] = {"limit": ["1", "20", "100"], "order": ["asc", "desc"], "stream": ["true"]}
        good |= {"replace": ["true"], "after": [self.values.parent()], "starting_after": ["0", "3"]}
        if operation.path == "/v1/catalogues" and operation.method == "POST":
            return "?replace=true"
        drawn = {n: self.draw.choice(good[n]) for n in operation.query if n in good and self.draw.random() < 0.25}
        return "?" + urlencode(drawn) if drawn else ""

    def _other_media(self, shot: Shot, operation: Operation) -> Shot:
        """The same body packed, or in another form that the route takes."""
        if shot.data is not None and self.draw.random() < 0.05:
            packed = gzip.compress(shot.data, 1)
            return replace(shot, data=packed, headers={**shot.headers, "Content-Encoding": "gzip"})
        if "application/x-ndjson" in operation.media and self.draw.random() < 0.3:
            query = urlencode({"name": shot.body["name"], "replace": "true"})
            lines = "\n".join(json.dumps(item) for item in shot.body["items"])
            path = f"{operation.path}?{query}"
            return replace(
                shot, path=path, data=lines.encode(), body=None, headers={"Content-Type": "application/x-ndjson"}
            )
        return shot

    def _form(self, shot: Shot, operation: Operation) -> Shot:
        boundary = "fuzz-boundary"
        parts = [b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + _sound()]
        for name, schema in (operation.fields or {}).items():
            if name != "file" and self.draw.random() < 0.1:
                value = self.values.of(operation.path, name, schema)
                shown = value if isinstance(value, str) else json.dumps(value)
                parts.append(f'Content-Disposition: form-data; name="{name}"\r\n\r\n{shown}'.encode())
        data = b"".join(b"--%s\r\n%s\r\n" % (boundary.encode(), part) for part in parts)
        headers = {"Content-Type": f"{FORM}; boundary={boundary}"}
        return replace(shot, headers=headers, data=data + f"--{boundary}--\r\n".encode())

    def _spoilt(self, shot: Shot, operation: Operation) -> Shot:
        """Something is wrong with it, and perhaps with more than one thing."""
        shot = replace(shot, spoilt=True)
        if shot.data is None:
            return replace(shot, path=spoilt_path(self.draw, shot.path))
        expensive = sorted(HOSTILE.keys() & (operation.fields or {}).keys()) if self.hostile else []
        if expensive and isinstance(shot.body, dict) and self.draw.random() < 0.3:
            name = self.draw.choice(expensive)
            body = {**shot.body, name: HOSTILE[name](self.draw)}
            return replace(shot, headers={"Content-Type": JSON}).with_body(body)
        if isinstance(shot.body, dict) and self.draw.random() < 0.8:
            body = shot.body
            for _ in range(self.draw.choice([1, 1, 1, 2, 4])):
                body = spoilt_value(self.draw, body)
            headers = {name: value for name, value in shot.headers.items() if name != "Content-Encoding"}
            return replace(shot, headers=headers).with_body(body)
        if self.draw.random() < 0.1:
            shot = replace(shot, headers={**shot.headers, "Content-Type": self.draw.choice(["text/plain", "", "x/y"])})
        return replace(shot, data=spoilt_bytes(self.draw, shot.data), body=None)


# Where the server has no such model, folder or permission.
_OFTEN_OFF = ("audio", "/files", "/batches", "/estate", "sleep", "/wake_up", "_lora_adapter")


def _weight(operation: Operation) -> float:
    """Generation is where most can go wrong."""
    if operation.path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        return 8
    if operation.path == "/v1/models/{id}" or any(part in operation.path for part in _OFTEN_OFF):
        return 0.3
    return 3 if operation.fields is not None else 1


def _sound() -> bytes:
    """A tenth of a second of silence."""
    file = BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        sound.writeframes(bytes(3200))
    return file.getvalue()
