"""Bodies that use what an endpoint has, with something wrong somewhere inside: whatever it is, it is not our fault."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.server.front import Front

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "o"},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
]
STATES = {"layers": [0, -1], "positions": {"start": 0, "end": 2}, "encoding_format": "base64", "include_prompt": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {
            "prompt": "hi",
            "max_tokens": 3,
            "n": 2,
            "stop": ["z"],
            "logprobs": 2,
            "echo": True,
            "seed": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "retain": {"ttl": 5},
            "request_id": "n",
            "return_hidden_states": STATES,
            "logit_bias": {"5": 1},
            "bad_words": ["q"],
            "prompt_logprobs": 1,
        },
    ),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "use_beam_search": True, "n": 2, "beam_width": 3, "max_tokens": 3}),
    ("/v1/completions", {"prompt": {"encoder_prompt": {"prompt": "a"}, "decoder_prompt": {"prompt_token_ids": [1]}}}),
    ("/v1/completions", {"continuation_of": "p", "continuation_at": 3, "continuation_suffix": "x", "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "t"}]},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "max_tokens": 3,
        },
    ),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": "none", "logprobs": True}),
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        },
    ),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}),
    ("/v1/chat/completions", {"continuation_of": "c", "messages": [USER], "continuation_fallback": [USER]}),
    (
        "/v1/responses",
        {
            "input": ITEMS,
            "instructions": "i",
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "max_output_tokens": 4,
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low"},
        },
    ),
    ("/v1/responses/input_tokens", {"input": ITEMS, "tools": [{"type": "function", **FUNCTION}]}),
    ("/v1/hidden_states", {"input": ["a", [1, 2]], "layers": [0, 1], "positions": [0, -1], "pooling": "mean"}),
    ("/v1/hidden_states", {"continuation_of": "p", "layers": "all", "continuation_token_ids": [1]}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 2, "normalize": False}),
    ("/tokenize", {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {"x": None}}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/catalogues", {"name": "x", "items": [[1, 2], [3]]}),
]
WRONG: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308, 5e-324),
    *(
        "",
        "a",
        "user",
        "auto",
        "required",
        "none",
        "\x00",
        "\ud7ff😀",
        "x" * 300,
        "json_object",
        "-1",
        "1e5",
        "{0}",
        "p",
    ),
    *([], [[]], [{}], [None], [1], ["a"], [True], [1.5], {}, {"a": 1}, {"": ""}, {"type": None}, {"type": {}}),
]
NAMES = ("type", "name", "schema", "id", "content", "x")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        yield (*path, name)
        yield from places(inner, (*path, name))


def changed(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """With one to three things replaced, removed or added."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        *way, last = draw.choice(list(places(body)) or [("x",)])
        holder: Any = body
        for name in way:
            holder = holder[name]
        kind = draw.random()
        if kind < 0.8 or last not in (holder if isinstance(holder, dict) else range(len(holder))):
            holder[last] = copy.deepcopy(draw.choice(WRONG))
        elif kind < 0.9:
            del holder[last]
        elif isinstance(holder, dict):
            holder[draw.choice(NAMES)] = copy.deepcopy(draw.choice(WRONG))
    return body


@pytest.mark.parametrize("seed", range(3))
async def test_a_body_with_something_wrong_inside_is_never_our_fault(front: Front, seed: int) -> None:
    draw = random.Random(seed)
    await front.post("/v1/completions", {"prompt": "abc", "request_id": "p", "max_tokens": 3})
    await front.post("/v1/chat/completions", {"messages": [USER], "request_id": "c", "max_tokens": 3})
    statuses = []
    for path, body in BODIES * 25:
        sent = changed(draw, body)
        headers = {"Content-Type": "application/json"}
        data = json.dumps(sent).encode()  # which writes integers of any size
        async with front.http.post(front.url + path, data=data, headers=headers) as answer:
            content = await answer.read()
        assert answer.status < 500 and b'"internal_error"' not in content, (path, sent, content)
        assert answer.status == 200 or orjson.loads(content)["error"]["message"], (path, sent)
        statuses.append(answer.status)
    assert 30 < statuses.count(200) < statuses.count(400)
