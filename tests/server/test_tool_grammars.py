"""Grammars of calls in every format: what a model was taught to write follows them, and is read back as calls."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from bequest.engine._C import GrammarTokens
from bequest.engine.constraints.grammar import GrammarSource, compile_source, grammar_tokens
from bequest.engine.dialects.formats import FORMATS
from bequest.engine.dialects.harmony import MARKS
from bequest.engine.dialects.reader import Dialect
from bequest.engine.dialects.recognise import HARMONY
from bequest.server.asks.leads import ThoughtLimit, content_head, free_answer, lead_of
from bequest.server.asks.tool_grammars import CallGrammar
from bequest.server.asks.tools import chat_tools
from tests.dialects.reading import read

LOOK = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "far": {"type": "integer"},
        "how": {"enum": ["up", "down"]},
        "deep": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    },
    "required": ["at", "deep"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}},
    {"type": "function", "function": {"name": "go"}},  # it takes nothing
]
NAMES = ("look", "go", "jump")
ARGUMENTS = {"at": 'the "sea"', "far": 3, "how": "up", "deep": {"a": True}}
SPECIALS = {mark: 257 + index for index, mark in enumerate(MARKS)}

# One call of `look` with all of its arguments, and one of `go`.
WRITTEN = {
    "qwen3_coder": (
        '<tool_call>\n<function=look>\n<parameter=at>\nthe "sea"\n</parameter>\n<parameter=far>\n3\n</parameter>\n'
        '<parameter=how>\nup\n</parameter>\n<parameter=deep>\n{"a": true}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=go>\n</function>\n</tool_call>"
    ),
    "glm45": (
        '<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the "sea"</arg_value>\n<arg_key>far</arg_key>\n'
        "<arg_value>3</arg_value>\n<arg_key>how</arg_key>\n<arg_value>up</arg_value>\n<arg_key>deep</arg_key>\n"
        '<arg_value>{"a": true}</arg_value>\n</tool_call>\n<tool_call>go\n</tool_call>'
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">the "sea"</parameter>\n'
        '<parameter name="far">3</parameter>\n<parameter name="how">up</parameter>\n'
        '<parameter name="deep">{"a": true}</parameter>\n</invoke>\n<invoke name="go">\n</invoke>\n</minimax:tool_call>'
    ),
    "seed_oss": (
        '<seed:tool_call>\n<function=look>\n<parameter=at>the "sea"</parameter>\n<parameter=far>3</parameter>\n'
        '<parameter=how>up</parameter>\n<parameter=deep>{"a": true}</parameter>\n</function>\n</seed:tool_call>\n'
        "<seed:tool_call>\n<function=go>\n</function>\n</seed:tool_call>"
    ),
    "pythonic": '[look(at="the \\"sea\\"", far=3, how="up", deep={"a": true}), go()]',
    "lfm2": '<|tool_call_start|>[look(at="the \\"sea\\"", far=3, how="up", deep={"a": true}), go()]<|tool_call_end|>',
    "olmo3": '<function_calls>look(at="the \\"sea\\"", far=3, how="up", deep={"a": true})\ngo()</function_calls>',
    "gemma3": '```tool_code\nlook(at="the \\"sea\\"", far=3, how="up", deep={"a": true})\ngo()\n```',
    "gemma4": (
        '<|tool_call>call:look{at:<|"|>the "sea"<|"|>,far:3,how:<|"|>up<|"|>,deep:{"a": true}}<tool_call|>'
        "<|tool_call>call:go{}<tool_call|>"
    ),
}


@cache
def byte_tokens() -> GrammarTokens:
    """Bytes, an end token, and the special tokens of harmony."""
    spelled = [*(bytes([byte]) for byte in range(256)), b"<end>", *(mark.encode() for mark in SPECIALS)]
    return grammar_tokens(spelled, {256, *SPECIALS.values()}, 256, lambda text: list(text.encode()))


def tokens_of(text: str, specials: dict[str, int]) -> list[int]:
    ids: list[int] = []
    while text:
        mark = next((mark for mark in specials if text.startswith(mark)), None)
        ids += [specials[mark]] if mark else list(text[0].encode())
        text = text[len(mark) if mark else 1 :]
    return ids


def follows(grammar: str, text: str, lead: str = "", kind: Any = "lark") -> bool:
    """Whether a text is a whole answer of the grammar."""
    matcher = compile_source(GrammarSource(kind, grammar, lead=lead), byte_tokens())
    ids = tokens_of(text, SPECIALS if "<[" in grammar + lead else {})
    return matcher.count_valid(ids) == len(ids) and matcher.consume(ids) and matcher.is_accepting


def written(name: str) -> str:
    if name in WRITTEN:
        return WRITTEN[name]
    if name == "openai":
        return f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}"
    return FORMATS[name].layout.written([("look", json.dumps(ARGUMENTS)), ("go", "{}")])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_must_come(name: str) -> None:
    format, text = FORMATS[name], written(name)
    specials = SPECIALS if name == "openai" else {}
    tools = chat_tools(TOOLS, "required", None)
    constraint = tools.constraint(format, specials, None)
    assert constraint is not None and follows(constraint.source.text, text)
    assert not follows(constraint.source.text, f"Sure. {text}")
    found = read(Dialect(None, format).reader(tools.call_terms()), text, [])
    assert (
        found.content == ""
        and [json.loads(arguments) for _, arguments in found.calls] == [ARGUMENTS, {}][: len(found.calls)]
    )
    assert [call for call, _ in found.calls] == (["look"] if name == "openai" else ["look", "go"])


@pytest.mark.parametrize("name", FORMATS)
def test_one_function_that_must_be_called(name: str) -> None:
    specials = SPECIALS if name == "openai" else {}
    tools = chat_tools(TOOLS, {"type": "function", "function": {"name": "go"}}, None)
    constraint = tools.constraint(FORMATS[name], specials, None)
    assert constraint is not None and not follows(constraint.source.text, written(name))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("glm4", "openai")])
def test_calls_that_may_come_are_held_to_their_schemas(name: str) -> None:
    format, text = FORMATS[name], written(name)
    constraint = chat_tools(TOOLS, "auto", None).constraint(format, {}, None)
    assert constraint is not None
    grammar = constraint.source.text
    assert follows(grammar, text) and follows(grammar, "Sure, by hand.")
    assert not follows(grammar, text.replace("look", "jump"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_calls_are_of_what_is_allowed(name: str, mode: str) -> None:
    """Without a function that is `strict`: what is allowed is held to all the same."""
    format, text = FORMATS[name], written(name)
    specials = SPECIALS if name == "openai" else {}
    dialect = Dialect(HARMONY if name == "openai" else None, format)
    head = content_head(dialect, "before", specials)

    def grammar(*allowed: str) -> str | None:
        named = [{"type": "function", "function": {"name": name}} for name in allowed]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        constraint = chat_tools(plain, choice, None).constraint(format, specials, None, head)
        return None if constraint is None else constraint.source.text

    plain = [{"type": "function", "function": {"name": n, "parameters": LOOK if n == "look" else None}} for n in NAMES]
    assert (grammar(*NAMES) is None) == (mode == "auto")
    if name == "glm4" and mode == "auto":  # nothing marks its calls: its reader knows them by their names
        assert grammar("look") is None
        return
    one, both = grammar("look"), grammar("go", "look")
    assert one is not None and both is not None
    assert follows(both, text) and not follows(both, text.replace("look", "jump"))
    assert follows(one, text) == (name == "openai") and not follows(one, text.replace("look", "go"))


@pytest.mark.parametrize("name", WRITTEN)
def test_optional_arguments_may_be_left_out(name: str) -> None:
    grammar = CallGrammar(FORMATS[name].layout, [("look", {**LOOK, "required": []})], {}, "").calls(several=False)
    empty = {
        "qwen3_coder": "<tool_call>\n<function=look>\n</function>\n</tool_call>",
        "glm45": "<tool_call>look\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n</invoke>\n</minimax:tool_call>',
        "seed_oss": "<seed:tool_call>\n<function=look>\n</function>\n</seed:tool_call>",
        "gemma4": "<|tool_call>call:look{}<tool_call|>",
    }
    layout = FORMATS[name].layout
    text = empty.get(name, f"{layout.before}look(){layout.after}")
    assert follows(f"start: calls\n{grammar}", text)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss", "gemma4"])
def test_a_text_that_is_one_of_a_few_is_held_to_them(name: str) -> None:
    """As Pydantic writes `Literal["a"]` and `Literal["a", "b"] | None`."""
    one, some = {"const": "a", "type": "string"}, {"anyOf": [{"enum": ["a", "b"], "type": "string"}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"one": one, "some": some, "bare": {"const": "1"}}}
    layout = FORMATS[name].layout
    grammar = CallGrammar(layout, [("look", schema)], {}, "").calls(several=False)
    left, middle, right = layout.argument if name != "gemma4" else ("", ':<|"|>', '<|"|>')
    null = [] if name == "gemma4" else [{"some": None}]
    for given in ({"one": "a"}, {"some": "b"}, {"one": "c"}, {"some": "c"}, {"bare": "1"}, {"bare": "2"}, *null):
        [(key, value)] = given.items()
        argument = f"{left}{key}{middle}{'null' if value is None else value}{right}"
        text = f"{layout.before}{layout.head.replace('{name}', 'look')}{argument}{layout.tail}{layout.after}"
        valid = value in {"one": "a", "some": ("a", "b", None), "bare": "1"}[key] if value else key == "some"
        assert follows(f"start: calls\n{grammar}", text) == valid
        tools = chat_tools([{"type": "function", "function": {"name": "look", "parameters": schema}}], "required", None)
        [[_, arguments]] = read(Dialect(None, FORMATS[name]).reader(tools.call_terms()), text, []).calls
        assert json.loads(arguments) == given


@pytest.mark.parametrize("name", FORMATS)
def test_names_of_functions_and_arguments_need_not_be_those_of_python(name: str) -> None:
    arguments = {"from": "a\\/b", "my-key": 1, "user id": True, "$class": "lambda"}
    properties = {key: {"const": value} for key, value in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    function = {"name": "brave-search.2", "parameters": schema}
    tools = chat_tools([{"type": "function", "function": function}], "required", False)
    layout = FORMATS[name].layout
    specials = SPECIALS if name == "openai" else {}
    constraint = tools.constraint(FORMATS[name], specials, None)
    if layout.arguments in ("tags", "gemma"):
        left, middle, right = layout.argument if name != "gemma4" else ("", ":", ",")
        quote = '<|"|>' if name == "gemma4" else ""
        texts = [f"{quote}a\\/b{quote}", "1", "true", f"{quote}lambda{quote}"]
        body = "".join(f"{left}{key}{middle}{text}{right}" for key, text in zip(arguments, texts, strict=True))
        head = layout.head.replace("{name}", "brave-search.2")
        text = layout.before + head + body.removesuffix(",") + layout.tail + layout.after
    elif name == "openai":
        text = written(name).partition("{")[0].replace("look", "brave-search.2") + json.dumps(arguments)
    else:
        text = layout.written([("brave-search.2", json.dumps(arguments))])
    assert constraint is not None and follows(constraint.source.text, text)
    found = read(Dialect(HARMONY if name == "openai" else None, FORMATS[name]).reader(tools.call_terms()), text, [])
    assert [(call, json.loads(given)) for call, given in found.calls] == [("brave-search.2", arguments)]


def test_a_schema_that_cannot_be_followed_is_left_to_its_own_trial() -> None:
    """Which names the function that it is of."""
    names = {"type": "object", "minProperties": 3}
    tools = chat_tools([{"type": "function", "function": {"name": "go", "parameters": names}}], "required", None)
    constraint = tools.constraint(FORMATS["hermes"], {}, None)
    assert constraint is not None and [part.param for part in constraint.parts] == ["tools[0].function.parameters"]


# --- thoughts before a grammar -----------------------------------------------------------------------------------

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


@pytest.mark.parametrize(
    "kind, source, answer",
    [
        ("json_schema", SCHEMA, '{"a": 1}'),
        ("regex", r"a/b\/[0-9]+", "a/b/12"),
        ("lark", 'start: "yes" | "no"', "no"),
    ],
)
def test_thoughts_come_before_what_is_held(kind: str, source: str, answer: str) -> None:
    dialect = Dialect("qwen3")
    inside, before = lead_of(dialect, "inside", {}), lead_of(dialect, "before", {})
    thought = 'I {weigh} "it".\n'
    assert follows(source, f"{thought}</think>\n\n{answer}", inside, kind)
    assert not follows(source, answer, inside, kind)
    assert follows(source, f"<think>{thought}</think>{answer}", before, kind)
    assert follows(source, answer, before, kind)
    assert not follows(source, f"{thought}</think>{answer}", before, kind)
    assert not follows(source, f"{thought}</think>\n\n{answer}!", inside, kind)
    assert lead_of(dialect, "said", {}) == "" == lead_of(Dialect(None), "before", {})


def test_harmony_thinks_and_says_or_calls() -> None:
    dialect = Dialect(HARMONY, FORMATS["openai"])
    lead, head = lead_of(dialect, "before", SPECIALS), content_head(dialect, "before", SPECIALS)
    thought = "<|channel|>analysis<|message|>I weigh it.<|end|><|start|>assistant"
    tools = chat_tools(TOOLS, "auto", None)
    constraint = tools.constraint(FORMATS["openai"], SPECIALS, None, head)
    assert constraint is not None
    for text in (written("openai"), "<|channel|>final<|message|>Yes."):
        assert follows(constraint.source.text, text, lead)
        assert follows(constraint.source.text, thought + text, lead)
    assert not follows(constraint.source.text, thought, lead)
    says = lead_of(dialect, "before", SPECIALS, head)
    for begin in ("", thought):
        assert follows('start: "yes"', f"{begin}<|channel|>final<|message|>yes", says)
    assert not follows('start: "yes"', f"{thought}yes", says)
    inside = lead_of(dialect, "inside", SPECIALS)
    assert follows(constraint.source.text, f"it.<|end|><|start|>assistant{written('openai')}", inside)


THOUGHT_END = SPECIALS[MARKS[0]]  # one token, as </think> is in most vocabularies


@pytest.mark.parametrize("mark", [None, MARKS[0]])
def test_thoughts_that_may_have_so_many_tokens(mark: str | None) -> None:
    """Each byte is a token. `mark`: one of the model's calls, which an answer may hold."""
    dialect, specials = Dialect("qwen3"), {} if mark is None else {MARKS[1]: SPECIALS[MARKS[1]]}
    limit = ThoughtLimit(8, THOUGHT_END)
    inside, before = (lead_of(dialect, stage, specials, limit=limit) for stage in ("inside", "before"))  # type: ignore[arg-type]
    free, first = free_answer(dialect, "inside", specials), free_answer(dialect, "before", specials)
    end, call = MARKS[0], MARKS[1] if mark else ""
    assert follows(free, f"I weigh.{end}\n\nYes.", inside) and follows(free, f"I{end}Yes {call}no", inside)
    assert not follows(free, f"I weigh it.{end}Yes.", inside)
    assert not follows(free, "I weigh", inside)
    assert follows(first, f"<think>I weigh.{end}Yes.", before) and follows(first, f"Yes <think> {call}", before)
    assert not follows(first, f"<think>I weigh it.{end}Yes.", before)
    assert not follows(first, "\n<think>I weigh it, and so on.", before)
    held = 'start: "yes"'
    assert follows(held, f"I weigh.{end}yes", inside) and not follows(held, f"I weigh.{end}no", inside)
