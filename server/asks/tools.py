"""`tools`, `tool_choice`, `parallel_tool_calls`: what a model may call, what it must, and how that is held to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import orjson

from bequest.engine.constraints.grammar import GrammarSource
from bequest.engine.dialects.formats import CallFormat
from bequest.engine.dialects.reader import CallTerms
from bequest.server.asks.constraints import json_schema
from bequest.server.asks.messages import string_at, wrong_type
from bequest.server.asks.tool_grammars import CallGrammar, Specials, compact
from bequest.server.stores.grammars import Constraint
from bequest.server.wire.errors import ApiError, invalid, missing, unsupported
from bequest.server.wire.reading import shorten

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LONGEST_NAME = 64
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Function:
    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool
    param: str  # where its schema stands in the body

    @cached_property
    def schema(self) -> Constraint:
        """Of its parameters. Raises 400 for what is none to follow."""
        return json_schema(self.parameters, self.name, self.param, "function")

    def as_tool(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class Tools:
    """What a body says of tools. Without functions, or with the choice "none", an answer is text."""

    functions: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    allowed: frozenset[str] | None = None  # the names that may be called; None: all of them
    parallel: bool = True

    @property
    def active(self) -> bool:
        return bool(self.functions) and self.choice != "none"

    @property
    def _callable(self) -> list[Function]:
        return [f for f in self.functions if self.allowed is None or f.name in self.allowed]

    def for_template(self) -> list[dict[str, Any]] | None:
        """All of them, whatever is allowed: so prompts that allow others share what is cached of their beginnings."""
        return [function.as_tool() for function in self.functions] if self.active else None

    def call_terms(self) -> CallTerms | None:
        """What an answer may call; None: nothing."""
        if not self.active:
            return None
        functions = {function.name: function.parameters for function in self._callable}
        return CallTerms(functions, None if self.parallel else 1, only_calls=self.choice == "required")

    def constraint(
        self, format: CallFormat, specials: Specials, answer: Constraint | None, content_head: str = ""
    ) -> Constraint | None:
        """The grammar of an answer that must be calls, or whose calls must be well-formed; else `answer`, the one that
        the body asks for. It says what text looks like, so that an answer of calls has nothing to do with it.

        `specials`: those of the format's marks that are special tokens. `content_head`: what a model writes before
        content, as Lark, where it writes something.
        """
        if not self.active:
            return answer
        functions = self._callable
        schemas = [function.schema for function in functions]  # of those, too, that are not held to theirs
        called = [(function.name, function.parameters) for function in functions]
        mark = next((mark for mark in format.begins if format.layout.before.startswith(mark)), "")
        written = CallGrammar(format.layout, called, specials, mark)
        grammar = self._grammar(written, answer, content_head, several=format.syntax is not None)
        if grammar is None:
            return answer
        parts = (*schemas, answer) if answer is not None and self.choice != "required" else (*schemas,)
        return Constraint(GrammarSource("lark", grammar), "tools", "Invalid `tools`", parts)

    def _grammar(self, written: CallGrammar, answer: Constraint | None, content_head: str, several: bool) -> str | None:
        """`several`: an answer can hold more than one call. None: the calls need none."""
        several = several and self.parallel
        if self.choice == "required":
            return f"start: calls\n{written.calls(several)}"
        if answer is not None and answer.source.kind == "json_schema":
            schema = compact(orjson.loads(answer.source.text))
            return f"start: calls | answer\nanswer: {content_head} %json {schema}\n{written.calls(several)}"
        some = len(self._callable) < len(self.functions)
        if answer is not None or not (some or any(function.strict for function in self.functions)):
            return None
        if content_head:
            return f"start: calls | {content_head} TEXT\nTEXT: /(.|\\n)*/\n{written.calls(several)}"
        return written.text_with_calls()


def chat_tools(given: list[Any] | None, choice: Any, parallel: bool | None) -> Tools:
    """Of a chat body, where a tool is `{"type": "function", "function": {…}}`."""
    return _tools([_nested(tool, f"tools[{i}]") for i, tool in enumerate(given or [])], choice, parallel, "function")


def response_tools(given: list[Any] | None, choice: Any, parallel: bool | None) -> Tools:
    """Of a response body, where a tool is `{"type": "function", "name": …}`."""
    return _tools([_flat(tool, f"tools[{i}]") for i, tool in enumerate(given or [])], choice, parallel, None)


def check_functions(functions: Sequence[Function]) -> None:
    if len(functions) > MAX_TOOLS:
        raise invalid(f"`tools` may hold {MAX_TOOLS} functions at most, not {len(functions)}.", "tools")
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"`tools[{index}]` has the name '{name}' of an earlier one.", f"tools[{index}]")


def _tools(functions: Sequence[Function], choice: Any, parallel: bool | None, nested: str | None) -> Tools:
    """`nested` is the field of a tool that has its name; None: the tool itself has it."""
    check_functions(functions)
    names = [function.name for function in functions]
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            mode, allowed = _allowed(choice, names, nested)
            return Tools(tuple(functions), mode, allowed, parallel is not False)
        forced = _forced(choice, nested)
        if forced not in names:
            raise invalid(f"`tool_choice` names '{shorten(forced)}', which is not among `tools`.", "tool_choice")
        return Tools(tuple(functions), "required", frozenset((forced,)), parallel=False)
    if choice is not None and choice not in _CHOICES:
        options = ", ".join(f"'{name}'" for name in _CHOICES)
        message = f"`tool_choice` must be {options} or name a function, not {shorten(repr(choice))}."
        raise invalid(message, "tool_choice")
    if choice == "required" and not functions:
        raise invalid("`tool_choice` needs `tools`: there is nothing to call.", "tool_choice")
    return Tools(tuple(functions), choice or "auto", parallel=parallel is not False)


def _forced(choice: dict[str, Any], nested: str | None) -> str:
    if choice.get("type") != "function":
        kind = shorten(repr(choice.get("type")))
        message = f"`tool_choice.type` must be 'function' or 'allowed_tools', not {kind}."
        raise unsupported("tool_choice.type", message)
    return _name_at(choice, "tool_choice", nested)[0]


def _allowed(
    choice: dict[str, Any], names: Sequence[str], nested: str | None
) -> tuple[Literal["auto", "required"], frozenset[str]]:
    """Where tools are nested, what is allowed is so, too."""
    place = "tool_choice" if nested is None else "tool_choice.allowed_tools"
    holder = choice if nested is None else choice.get("allowed_tools")
    if not isinstance(holder, dict):
        raise missing(place, f"`{place}` is missing: an object with `mode` and `tools`.")
    mode = string_at(holder, "mode", place)
    if mode not in ("auto", "required"):
        raise invalid(f"`{place}.mode` must be 'auto' or 'required', not {shorten(repr(mode))}.", f"{place}.mode")
    place = f"{place}.tools"
    tools = holder.get("tools")
    if tools is None:
        raise missing(place, f"`{place}` is missing: a list of functions among `tools`.")
    if not isinstance(tools, list):
        raise wrong_type(place, "a list")
    if not tools:
        raise invalid(f"`{place}` must name a function or more; where none may be called use 'none'.", place)
    allowed = frozenset(_among(names, tool, f"{place}[{i}]", nested) for i, tool in enumerate(tools))
    return "auto" if mode == "auto" else "required", allowed


def _among(names: Sequence[str], tool: Any, path: str, nested: str | None) -> str:
    _check_kind(tool, path)
    name, place = _name_at(tool, path, nested)
    if name not in names:
        raise invalid(f"`{place}` is '{shorten(name)}', which is not among `tools`.", place)
    return name


def _name_at(given: dict[str, Any], path: str, nested: str | None) -> tuple[str, str]:
    """The name, and where it stands."""
    holder = given if nested is None else given.get(nested)
    place = path if nested is None else f"{path}.{nested}"
    if not isinstance(holder, dict):
        raise missing(place, f"`{place}` is missing: an object with `name`.")
    return string_at(holder, "name", place), f"{place}.name"


def _nested(tool: Any, path: str) -> Function:
    _check_kind(tool, path)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong_type(f"{path}.function", "an object with `name` and `parameters`")
    return function_of(function, f"{path}.function")


def _flat(tool: Any, path: str) -> Function:
    _check_kind(tool, path)
    return function_of(tool, path)


def _check_kind(tool: Any, path: str) -> None:
    if not isinstance(tool, dict):
        raise wrong_type(path, "an object with `type`")
    kind = tool.get("type")
    if kind != "function":
        message = f"`{path}.type` is {shorten(repr(kind))}; this server knows tools of the type 'function' alone."
        raise unsupported(f"{path}.type", message)


def function_of(
    given: Mapping[str, Any], path: str, schema: str = "parameters", longest_name: int = _LONGEST_NAME
) -> Function:
    """`schema` is the field that has the schema of its arguments."""
    name = string_at(dict(given), "name", path)
    if not _NAME.fullmatch(name) or len(name) > longest_name:
        allowed = f"1 to {longest_name} letters, digits, '_', '-' or '.'"
        raise invalid(f"`{path}.name` must have {allowed}, not {shorten(repr(name))}.", f"{path}.name")
    description = given.get("description")
    if description is not None and not isinstance(description, str):
        raise wrong_type(f"{path}.description", "a string")
    parameters = given.get(schema)
    if parameters is None:  # it takes nothing
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise ApiError(
            400,
            "invalid_json_schema",
            f"Invalid schema for function '{name}': `{path}.{schema}` must be an object.",
            param=f"{path}.{schema}",
        )
    strict = given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type(f"{path}.strict", "true or false")
    return Function(name, description, parameters, strict is True, f"{path}.{schema}")
