"""Large bodies: whatever JSON can hold, in as many bytes as --max-body-mb allows, and nobody else waits for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import orjson
import pytest

from bequest.server.wire import large, structure
from bequest.server.wire.large import Malformed, parse_large
from bequest.server.wire.structure import Counts, structure_of
from tests.attack.conftest import Serve, Victim

_STALL = 0.05  # seconds
_MOST = 31 << 20  # bytes, a little below --max-body-mb
_ENDLESS = Counts(1 << 40, 1 << 40)


def _filled(before: bytes, item: bytes, behind: bytes, num_bytes: int = _MOST) -> bytes:
    """As many items as make a body of that size."""
    return before + ((item + b",") * (num_bytes // (len(item) + 1)))[:-1] + behind


def _named(before: bytes, value: bytes, behind: bytes, count: int) -> bytes:
    return before + ((b'"%d":' + value + b",") * count % tuple(range(count)))[:-1] + behind


COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
_ASK, _TALK = b'{"prompt":"a",', b'{"messages":[{"role":"user","content":"a"}],'
_TOOL = b'"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{'
_PART, _CALL = b'{"type":"text","text":"a"}', b'{"function":{"name":"f"}}'
# Made when they are sent: together they are hundreds of megabytes.
TOO_LARGE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a choice of millions": (
        COMPLETIONS,
        lambda: _filled(_ASK + b'"structured_outputs":{"choice":[', b'"a"', b"]}}"),
    ),
    "millions of names": (COMPLETIONS, lambda: _named(b"{", b"0", b"}", 2_400_000)),
    "millions of properties": (CHAT, lambda: _named(_TALK + _TOOL, b"{}", b"}}}}]}", 2_000_000)),
    "a million parts": (CHAT, lambda: _filled(b'{"messages":[{"role":"user","content":[', _PART, b"]}]}")),
    "millions of empty lists": (COMPLETIONS, lambda: _filled(b'{"prompt":[', b"[]", b"]}")),
    "millions of options": (COMPLETIONS, lambda: _named(_ASK + b'"stream_options":{', b"0", b"}}", 2_000_000)),
    "a million calls": (CHAT, lambda: _filled(b'{"messages":[{"role":"assistant","tool_calls":[', _CALL, b"]}]}")),
    "a bias of many tokens": (COMPLETIONS, lambda: _named(_ASK + b'"logit_bias":{', b"1", b"}}", 245_000)),
    "millions of numbers": (COMPLETIONS, lambda: _filled(b'{"prompt":[', b"1", b"]}")),
}


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_a_body_that_holds_too_much_is_counted_and_refused(fake: Victim, name: str) -> None:
    path, make = TOO_LARGE[name]
    content = await _taken_calmly(fake, path, make(), 413)
    assert content["error"]["code"] == "request_too_large" and "--max-body-" in content["error"]["message"], content
    await _nothing_is_held(fake)


async def _taken_calmly(victim: Victim, path: str, body: bytes, status: int) -> Any:
    """What is answered to a body that keeps nobody else waiting."""
    sent = victim.calmly(lambda _: victim.front.post(path, body), stall=_STALL, hold=4 * _STALL)
    answer, content = await sent
    assert answer.status == status, content
    return content


def _words(count: int, chars: int) -> list[str]:
    return [f"{i:08d}" + "x" * (chars - 8) for i in range(count)]


TAKEN: dict[str, tuple[str, Callable[[], Any], int]] = {
    "one name of megabytes": (COMPLETIONS, lambda: {"prompt": "a", "max_tokens": 1, "k" * (30 << 20): 0}, 200),
    "all the bad words there may be": (
        COMPLETIONS,
        lambda: {"prompt": "a", "max_tokens": 1, "bad_words": _words(1024, 1024)},
        200,
    ),
    "a million token ids": (COMPLETIONS, lambda: {"prompt": [7] * 1_000_000, "max_tokens": 1}, 400),
    "a foreign token id": (COMPLETIONS, lambda: {"prompt": [*[7] * 1_000_000, 1 << 40]}, 400),
    "a text of megabytes": (COMPLETIONS, lambda: {"prompt": "wört " * (5 << 20), "max_tokens": 1}, 400),
    "a text of escapes": (COMPLETIONS, lambda: b'{"prompt":"' + b"\\u4e2d\\n" * (3 << 20) + b'"}', 400),
    "a text to tokenise": (TOKENIZE, lambda: {"prompt": "w " * (15 << 20), "return_token_strs": True}, 400),
    "all the names there may be": (COMPLETIONS, lambda: {"prompt": "a", **dict.fromkeys(_words(90_000, 8), 0)}, 200),
    "all the parts there may be": (
        CHAT,
        lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 15_000}]},
        400,
    ),
    "all the choices there may be": (
        COMPLETIONS,
        lambda: {"prompt": "a", "structured_outputs": {"choice": _words(90_000, 8), "json": {}}},
        400,
    ),
    "megabytes of blanks": (COMPLETIONS, lambda: b'{"prompt":' + b" " * (30 << 20) + b"}", 400),
    "tokens to be shown": ("/detokenize", lambda: {"tokens": [7] * 1_000_000}, 200),
}


@pytest.mark.parametrize("name", TAKEN)
async def test_a_large_body_is_read_where_nobody_waits(fake: Victim, name: str) -> None:
    path, make, status = TAKEN[name]
    given = make()
    body = given if isinstance(given, bytes) else orjson.dumps(given)
    await _taken_calmly(fake, path, body, status)
    await _nothing_is_held(fake)


async def test_tokens_of_a_real_vocabulary_are_shown_where_nobody_waits(real: Victim) -> None:
    body = orjson.dumps({"tokens": [7] * 1_000_000})
    content = await _taken_calmly(real, "/detokenize", body, 200)
    assert content["prompt"] == real.server.text.tokenizer.decode([7]) * 1_000_000


async def _nothing_is_held(victim: Victim) -> None:
    assert await victim.server.on_loop(lambda: victim.server.context.in_flight.used_bytes) == 0


async def test_the_bounds_are_the_operators(serve: Serve) -> None:
    victim = serve(max_body_values=20_000, max_body_parts=10)
    answer, content = await victim.front.post(COMPLETIONS, orjson.dumps({"prompt": [7] * 30_000}))
    assert answer.status == 413 and content["error"]["details"] == {"limit": 20_000}
    answer, content = await victim.front.post(COMPLETIONS, orjson.dumps({"prompt": ["a" * 2000] * 20}))
    assert answer.status == 413 and content["error"]["details"] == {"limit": 10}


# --- pieces ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_PIECE", 16)
    monkeypatch.setattr(large, "_AT_ONCE", 0)
    monkeypatch.setattr(structure, "_PIECE", 16)
    monkeypatch.setattr(structure, "_SHORT", 4)


@pytest.mark.usefixtures("small_pieces")
def test_pieces_make_what_the_parser_makes_of_the_whole() -> None:
    dice = random.Random(1)
    outcomes = set()
    for _ in range(300):
        text = json.dumps(_value(dice), ensure_ascii=dice.random() < 0.5, indent=dice.choice([None, 1])).encode()
        text = _spoilt(dice, text) if dice.random() < 0.6 else text
        whole, pieces = _outcome(lambda text: msgspec.json.decode(text), text), _outcome(_in_pieces, text)
        assert repr(whole) == repr(pieces), text
        outcomes.add(whole is Malformed)
    assert outcomes == {True, False}


def _in_pieces(text: bytes) -> Any:
    return parse_large(text, structure_of(text, _ENDLESS)) if text else msgspec.json.decode(text)


def _outcome(parse: Any, text: bytes) -> Any:
    try:
        return parse(text)
    except (msgspec.DecodeError, UnicodeDecodeError, Malformed):
        return Malformed


def _value(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.random()
    if depth > 4 or kind < 0.3:
        long = 'ä中😀\n\t\\"[{:,' * dice.randrange(5) + "\\" * dice.randrange(20)
        return dice.choice([1, -2.5, None, True, "", "]{},:", "x" * dice.randrange(40), long])
    if kind < 0.65:
        return [_value(dice, depth + 1) for _ in range(dice.randrange(6))]
    return {f"{i}" * dice.randrange(1, 30) + dice.choice('a":\\'): _value(dice, depth + 1) for i in range(3)}


def _spoilt(dice: random.Random, text: bytes) -> bytes:
    place = dice.randrange(len(text))
    put = bytes([dice.choice(b'[]{},:"\\ 1ue\xff')]) * dice.randrange(3)
    return text[:place] + put + text[place + dice.randrange(3) :]
