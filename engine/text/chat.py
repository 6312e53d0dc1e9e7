"""Messages to the one text a chat model was trained on, by the model's own template.

The text holds the model's special tokens, BOS included where the model has one: tokenise it without adding any.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from bequest.engine.dialects.recognise import calls_of
from bequest.engine.errors import InvalidRequest, ModelError
from bequest.engine.text.chat_sandbox import ChatEnvironment
from bequest.engine.text.tool_prompt import spelled_out, with_calls_spelled_out

Message = Mapping[str, Any]
_LONGEST_REASON = 300  # characters of what a template says for itself
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Older names of the field, beside the one that most templates read.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class ChatTemplate:
    """A model's template. `tool_source` is the one for requests with tools, where the model has a separate one.
    `others`: tokens with other roles, by the names that templates have for them."""

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        tool_source: str | None = None,
        **others: str,
    ) -> None:
        self.source = source
        self.tool_source = tool_source or source
        ends = (("bos_token", bos_token), ("eos_token", eos_token))
        self.tokens = others | {name: token for name, token in ends if token is not None}
        try:
            self._template = _compiled(source)
            self._tool_template = _compiled(tool_source) if tool_source else self._template
        except TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. `kwargs` are further variables for the template.

        `continue_final_message` leaves the last message open, for the model to go on with it. Raises InvalidRequest.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message goes on with the last message, so it needs add_generation_prompt: false",
                field="continue_final_message",
            )
        compiled = self._tool_template if tools else self._template
        if not compiled.knows_tools and (tools or not compiled.knows_calls):
            messages = spelled_out(messages, tools or ())
        elif not compiled.knows_calls:
            messages = with_calls_spelled_out(messages, compiled.layout)
        prepared = [_prepare(message, compiled) for message in messages]
        end_mark = _mark_end(prepared) if continue_final_message else None
        variables = {
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            **self.tokens,
            **kwargs,
            "messages": prepared,
            "add_generation_prompt": add_generation_prompt,
        }
        text = _render(compiled, variables)
        return text if end_mark is None else _cut_at(text, end_mark)


class _Compiled:
    """A template ready to render, and what its source says about the messages it expects."""

    def __init__(self, environment: ChatEnvironment, source: str) -> None:
        self.render: Callable[[dict[str, Any]], str] = environment.compile_bounded(source)
        self.knows_developer = "developer" in source
        self.knows_tools = "tools" in source
        self.knows_calls = "tool_calls" in source
        self.layout = calls_of(source).layout
        self.reads_parts = any(map(_reads_content, environment.parse(source).find_all(nodes.For)))
        self.needs_parts = self.reads_parts and "is string" not in source
        # Mistral's: thoughts are parts of the content.
        self.thinks_in_parts = self.reads_parts and "[THINK]" in source


@functools.lru_cache(8)
def _compiled(source: str) -> _Compiled:
    """Kept: a template takes milliseconds to compile, and models that are loaded again have the same one."""
    return _Compiled(ChatEnvironment(), source)


def _reads_content(loop: nodes.For) -> bool:
    """Whether a loop goes over the parts of a message's content, however the template calls it."""
    iterated: nodes.Node | None = loop.iter
    while isinstance(iterated, nodes.Filter):
        iterated = iterated.node
    if isinstance(iterated, nodes.Getitem):
        return isinstance(iterated.arg, nodes.Const) and iterated.arg.value == "content"
    name = iterated.attr if isinstance(iterated, nodes.Getattr) else getattr(iterated, "name", None)
    return name == "content"


def _prepare(message: Message, template: _Compiled) -> dict[str, Any]:
    """A message as templates expect it; the caller's is left alone."""
    prepared = dict(message)
    prepared["content"] = _prepare_content(message.get("content"), template)
    if prepared.get("role") == "developer" and not template.knows_developer:
        prepared["role"] = "system"
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is not None:
        prepared |= {"reasoning_content": reasoning, "thinking": message.get("thinking") or reasoning}
        if template.thinks_in_parts:
            prepared["content"] = _with_thoughts(prepared["content"], reasoning)
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_prepare_tool_call(call) for call in message["tool_calls"]]
    return prepared


def _prepare_content(content: Any, template: _Compiled) -> Any:
    """Parts for a template that reads parts, one string for all others.

    Only text parts come here, and every template of a text model takes a string, so joining them (by a newline, as
    vLLM does) is always understood. A template that goes over the parts itself knows better how to join them; if it
    never asks whether the content is a string, it would go over a string's characters, so it gets a list even for one.
    """
    if content is None:
        content = ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if template.needs_parts else content
    if template.reads_parts:
        return [dict(part) for part in content]
    return "\n".join(part.get("text", "") for part in content)


def _with_thoughts(content: Any, reasoning: str) -> list[dict[str, Any]]:
    said = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return [{"type": "thinking", "thinking": reasoning}, *said]


def _prepare_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """The API has a call's arguments as JSON text; templates use `tojson` on them, which would quote the text again."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _render(template: _Compiled, variables: dict[str, Any]) -> str:
    try:
        return template.render(variables)
    except TemplateError as error:
        why = one_line(str(error.message))
        raise InvalidRequest(f"the chat template refuses these messages: {why}", field="messages") from error
    except RecursionError as error:
        raise InvalidRequest("the chat template calls itself without end", field="messages") from error
    except MemoryError:
        raise  # of a process that has nothing to lose (foreign_template.py)
    except Exception as error:  # a template runs expressions, which can fail in any way
        why = f"{type(error).__name__}: {one_line(str(error))}"
        raise InvalidRequest(f"the chat template fails on these messages: {why}", field="messages") from error


def one_line(message: str) -> str:
    """What a template says, as part of a sentence: short, without line breaks, and without addresses of objects."""
    return _ADDRESS.sub("", " ".join(message[: 2 * _LONGEST_REASON].split()))[:_LONGEST_REASON]


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Puts a mark at the end of the last message's content, to find that place again in the rendered text.

    The space after the mark tells whether the template trims the content: then it would have trimmed the message too.
    """
    if not messages:
        raise InvalidRequest("continue_final_message needs a message to continue", field="messages")
    mark = f"END-{secrets.token_hex(16)} "
    last = messages[-1]
    if isinstance(last["content"], list):
        if not last["content"]:
            raise InvalidRequest("continue_final_message: the last message has no content", field="messages")
        part = last["content"][-1]
        part["text"] = part.get("text", "") + mark
    else:
        last["content"] += mark
    return mark


def _cut_at(text: str, mark: str) -> str:
    position = text.rfind(mark.rstrip())
    if position < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template leaves out the last message's content", field="messages"
        )
    trimmed = not text.startswith(mark, position)
    return text[:position].rstrip() if trimmed else text[:position]
