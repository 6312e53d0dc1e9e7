"""Chat templates that requests bring, rendered in a process of their own.

A template is a program. The sandbox (chat_sandbox.py) keeps it from Python's internals, but a few characters of it can
still take all memory (`x + x`, sixty times) or an hour of the interpreter (the square of a number, of that, and so on).
So a child process renders it: the kernel bounds its memory, and it is killed when its time is up. The model's own
template, which the operator chose, is rendered where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateSyntaxError

from bequest.engine.children import Children, TaskTooCostly, serve
from bequest.engine.errors import InvalidRequest, ModelError
from bequest.engine.text.chat import ChatTemplate, one_line

_MOST_BYTES = 512 << 20  # of the child's memory


class TemplateRenderer:
    """The processes. Used from worker threads, by as many as like."""

    def __init__(self, seconds: float) -> None:
        """`seconds` that a template may take; 0: none is taken."""
        self.seconds = seconds
        self._children = Children(__name__, seconds, _MOST_BYTES)

    def template(self, source: str, tokens: Mapping[str, str]) -> ForeignTemplate:
        """`tokens`: the model's `bos_token`, `eos_token` and the like."""
        return ForeignTemplate(self, source, tokens)

    def render(self, task: Mapping[str, Any]) -> str:
        """Raises InvalidRequest."""
        try:
            answer = self._children.ask(task)
        except TaskTooCostly:
            raise InvalidRequest(
                f"the chat template takes more than {self.seconds:g} seconds, or too much memory, to render",
                field="template",
            ) from None
        if "text" in answer:
            text: str = answer["text"]
            return text
        raise InvalidRequest(answer["error"], reason=answer["reason"], field=answer["field"], **answer["facts"])

    def close(self) -> None:
        self._children.close()


@dataclass(frozen=True, slots=True)
class ForeignTemplate:
    """A request's template: the same face as the model's own (chat.py)."""

    renderer: TemplateRenderer
    source: str
    tokens: Mapping[str, str]

    @property
    def tool_source(self) -> str:
        return self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Blocks until the child has answered: not for the event loop. Raises InvalidRequest."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return self.renderer.render(
            {
                "source": self.source,
                "tokens": dict(self.tokens),
                "messages": [dict(message) for message in messages],
                "options": {**options, "tools": None if tools is None else [dict(tool) for tool in tools]},
                "kwargs": dict(kwargs),
            }
        )


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    try:
        template = _compiled(task["source"], task["tokens"])
        return {"text": template.render(task["messages"], **task["options"], **task["kwargs"])}
    except InvalidRequest as error:
        return {"error": error.message, "reason": error.reason, "field": error.field, "facts": error.facts}


def _compiled(source: str, tokens: Mapping[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(source, **tokens)
    except ModelError as error:
        syntax = error.__cause__
        assert isinstance(syntax, TemplateSyntaxError)
        line, why = syntax.lineno, one_line(syntax.message or "")
        message = f"the chat template is not valid Jinja: line {line}: {why}"
        raise InvalidRequest(message, reason="template_invalid", field="template", line=line, why=why) from None
    except MemoryError:
        raise
    except RecursionError:
        raise InvalidRequest("the chat template is nested too deeply", field="template") from None
    except Exception as error:  # Jinja makes Python code of it, which Python may refuse in its own ways
        why = f"{type(error).__name__}: {one_line(str(error))}"
        raise InvalidRequest(f"the chat template cannot be compiled: {why}", field="template") from None


if __name__ == "__main__":
    serve(_answer)
