"""The formats of tool calls, by name. docs/reasoning_and_tools.md shows what each looks like, and whose it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bequest.engine.dialects.call_reader import CallSyntax
from bequest.engine.dialects.gemma_calls import GemmaCalls
from bequest.engine.dialects.headed_calls import DEEPSEEK_HEAD, KIMI_HEAD, MISTRAL_HEAD, NAME_LINE, HeadedCalls
from bequest.engine.dialects.json_calls import JsonCalls
from bequest.engine.dialects.python_calls import PythonCalls
from bequest.engine.dialects.tag_calls import TagCalls
from bequest.engine.dialects.values import written

Arguments = Literal["json", "tags", "python", "gemma"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How calls look when they are written as the model was taught to.

    `head` has the places {name} and, in some, {index}. `each`: every call has `before` and `after` to itself, and
    `between` stands between those.
    """

    before: str
    head: str
    tail: str
    after: str
    between: str
    each: bool = True
    arguments: Arguments = "json"
    argument: tuple[str, str, str] = ("", "", "")  # of a tag: before the key, between it and its value, after that

    @property
    def can_write(self) -> bool:
        return self.arguments in ("json", "python")

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, by their names and their arguments as JSON. REQUIRES: can_write"""
        assert self.can_write
        bodies = [
            self.head.replace("{name}", name).replace("{index}", str(index)) + self._arguments(arguments) + self.tail
            for index, (name, arguments) in enumerate(calls)
        ]
        if self.each:
            return self.between.join(f"{self.before}{body}{self.after}" for body in bodies)
        return self.before + self.between.join(bodies) + self.after

    def _arguments(self, arguments: str) -> str:
        if self.arguments == "json":
            return arguments
        try:
            given = json.loads(arguments)
        except ValueError:
            return arguments  # a model may have written broken JSON
        if not isinstance(given, dict):
            return arguments
        return ", ".join(f"{key}={written(value)}" for key, value in given.items())


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`syntax` None: the calls are part of harmony, which has a reader of its own."""

    name: str
    syntax: CallSyntax | None
    layout: Layout

    @property
    def begins(self) -> tuple[str, ...]:
        return () if self.syntax is None else self.syntax.begins

    @property
    def marks(self) -> tuple[str, ...]:
        """Those of them that a reader looks for."""
        layout = self.layout
        return (*self.begins, *filter(None, (layout.before, layout.head, layout.tail, layout.after, layout.between)))


def _named(arguments: str, name: str = "name") -> str:
    return f'{{"{name}": "{{name}}", "{arguments}": '


_OBJECT = _named("arguments")
_MISTRAL = HeadedCalls(("[TOOL_CALLS]",), MISTRAL_HEAD, lists=True)
_DEEPSEEK = HeadedCalls(("<｜tool▁calls▁begin｜>",), DEEPSEEK_HEAD, end="<｜tool▁calls▁end｜>")
_QWEN_TAGS = TagCalls(
    begins=("<tool_call>", "<function="),
    end="</tool_call>",
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    call_end="</function>",
)
_GLM_TAGS = TagCalls(
    begins=("<tool_call>",),
    end="</tool_call>",
    name=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    call_end="</tool_call>",
)
_MINIMAX_TAGS = TagCalls(
    begins=("<minimax:tool_call>",),
    end="</minimax:tool_call>",
    name=('<invoke name="', '">'),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    call_end="</invoke>",
)
_SEED_TAGS = TagCalls(
    begins=("<seed:tool_call>",),
    end="</seed:tool_call>",
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    call_end="</function>",
)
_ALL = (
    CallFormat(
        "hermes",
        JsonCalls(("<tool_call>",), "</tool_call>"),
        Layout("<tool_call>\n", _OBJECT, "}", "\n</tool_call>", "\n"),
    ),
    CallFormat(
        "llama3_json",
        JsonCalls(("<|python_tag|>",), bare=True),
        Layout("", _named("parameters"), "}", "", "; ", each=False),
    ),
    CallFormat("mistral", _MISTRAL, Layout("[TOOL_CALLS] [", _OBJECT, "}", "]", ", ", each=False)),
    CallFormat("mistral_args", _MISTRAL, Layout("[TOOL_CALLS]", "{name}[ARGS]", "", "", "")),
    CallFormat(
        "granite",
        JsonCalls(("<|tool_call|>", "<tool_call>")),
        Layout("<|tool_call|>[", _OBJECT, "}", "]", ", ", each=False),
    ),
    CallFormat(
        "phi4_mini_json",
        JsonCalls(("<|tool_call|>", "functools["), "<|/tool_call|>"),
        Layout("<|tool_call|>[", _OBJECT, "}", "]<|/tool_call|>", ", ", each=False),
    ),
    CallFormat(
        "cohere_command3",
        JsonCalls(("<|START_ACTION|>",), "<|END_ACTION|>"),
        Layout(
            "<|START_ACTION|>[\n    ",
            '{"tool_call_id": "{index}", ' + _named("parameters", "tool_name")[1:],
            "}",
            "\n]<|END_ACTION|>",
            ",\n    ",
            each=False,
        ),
    ),
    CallFormat("glm4", HeadedCalls((), NAME_LINE, named=True), Layout("", "{name}\n", "", "", "\n")),
    CallFormat(
        "deepseek_v3",
        _DEEPSEEK,
        Layout(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
            "\n",
            each=False,
        ),
    ),
    CallFormat(
        "deepseek_v31",
        _DEEPSEEK,
        Layout(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
            "",
            each=False,
        ),
    ),
    CallFormat(
        "qwen3_coder",
        _QWEN_TAGS,
        Layout(
            "<tool_call>\n",
            "<function={name}>\n",
            "</function>",
            "\n</tool_call>",
            "\n",
            arguments="tags",
            argument=("<parameter=", ">\n", "\n</parameter>\n"),
        ),
    ),
    CallFormat(
        "glm45",
        _GLM_TAGS,
        Layout(
            "<tool_call>",
            "{name}\n",
            "",
            "</tool_call>",
            "\n",
            arguments="tags",
            argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    CallFormat(
        "minimax_m2",
        _MINIMAX_TAGS,
        Layout(
            "<minimax:tool_call>\n",
            '<invoke name="{name}">\n',
            "</invoke>\n",
            "</minimax:tool_call>",
            "",
            each=False,
            arguments="tags",
            argument=('<parameter name="', '">', "</parameter>\n"),
        ),
    ),
    CallFormat(
        "kimi_k2",
        HeadedCalls(("<|tool_calls_section_begin|>",), KIMI_HEAD, end="<|tool_calls_section_end|>"),
        Layout(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
            "",
            each=False,
        ),
    ),
    CallFormat(
        "seed_oss",
        _SEED_TAGS,
        Layout(
            "<seed:tool_call>\n",
            "<function={name}>\n",
            "</function>",
            "\n</seed:tool_call>",
            "\n",
            arguments="tags",
            argument=("<parameter=", ">", "</parameter>\n"),
        ),
    ),
    CallFormat(
        "pythonic",
        PythonCalls(("<|python_start|>",), bare=True),
        Layout("[", "{name}(", ")", "]", ", ", each=False, arguments="python"),
    ),
    CallFormat(
        "lfm2",
        PythonCalls(("<|tool_call_start|>",), "<|tool_call_end|>"),
        Layout("<|tool_call_start|>[", "{name}(", ")", "]<|tool_call_end|>", ", ", each=False, arguments="python"),
    ),
    CallFormat(
        "olmo3",
        PythonCalls(("<function_calls>",), "</function_calls>"),
        Layout("<function_calls>", "{name}(", ")", "</function_calls>", "\n", each=False, arguments="python"),
    ),
    CallFormat(
        "gemma3",
        PythonCalls(("```tool_code\n",), "\n```"),
        Layout("```tool_code\n", "{name}(", ")", "\n```", "\n", each=False, arguments="python"),
    ),
    CallFormat(
        "gemma4",
        GemmaCalls(),
        Layout("<|tool_call>", "call:{name}{", "}", "<tool_call|>", "", arguments="gemma"),
    ),
    CallFormat(
        "openai",
        None,
        Layout("<|channel|>", "commentary to=functions.{name} <|constrain|>json<|message|>", "", "", ""),
    ),
)
FORMATS = {format.name: format for format in _ALL}
# Other names of the same, as vLLM has them and as this server had.
_ALIASES = {
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "granite4": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
}
CALL_FORMATS: dict[str, CallFormat] = FORMATS | {alias: FORMATS[name] for alias, name in _ALIASES.items()}
