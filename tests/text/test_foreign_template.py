"""Templates that requests bring: the same text as a model's own, and none that runs wild."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bequest.engine.errors import InvalidRequest
from bequest.engine.text import ChatTemplate
from bequest.engine.text.foreign_template import TemplateRenderer

TURN = [{"role": "user", "content": "hi"}]
GROWING = "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}done"


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(5.0)
    yield made
    made.close()


def test_it_renders_as_a_models_own(renderer: TemplateRenderer) -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood }}{{ tools }}"
    own = ChatTemplate(source, "<s>")
    foreign = renderer.template(source, own.tokens)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for options in ({"mood": "calm é"}, {"tools": tools}, {"add_generation_prompt": False}):
        assert foreign.render(TURN, **options) == own.render(TURN, **options)  # type: ignore[arg-type]
    continued = [*TURN, {"role": "assistant", "content": "I "}]
    text = foreign.render(continued, add_generation_prompt=False, continue_final_message=True)
    assert text == "<s>[user]hi[assistant]I "


def test_what_is_no_jinja_is_named_with_its_line(renderer: TemplateRenderer) -> None:
    with pytest.raises(InvalidRequest, match="the chat template is not valid Jinja: line 2") as caught:
        renderer.template("\n{% if %}", {}).render(TURN)
    assert caught.value.field == "template" and caught.value.facts["line"] == 2


@pytest.mark.parametrize("expression", ["ns.x + ns.x", "ns.x.ljust(ns.x|length * 2)", "'%s%s' % (ns.x, ns.x)"])
def test_a_text_that_grows_takes_no_memory_of_ours(renderer: TemplateRenderer, expression: str) -> None:
    with pytest.raises(InvalidRequest, match="too much memory"):
        renderer.template(GROWING.replace("EXPRESSION", expression), {}).render(TURN)


@pytest.mark.parametrize(
    "source",
    [
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1" + "|abs" * 20_000 + " }}",
        "{{ " + "+".join("1" for _ in range(20_000)) + " }}",
        "{{ messages" + ".x" * 20_000 + " }}",
        "{{ raise_exception({'a': messages}) }}",
    ],
)
def test_a_template_of_an_odd_shape_is_the_clients_error(renderer: TemplateRenderer, source: str) -> None:
    try:
        assert isinstance(renderer.template(source, {}).render(TURN), str)
    except InvalidRequest as error:
        assert "chat template" in error.message and len(error.message) < 500 and "\n" not in error.message


def test_what_it_says_is_one_short_line_without_addresses(renderer: TemplateRenderer) -> None:
    for source in ("{{ raise_exception('a\nb' * 1000) }}", "{{ raise_exception(cycler ~ '') }}", "{{ cycler + 1 }}"):
        with pytest.raises(InvalidRequest) as caught:
            renderer.template(source, {}).render(TURN)
        message = caught.value.message
        assert "\n" not in message and len(message) < 400 and "0x" not in message


def test_a_template_without_end_is_stopped_and_the_next_one_rendered() -> None:
    renderer = TemplateRenderer(1.0)
    endless = "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    try:
        with pytest.raises(InvalidRequest, match="more than 1 seconds") as caught:
            renderer.template(endless, {}).render(TURN)
        assert caught.value.field == "template"
        assert renderer.template("{{ messages[0].content }}", {}).render(TURN) == "hi"
    finally:
        renderer.close()
