"""From what a body says of tools and formats to how its request is sampled and its answer read."""

from __future__ import annotations

from dataclasses import replace

from bequest.engine.text.tool_calls import FORMATS, ToolCallReader, ToolFormat, format_of_template
from bequest.engine.types import SamplingParams
from bequest.server.asks.constraints import check_alone
from bequest.server.asks.tools import Tools
from bequest.server.context import Context
from bequest.server.stores.grammars import Constraint
from bequest.server.wire.bodies import GenerationBody


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

    async def constrain(
        self, context: Context, body: GenerationBody, params: SamplingParams, answer: Constraint | None
    ) -> SamplingParams:
        """The parameters with the grammar that the answer has to follow, if any. `answer` is what the body asks for."""
        constraint = self.tools.constraint(self._format, self._special, answer)
        if constraint is not None:
            check_alone(body, constraint.param)
            params = replace(params, grammar=await context.grammars.compiled(constraint))
        # A mark that is a special token has to be seen to be read.
        return params if self._special is None else replace(params, skip_special_tokens=False)


def _format(context: Context, template: str | None) -> ToolFormat:
    named = context.config.tool_call_parser
    if named != "auto":
        return FORMATS[named]
    own = context.text.chat_template
    return format_of_template(template or (None if own is None else own.tool_source))
