"""`tools` and `tool_choice` as Anthropic's clients send them."""

from __future__ import annotations

from typing import Any

from bequest.server.asks.messages import string_at, wrong_type
from bequest.server.asks.tools import Function, Tools, check_functions, function_of
from bequest.server.doors.messages.body import ConversingBody
from bequest.server.wire.errors import invalid, unsupported
from bequest.server.wire.reading import shorten

_LONGEST_NAME = 128  # Anthropic's; longer than OpenAI's
_CHOICES = ("auto", "any", "tool", "none")


def message_tools(body: ConversingBody) -> Tools:
    functions = tuple(_function(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or []))
    check_functions(functions)
    choice = body.tool_choice or {"type": "auto"}
    kind = choice.get("type")
    if kind not in _CHOICES:
        given = shorten(repr(kind))
        raise invalid(f"`tool_choice.type` must be one of {', '.join(_CHOICES)}, not {given}.", "tool_choice.type")
    if kind in ("any", "tool") and not functions:
        raise invalid("`tool_choice` needs `tools`: there is nothing to call.", "tool_choice")
    parallel = choice.get("disable_parallel_tool_use")
    if parallel is not None and not isinstance(parallel, bool):
        raise wrong_type("tool_choice.disable_parallel_tool_use", "true or false")
    if kind == "tool":
        forced = string_at(choice, "name", "tool_choice")
        if forced not in [function.name for function in functions]:
            message = f"`tool_choice.name` is '{shorten(forced)}', which is not among `tools`."
            raise invalid(message, "tool_choice.name")
        return Tools(functions, "required", frozenset((forced,)), parallel=False)
    if kind == "any":
        return Tools(functions, "required", parallel=not parallel)
    return Tools(functions, "none" if kind == "none" else "auto", parallel=not parallel)


def _function(tool: Any, path: str) -> Function:
    if not isinstance(tool, dict):
        raise wrong_type(path, "an object with `name` and `input_schema`")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise unsupported(
            f"{path}.type",
            f"`{path}.type` is {shorten(repr(kind))}; this server runs no tools of its own: describe the tool with "
            "`name`, `description` and `input_schema`, and run it yourself.",
        )
    return function_of(tool, path, "input_schema", _LONGEST_NAME)
