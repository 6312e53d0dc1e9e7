"""The Jinja environment chat templates are written for, bounded.

The filters, functions and whitespace rules are Hugging Face's, so that a model's template renders as it does there. A
template is foreign code, and a request may bring its own: the sandbox keeps it from Python's internals, and a budget of
steps (turns of loops, calls) and of output keeps it from running on. What a template can see are plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 200_000
MAX_OUTPUT_CHARS = 64 * 2**20
MAX_REPEATED_ITEMS = 1_000_000
# Names no template can spell, so that none can replace what they hold.
BUDGET = "step budget"
COUNTED = "counted turns"


class TemplateTooCostly(TemplateError):
    """The template does more than any chat template needs to."""


class StepBudget:
    """Counts the steps of one rendering."""

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TemplateTooCostly(f"the chat template runs for more than {MAX_STEPS:,} steps")


class GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model writes, for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        extensions = [GenerationBlocks, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_plain)
        self.filters["tojson"] = _to_json
        self.filters[COUNTED] = _counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def compile_bounded(self, source: str) -> Callable[[dict[str, Any]], str]:
        """A function from the template's variables to its text. Raises TemplateError."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, COUNTED, [], [], None, None)
        template = self.from_string(tree)

        def render(variables: dict[str, Any]) -> str:
            pieces: list[str] = []
            length = 0
            for piece in template.generate({**variables, BUDGET: StepBudget()}):
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise TemplateTooCostly(f"the chat template writes more than {MAX_OUTPUT_CHARS:,} characters")
                pieces.append(piece)
            return "".join(pieces)

        return render

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context[BUDGET].spend()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses the products and powers that would fill the memory in one step."""
        if operator == "**":
            raise SecurityError("powers are not available in chat templates")
        for sequence, times in ((left, right), (right, left)):
            repeats = isinstance(sequence, (str, list, tuple)) and isinstance(times, int)
            if repeats and len(sequence) * times > MAX_REPEATED_ITEMS:
                raise TemplateTooCostly(f"the chat template repeats a value to more than {MAX_REPEATED_ITEMS:,} items")
        return super().call_binop(context, operator, left, right)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget: StepBudget = context[BUDGET]
    for item in items:
        budget.spend()
        yield item


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own, does not escape HTML: models read JSON as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(value: Any) -> Any:
    """What a template may write. A function, a macro or a loop would come out as its address in memory."""
    if value is None or isinstance(value, str | int | float | list | tuple | dict | Undefined):
        return value
    raise SecurityError("a chat template writes text, numbers, lists and objects, and nothing else")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
