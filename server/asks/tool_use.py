"""From what a body says of tools and formats to how its request is sampled and its answer read."""

from __future__ import annotations

from bequest.engine.text.tool_calls import FORMATS, ToolCallReader, ToolFormat, format_of_template
from bequest.server.asks.tools import Tools
from bequest.server.context import Context
from bequest.server.stores.grammars import Constraint


class Calls:
    """The calls in the answers of one request: none, where it has no tools."""

    def __init__(self, context: Context, tools: Tools, template: str | None) -> None:
        """`template` is the client's own, if it sent one."""
        self.tools = tools
        self._format = _format(context, template)
        tokenizer = context.text.tokenizer
        ids = tokenizer.encode(self._format.begin, add_special_tokens=False) if tools.active else []
        hidden = len(ids) == 1 and not tokenizer.decode(ids, skip_special_tokens=True)
        self._special = ids[0] if hidden else None

    def reader(self) -> ToolCallReader | None:
        """For one choice."""
        return self.tools.reader(self._format)

    @property
    def shows_special(self) -> bool:
        """A mark that is a special token has to be seen to be read."""
        return self._special is not None

    def constraint(self, answer: Constraint | None) -> Constraint | None:
        """What the answer has to follow, if anything. `answer` is what the body asks for."""
        return self.tools.constraint(self._format, self._special, answer)


def _format(context: Context, template: str | None) -> ToolFormat:
    named = context.config.tool_call_parser
    if named != "auto":
        return FORMATS[named]
    own = context.text.chat_template
    return format_of_template(template or (None if own is None else own.tool_source))
