"""Tool calls read out of answers: every format, cut anywhere."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from bequest.engine.config import ToolCallParser
from bequest.engine.dialects.call_reader import CallReader
from bequest.engine.dialects.events import CallArguments, CallBegun, Content
from bequest.engine.dialects.formats import CALL_FORMATS, FORMATS
from bequest.engine.dialects.recognise import calls_of
from bequest.engine.text.chat import ChatTemplate

FUNCTIONS = {
    "f": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}}},
    "g": {"properties": {}},
}
JSON_FORMATS = [name for name, format in FORMATS.items() if format.layout.arguments == "json" and format.syntax]
TWO = [["f", '{"a": 1}'], ["g", "{}"]]
CASES: list[tuple[str, str, str, list[list[str]]]] = [
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"", "b": [1, {"c": 2}]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "g"}</tool_call>',
        "Sure.",
        [["f", '{"a": "}\\"", "b": [1, {"c": 2}]}'], ["g", "{}"]],
    ),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name":"g"}]</tool_call>', "", TWO),
    ("hermes", "no call <tool here < tool_call> x  ", "no call <tool here < tool_call> x  ", []),
    ("hermes", 'a <tool_call>{"foo": 1}</tool_call> b', 'a {"foo": 1} b', []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", [["f", '{"a": 1']]),
    ("hermes", '<tool_call>\n{"name": "f", "argu', "", [["f", ""]]),
    ("hermes", "<tool_call>[]</tool_call>ok", "ok", []),
    ("hermes", "<tool_call>]] ]x", "x", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", TWO),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
    ("llama3_json", 'Hello {"name": "f"}', 'Hello {"name": "f"}', []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", ' {"name": "f", "parameters": "{\\"a\\": 1}"}', "", [["f", '{"a": 1}']]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", TWO),
    ("mistral", "text [TOOL", "text [TOOL", []),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', "", TWO),
    ("mistral_args", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', "", TWO),
    ("mistral_args", '[TOOL_CALLS]f{"a": "}\\"{"} tail', " tail", [["f", '{"a": "}\\"{"}']]),
    ("mistral_args", "[TOOL_CALLS]f[ARGS]{", "", [["f", "{"]]),
    ("mistral_args", "[TOOL_CALLS]no call at all", "[TOOL_CALLS]no call at all", []),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", TWO),
    ("granite", '<|tool_call|>[{"name": "g"}], [1] and {"name": "f"}', ', [1] and {"name": "f"}', TWO[1:]),
    ("mistral", '[TOOL_CALLS] [{"name": "g"}]\n[{"name": "f"}]', '[{"name": "f"}]', TWO[1:]),
    ("granite", '<|tool_call|>[{"name": "g"}]\r\n then', "then", TWO[1:]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}, "parameters": {}, "name": "f"}</tool_call>', "", TWO[1:]),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', "", TWO),
    ("phi4_mini_json", "use functools for that", "use functools for that", []),
    ("glm4", 'f\n{"a": 1}\ng\n{}', "", TWO),
    ("glm4", 'f\nis a function {"a": 1}', 'f\nis a function {"a": 1}', []),
    ("glm4", 'h\n{"a": 1}', 'h\n{"a": 1}', []),
    ("glm4", 'f\n{"a": 1}\nDone.', "\nDone.", TWO[:1]),
    (
        "deepseek_v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Sure.",
        TWO,
    ),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1', "", [["f", '{"a": 1']]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>?", "<｜tool▁calls▁begin｜>?", []),
    (
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n\n x </p>\n\n</parameter>\n"
        "</function>\n</tool_call>\n<function=g>\n</function>",
        "Sure.",
        [["f", '{"a": 1, "b": "\\n x </p>\\n"}'], ["g", "{}"]],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=c>\n{'x': None}\n</parameter></function>",
        "",
        [["f", '{"c": {"x": null}}']],
    ),
    ("qwen3_coder", "<function=f><parameter=a>x</parameter></function> ok", " ok", [["f", '{"a": "x"}']]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=b>\nso far", "", [["f", '{"b": "so far']]),
    ("qwen3_coder", "<tool_call>plain</tool_call>", "<tool_call>plain</tool_call>", []),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><tool_call>g</tool_call>", "", TWO),
    ("glm45", "<tool_call>f\n<arg_key>b</arg_key>\n<arg_value></arg_value>\n</tool_call>", "", [["f", '{"b": ""}']]),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ("minimax_m2", '<minimax:tool_call><invoke name="g"></invoke></minimax:tool_call>ok', "ok", [["g", "{}"]]),
    ("pythonic", "[f(a=1), g()]", "", TWO),
    ("pythonic", " [f(1, b='x]', c=[True, null])]", "", [["f", '{"a": 1, "b": "x]", "c": [true, null]}']]),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[f(a=import)] no", "[f(a=import)] no", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic", "[f(a=1", "[f(a=1", []),
    ("olmo3", "Sure. <function_calls>f(a=1)\ng()</function_calls>", "Sure.", TWO),
    ("olmo3", "<function_calls>f(**x)</function_calls>", "<function_calls>f(**x)</function_calls>", []),
    (
        "pythonic",
        '[brave-search.2(from="x=(y)", my-key=1)]',
        "",
        [["brave-search.2", '{"from": "x=(y)", "my-key": 1}']],
    ),
    ("lfm2", "<|tool_call_start|>[g-2()]<|tool_call_end|>", "", [["g-2", "{}"]]),
    # What JSON escapes and Python does not, and the halves of a character, of which one alone is none.
    ("pythonic", r'[f(b="a\/b \\/ \ud83d\ude00 \ud83d")]', "", [["f", r'{"b": "a/b \\/ 😀 �"}']]),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
    ("hermes", r'<tool_call>{"name": "\ud83d", "arguments": "{\"a\": \"\ud83d\"}"}', "", [["�", '{"a": "�"}']]),
    ("hermes", f'<tool_call>{{"name": {"[" * 9999}{"]" * 9999}}}</tool_call>', "", [["[" * 9999 + "]" * 9999, "{}"]]),
    ("gemma4", r'<|tool_call>call:f{b:"\ud83d",a:1e999}<tool_call|>', "", [["f", '{"b": "�", "a": "1e999"}']]),
    ("qwen3_coder", "<function=f><parameter=c>\n1e999\n</parameter></function>", "", [["f", '{"c": 1e999}']]),
    ("qwen3_coder", r'<function=f><parameter=c>"\ud83d"</parameter></function>', "", [["f", '{"c": "�"}']]),
    (
        "qwen3_coder",
        f"<function=f><parameter=c>{'[' * 9999}</parameter></function>",
        "",
        [["f", f'{{"c": "{"[" * 9999}"}}']],
    ),
    ("gemma3", "```tool_code\nprint(f(a=1))\n```", "", TWO[:1]),
    ("gemma3", "```python\nf(a=1)\n```", "```python\nf(a=1)\n```", []),
    ("gemma4", "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>", "", TWO),
    (
        "gemma4",
        '<|tool_call>call:f{b:<|"|>x},<|"|>,c:{d:[<|"|>y<|"|>,-1.5,true]}}<tool_call|>',
        "",
        [["f", '{"b": "x},", "c": {"d": ["y", -1.5, true]}}']],
    ),
    ("gemma4", "<|tool_call>call:f{a:<tool_call|>", "<|tool_call>call:f{a:<tool_call|>", []),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
        "",
        [["f", "{"]],
    ),
]


def read(
    name: str, text: str, cuts: list[int], most: int | None = None, only_calls: bool = False
) -> tuple[str, list[list[str]]]:
    reader = CallReader(FORMATS[name].syntax, FUNCTIONS, most, only_calls)
    events = [event for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for event in reader.feed(text[a:b])]
    calls: list[list[str]] = []
    content = ""
    for event in [*events, *reader.finish()]:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return content, calls


@pytest.mark.parametrize("name, text, content, calls", CASES)
def test_calls_cut_anywhere(name: str, text: str, content: str, calls: list[list[str]]) -> None:
    assert read(name, text, []) == (content, calls)
    draw = random.Random(text)
    for _ in range(200):
        cuts = sorted(draw.sample(range(len(text) + 1), draw.randint(0, len(text))))
        assert read(name, text, cuts) == (content, calls), cuts
    assert read(name, text, [], most=1)[1] == calls[:1]


@pytest.mark.parametrize("text", ['so {"name": "g"}', ', {"name": "g"}'])
def test_an_answer_held_to_calls_that_does_not_begin_with_one_has_none_however_it_is_cut(text: str) -> None:
    """Where a call needs no mark."""
    for cuts in ([], list(range(1, len(text)))):
        assert read("llama3_json", text, cuts, only_calls=True) == ("", [])


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_what_is_written_is_read(name: str) -> None:
    calls = [["f", '{"a": [1, "x"]}'], ["g", "{}"]]
    assert read(name, FORMATS[name].layout.written([(a, b) for a, b in calls]), []) == ("", calls)


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_an_answer_held_to_calls_has_no_content_wherever_it_ends(name: str) -> None:
    text = FORMATS[name].layout.written([("f", '{"a": 1}'), ("g", "{}")])
    for end in range(len(text)):
        content, calls = read(name, text[:end], [], only_calls=True)
        assert content == "" and [call[0] for call in calls] == ["f", "g"][: len(calls)]
        assert all('{"a": 1}'.startswith(call[1]) or call[1] == "{}" for call in calls)


@pytest.mark.parametrize("name", [name for name in JSON_FORMATS if name not in ("glm4", "llama3_json")])
def test_a_later_call_that_is_cut_is_no_content(name: str) -> None:
    """Behind a whole call, what a mark begins is a part of another one. (Calls of two formats need no mark.)"""
    first, second = ("f", '{"a": 1}'), ("g", "{}")
    layout, begins = FORMATS[name].layout, FORMATS[name].syntax.begins
    text = layout.written([first, second])
    for end in range(len(layout.written([first])), len(text)):
        content, calls = read(name, text[:end], [])
        in_mark = any(mark.startswith(content.strip()) and content.strip() != mark for mark in begins)
        assert calls[0] == [*first] and (not content or in_mark), text[:end]


def test_flags_and_formats_have_the_same_names() -> None:
    assert set(get_args(ToolCallParser)) == {"auto", *CALL_FORMATS}


def test_formats_of_templates() -> None:
    sources = {
        "hermes": "{% if tools %}<tool_call>{% endif %}",
        "mistral": "{{ tools }}{{ '[TOOL_CALLS]' }}",
        "llama3_json": "<|start_header_id|>{{ tools }}",
    }
    for name, source in sources.items():
        assert calls_of(source) is FORMATS[name]
    assert calls_of(None) is FORMATS["hermes"]


PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def test_a_template_without_tools_is_told_of_them() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "there"},
    ]
    text = ChatTemplate(PLAIN).render(messages, tools=[tool])
    assert text.startswith("[system]Be brief.\n\n") and '"name": "look"' in text
    assert '[assistant]<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>[tool]there' in text
    assert ChatTemplate(PLAIN).render(messages[1:2], tools=[tool]).startswith("[system]You may call functions")
    assert ChatTemplate(PLAIN).render(messages[:2]) == "[system]Be brief.[user]Where?"
