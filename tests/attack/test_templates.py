"""Chat templates that requests bring: programs of the client's, however short."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from tests.attack.conftest import Serve, Victim

_HELLO = [{"role": "user", "content": "hi"}]
_LOOP = "{{% set ns = namespace(x={}) %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"


def _ask(template: str) -> bytes:
    return orjson.dumps({"messages": _HELLO, "chat_template": template, "max_tokens": 2})


@pytest.mark.parametrize(
    "template",
    [
        _LOOP.format("'xx'", "ns.x + ns.x"),
        _LOOP.format("'xx'", "ns.x.replace('x', 'xxxx')"),
        _LOOP.format("'xx'", "ns.x.center(ns.x|length * 3)"),
        _LOOP.format("7", "ns.x * ns.x"),
        "{% set x = 'ab'|list %}" + "{{ range(99999)|map('string')|map('string')|sort|list|length }}" * 200,
        "{{a}}" * 50_000,
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    ],
)
async def test_a_wild_template_costs_its_sender_alone(serve: Serve, template: str) -> None:
    victim = serve(chat_template_seconds=0.25)
    bodies = [_ask(template + "{# again #}" * i) for i in range(3)]  # what is compiled may be kept
    sent = victim.calmly(lambda i: victim.front.post("/v1/chat/completions", bodies[i]), stall=0.05, cpu=0.25)
    answer, content = await sent
    assert answer.status in (200, 400), content
    assert answer.status == 200 or content["error"]["param"] in ("chat_template", "messages"), content


async def test_an_operator_may_refuse_them(serve: Serve) -> None:
    answer, content = await serve(chat_template_seconds=0).front.post("/v1/chat/completions", _ask("hi"))
    assert answer.status == 400 and content["error"]["code"] == "unsupported_parameter", content


async def test_slow_templates_do_not_hold_the_texts_of_others(serve: Serve) -> None:
    victim = serve(chat_template_seconds=0.5)
    slow = _ask(_LOOP.format("7", "ns.x * ns.x"))
    attack = [asyncio.ensure_future(victim.front.post("/v1/chat/completions", slow)) for _ in range(6)]
    await asyncio.sleep(0.1)
    pool = victim.server.context.pool
    assert await victim.server.on_loop(lambda: sum(pool._running.values())) <= 2, "a tenant has two places"
    done = await pool_turn(victim, "another")
    assert done == "done" and not all(task.done() for task in attack)
    answers = await asyncio.gather(*attack)
    assert {answer.status for answer, _ in answers} == {400}


async def pool_turn(victim: Victim, tenant: str) -> str:
    work = victim.server.context.pool.run(tenant, lambda: "done")
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, victim.server.loop))
