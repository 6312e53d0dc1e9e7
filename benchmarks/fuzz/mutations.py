"""Ways to spoil a request: inside of its JSON, in its bytes, in its path."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 128, 129, 2**31, 2**31 - 1, 2**32, 2**63, 2**64, -(2**70), 10**40),
    *(0.5, -0.0, 1e308, 5e-324, 1e-9, 99999.5),
    *("", " ", "a", "auto", "none", "required", "null", "user", "tool", "-1", "1e5", "{0}", "%s", "\x00", "\ufeff"),
    *("\ud7ff😀", "e\u0301" * 20, "x" * 300, "(" * 200, "a|" * 100, "../../etc/passwd", "{{ messages }}", "last"),
    *([], [[]], [{}], [None], [0], ["a"], [True], [1.5], [[1], ["a"]], {}, {"a": 1}, {"": ""}, {"type": None}),
    *({"type": {}}, {"type": "object"}, {"$ref": "#"}, {"ttl": -1}, {"ttl": 1e300}, {"start": 3, "end": 1}),
]
_TYPICAL = ["stream", "n", "max_tokens", "stop", "temperature", "messages", "prompt", "continuation_of", "tools"]


def spoilt_value(draw: random.Random, body: Any) -> Any:
    """A copy with one thing changed somewhere."""
    body = copy.deepcopy(body)
    holder, key = draw.choice(_places(body) or [({"": body}, "")])
    change = draw.choice([_replace, _replace, _replace, _delete, _wrap, _repeat, _rename, _nest, _number])
    change(draw, holder, key)
    if isinstance(body, dict) and draw.random() < 0.1:
        body[draw.choice(_TYPICAL)] = draw.choice(ODD)
    return body


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every holder and key in a document; wide lists are looked at in their beginning."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(min(len(value), 20)))
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def _replace(draw: random.Random, holder: Any, key: Any) -> None:
    holder[key] = copy.deepcopy(draw.choice(ODD))


def _delete(draw: random.Random, holder: Any, key: Any) -> None:
    del holder[key]


def _wrap(draw: random.Random, holder: Any, key: Any) -> None:
    holder[key] = draw.choice([[holder[key]], {"a": holder[key]}, str(holder[key])[:2000]])


def _repeat(draw: random.Random, holder: Any, key: Any) -> None:
    value = holder[key]
    if isinstance(value, str | list) and len(value) < 50:
        holder[key] = value * draw.choice([2, 5, 17])


def _rename(draw: random.Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[draw.choice([key + "s", key.upper(), key.replace("_", ""), "type", "x"])] = holder.pop(key)


def _nest(draw: random.Random, holder: Any, key: Any) -> None:
    value = holder[key]
    for _ in range(draw.choice([3, 20, 80])):
        value = draw.choice([[value], {"properties": value}])
    holder[key] = value


def _number(draw: random.Random, holder: Any, key: Any) -> None:
    value = holder[key]
    if isinstance(value, int | float):
        holder[key] = draw.choice([-value, value + 1, value - 1, value * 1000, value / 3])


_JUNK = [b"\x00", b"\xff\xfe", b'"', b"{", b"]", b",", b"NaN", b"1e999", b"\\ud800", b"\xef\xbb\xbf", b"9" * 400]


def spoilt_bytes(draw: random.Random, data: bytes) -> bytes:
    at, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
    changes: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + data[end:],
        lambda: data[:at] + draw.choice(_JUNK) + data[at:],
        lambda: data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
        lambda: data + data,
        lambda: b"[" * draw.choice([50, 5000]) + data,
        lambda: b"",
    ]
    return draw.choice(changes)()


def spoilt_path(draw: random.Random, path: str) -> str:
    odd = ["%00", "%ff", "..%2f..", "a" * 3000, "%E2%82%AC", "%0d%0aX:1", "%", "?limit=-1", "?limit=x&after=", "//"]
    odd += ["?order=up", "?stream=1&starting_after=-5", "?limit=99999999999999999999", "?%ff=%fe", "?width=0"]
    head, slash, tail = path.rpartition("/")
    return draw.choice([path + draw.choice(odd), head + slash + draw.choice(odd), path + "/" + tail, path.upper()])
