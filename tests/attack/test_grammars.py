"""Grammars that are small to send and large to read, to compile or to keep."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from bequest.engine.constraints.grammar import Grammar, GrammarSource
from bequest.server.stores.grammars import Constraint, GrammarStore
from bequest.server.stores.kept_grammars import KeptGrammars
from bequest.server.wire.errors import ApiError
from tests.attack.conftest import Victim

# Compiles for about a second, wherever it is tried: an intersection of expressions that grow together.
_SLOW = 'start: A "{}"\nA: /(.*a.{{9}})/ & /(.*b.{{8}})/ & /(.*c.{{7}}.*)/ & ~/(.*d.{{6}})/'


def _ask(**constraint: Any) -> bytes:
    return orjson.dumps({"prompt": "a b", "max_tokens": 2, "temperature": 0, "structured_outputs": constraint})


async def _answered(victim: Victim, body: bytes) -> tuple[aiohttp.ClientResponse, Any]:
    """Of a grammar that is refused, and so not kept."""
    return await victim.calmly(lambda _: victim.front.post("/v1/completions", body), stall=0.05)


async def test_a_grammar_of_empty_lines_holds_nobody(real: Victim) -> None:
    """Its syntax was looked at on the loop, in time quadratic in the lines: 145 seconds for these."""
    bodies = [_ask(grammar="\n" * (118_000 + i) + 'root ::= "a"') for i in range(3)]  # what is compiled is kept
    answer, content = await real.calmly(lambda i: real.front.post("/v1/completions", bodies[i]), stall=0.05)
    assert answer.status == 200 and content["choices"][0]["text"] == "a", content


async def test_a_text_that_is_no_grammar_is_named(real: Victim) -> None:
    for text in ("\n" * 100_000 + "root ::= (", "root ::= " + "(" * 50_000, "start" + " " * 200_000):
        answer, content = await _answered(real, _ask(grammar=text))
        assert answer.status == 400 and content["error"]["param"] == "structured_outputs.grammar", content


async def test_a_long_grammar_is_refused_unread(real: Victim) -> None:
    for kind, text in (("grammar", "\n" * 300_000), ("regex", "a" * 300_000)):
        answer, content = await _answered(real, _ask(**{kind: text}))
        assert answer.status == 400 and content["error"]["code"] == "grammar_too_large", content


async def test_a_short_schema_of_many_megabytes_is_refused(real: Victim) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}
    answer, content = await real.front.post("/v1/completions", _ask(json=schema))
    assert answer.status == 400 and content["error"]["code"] == "grammar_too_large", content
    assert "--grammars-mb" in content["error"]["message"], content


def _store(real: Victim, most_bytes: int, num_tenants: int = 2) -> tuple[GrammarStore, KeptGrammars]:
    kept = KeptGrammars(most_bytes, lambda: num_tenants)
    return GrammarStore(real.server.text.tokenizer, real.server.engine.info, 10.0, kept), kept


def _array(count: int) -> Constraint:
    """Of about 0.7 MiB for a count of 16,000."""
    schema = orjson.dumps({"type": "array", "items": {"type": "null"}, "minItems": count}).decode()
    return Constraint(GrammarSource("json_schema", schema), "response_format", "Invalid schema")


async def test_grammars_are_kept_by_their_bytes(real: Victim) -> None:
    """Many of one tenant's leave no more than their room, and leave another's alone."""
    store, kept = _store(real, 8 << 20)
    try:
        mine = await store.compiled("light", _array(3))
        for count in range(16_000, 16_024):
            await store.compiled("heavy", _array(count))
            assert kept.used_bytes <= 8 << 20
        assert 2 < len(kept) < 24
        assert await store.compiled("light", _array(3)) is mine
    finally:
        store.close()


async def test_grammars_in_use_count_too(real: Victim) -> None:
    """Requests that wait or run hold theirs: who fills the room with them is refused, and others are not."""
    store, kept = _store(real, 8 << 20)
    held: dict[int, Grammar] = {}
    try:
        with pytest.raises(ApiError) as caught:
            for count in range(16_000, 16_024):
                held[count] = await store.compiled("heavy", _array(count))
        assert caught.value.status == 429 and "--grammars-mb" in caught.value.message
        assert 2 < len(held) < 12 and kept.used_bytes <= 4 << 20, "a tenant has half"
        assert await store.compiled("heavy", _array(16_000)) is held[16_000], "one that lives is found"
        assert await store.compiled("light", _array(16_100))
        held.clear()
        assert await store.compiled("heavy", _array(16_200))
    finally:
        store.close()


async def test_slow_grammars_of_one_tenant_do_not_hold_another_s(real: Victim) -> None:
    store, _ = _store(real, 256 << 20)

    def constraint(text: str) -> Constraint:
        return Constraint(GrammarSource("lark", text), "grammar", "Invalid grammar")

    try:
        await store.compiled("heavy", constraint('start: "warm"'))
        heavy = [asyncio.ensure_future(store.compiled("heavy", constraint(_SLOW.format(i)))) for i in range(20)]
        await asyncio.sleep(0)
        await store.compiled("light", constraint('start: "quick"'))
        assert sum(task.done() for task in heavy) < 10, "it waited behind them"
    finally:
        store.close()
    for task in heavy:
        task.cancel()
    await asyncio.gather(*heavy, return_exceptions=True)
