"""Values that are well-formed and meant to hurt: expensive to read, to compile, to render or to keep."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_DEEP = {"type": "array"}
for _ in range(40):
    _DEEP = {"type": "array", "items": _DEEP}  # type: ignore[dict-item]
_WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,64}$"} for i in range(300)}}
_OPEN = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}, "b": {"type": "null"}}}

_REGEX = [
    "(a+)+$",
    "(a|a)*b",
    "a{1000}{1000}",
    "(?:a{0,60}){0,60}",
    "[a-z",
    "(?<=a)b",
    "\\p{L}{3}",
    ".*" * 50,
    "",
    "\\",
]
_GRAMMARS = [
    'start: start "a" | "a"',
    "start: A\nA: /(.*a.{15})/ & /(.*b.{15})/ & ~/(.*d.{15})/",
    'start: x\nx: y\ny: x | ""',
    "start: " + " | ".join(f'"{i}"' for i in range(2000)),
    "start:",
    "nothing",
]
_SCHEMAS: list[Any] = [_DEEP, _WIDE, {**_OPEN, "$ref": "#/$defs/a"}, {"$ref": "#/nowhere"}, {"enum": []}, False, True]
_SCHEMAS += [{"type": "integer", "multipleOf": 0}, {"type": "string", "minLength": 10**9}, {"pattern": "("}]
_SCHEMAS += [{"type": "array", "minItems": 10**6, "items": {"type": "null"}}, {"not": {}}, {"type": ["x"]}]
_TEMPLATES = [
    "{% for i in range(100000) %}{{ i }}{% endfor %}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ messages | tojson }}" * 50,
    "{{ 'a' * 10**8 }}",
    "{{ messages[9].content }}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ ''.__class__.__mro__ }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% if",
    "{{ (1, 2) | groupby('a') }}",
]

# A canvas of 60,000 × 60,000 pixels in 57 bytes, files that are cut short, addresses that nobody may be sent to.
_BOMB = "iVBORw0KGgoAAAANSUhEUgAA6mAAAOpgCAIAAABzGWbRAAAAAElFTkSuQmCC"
_URLS = [
    f"data:image/png;base64,{_BOMB}",
    f"data:image/png;base64,{_BOMB[:40]}",
    "data:image/jpeg;base64,/9j/4AAQSkZJRgABAQ",
    "data:image/png;base64,!!!",
    "data:image/png,plain",
    "data:image/png;base64," + "A" * 1_000_000,
    "http://127.0.0.1:9/a.png",
    "http://169.254.169.254/latest/meta-data",
    "http://[::1]/a.png",
    "http://localhost:6379/",
    "file:///etc/passwd",
    "file:../../secret.png",
    "ftp://host/a.png",
    "",
]


def _pictures(draw: random.Random) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": draw.choice(_URLS)}} for _ in range(draw.choice([1, 3, 100]))]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


HOSTILE: dict[str, Callable[[random.Random], Any]] = {
    "structured_outputs": lambda draw: draw.choice(
        [
            {"regex": draw.choice(_REGEX)},
            {"grammar": draw.choice(_GRAMMARS)},
            {"json": draw.choice(_SCHEMAS)},
            {"choice": [f"{'x' * 50}{i}" for i in range(3000)]},
        ]
    ),
    "response_format": lambda draw: {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": draw.choice(_SCHEMAS)},
    },
    "tools": lambda draw: [
        {"type": "function", "function": {"name": f"f{i}", "parameters": draw.choice(_SCHEMAS)}}
        for i in range(draw.choice([1, 100, 300]))
    ],
    "chat_template": lambda draw: draw.choice(_TEMPLATES),
    "chat_template_kwargs": lambda draw: {"messages": None, "add_generation_prompt": "x", "bos_token": ["a"] * 999},
    "stop": lambda draw: ["a" * 1000 + str(i) for i in range(draw.choice([10, 64, 5000]))],
    "bad_words": lambda draw: [f"w{i} " * 9 for i in range(draw.choice([100, 1024, 3000]))],
    "logit_bias": lambda draw: {str(i): 1 for i in range(draw.choice([300, 5000, 50_000]))},
    "allowed_token_ids": lambda draw: [i % 2000 for i in range(draw.choice([2000, 100_000]))],
    "prompt": lambda draw: draw.choice([["a"] * 5000, "a " * 200_000, [1] * 100_000, [[1]] * 4000, {"prompt": "a"}]),
    "input": lambda draw: draw.choice([["a"] * 5000, "a " * 200_000, [1] * 100_000, [[1, 2]] * 300]),
    "messages": lambda draw: draw.choice(
        [[{"role": "user", "content": "a"}] * 1000, [{"role": "user", "content": "a"}] * 20_000, _pictures(draw)]
    ),
    "prompt_embeds": lambda draw: draw.choice(["", "!", "AAAA" * 100_000, [], ["UEsDBAAA"] * 5000, ["eA=="] * 3]),
    "continuation_suffixes": lambda draw: [[1, 2, 3]] * draw.choice([200, 1024, 5000]),
    "n": lambda draw: draw.choice([16, 128, 10**9]),
    "beam_width": lambda draw: draw.choice([64, 1024, 10**9]),
    "max_tokens": lambda draw: draw.choice([500, 10**12]),
    "layers": lambda draw: [0] * draw.choice([100, 100_000]),
    "positions": lambda draw: [0] * draw.choice([500, 100_000]),
    "items": lambda draw: [[1 + i % 1999, 1 + i // 1999, 7] for i in range(draw.choice([20_000, 100_000]))],
    "tokens": lambda draw: [5] * draw.choice([10_000, 200_000]),
    "metadata": lambda draw: {f"k{i}": "v" * 500 for i in range(draw.choice([17, 2000]))},
    "timeout": lambda draw: draw.choice([1e-9, 0.001, 1e300]),
    "seed": lambda draw: draw.choice([2**63 - 1, -(2**63), 2**64]),
}
