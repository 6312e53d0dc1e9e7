"""How the answers of one request are read, and what they are held to: thoughts, tools, formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from bequest.engine.constraints.grammar import GrammarSource
from bequest.engine.dialects.events import AnswerEvent, Content
from bequest.engine.dialects.reader import AnswerReader, Dialect
from bequest.engine.dialects.recognise import calls_of, reasoning_of
from bequest.server.asks.extension import Conversation
from bequest.server.asks.leads import ThoughtLimit, content_head, free_answer, lead_of, thought_marks
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.spoken import whole_message
from bequest.server.asks.tools import Tools
from bequest.server.context import Context
from bequest.server.interfaces import TokenizerLike
from bequest.server.stores.grammars import Constraint
from bequest.server.wire.errors import invalid, unsupported
from bequest.server.wire.reading import shorten

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # it knows three
_TAIL_TOKENS = 64  # of a prompt without a text, in which a mark is looked for


def check_effort(effort: str, param: str) -> None:
    if effort not in EFFORTS:
        raise invalid(f"`{param}` must be one of {', '.join(EFFORTS)}, not {shorten(repr(effort))}.", param)


class Reading:
    """Of one request. A model that shows no thoughts and has no tools to call writes text."""

    def __init__(self, context: Context, tools: Tools, template: str | None) -> None:
        """`template` is the client's own, if it sent one."""
        self.tools = tools
        self._tokenizer = context.text.tokenizer
        self._dialect = dialect_of(context, template)
        marks = self._dialect.marks(calls=tools.active)
        self._specials = _specials(self._tokenizer, marks)

    @property
    def shows_special(self) -> bool:
        """A mark that is a special token has to be seen to be read."""
        return bool(self._specials)

    @property
    def shows_thoughts(self) -> bool:
        return self._dialect.reasoning is not None

    def template_kwargs(
        self, effort: str | None, given: Mapping[str, Any] | None, param: str = "reasoning_effort"
    ) -> Mapping[str, Any] | None:
        """Variables for the chat template: what an effort means to those that know one, and what the client gives.

        Templates of models that may think or not have a variable for it, under one of two names.
        """
        if effort is None:
            return given
        check_effort(effort, param)
        thinks = effort != "none"
        level = _HARMONY_EFFORTS.get(effort, effort) if self._dialect.is_harmony else effort
        return {"reasoning_effort": level, "enable_thinking": thinks, "thinking": thinks, **(given or {})}

    def reader(self, prompt: Prompt) -> AnswerReader | None:
        """For one choice behind the prompt; None: the answer is its text."""
        reader = self._dialect.reader(self.tools.call_terms())
        if reader is not None and self.shows_thoughts:
            reader.prime(_begun(self._dialect, self._tokenizer, prompt))
        return reader

    def message(self, answer: str, prompt: Prompt) -> dict[str, Any]:
        """An answer behind the prompt, as a message to a template."""
        reader = self.reader(prompt)
        events: list[AnswerEvent] = [Content(answer)] if reader is None else [*reader.feed(answer), *reader.finish()]
        return {"role": "assistant", **whole_message(events)}

    def constraint(
        self, answer: Constraint | None, prompt: Prompt, most_thoughts: int | None = None
    ) -> Constraint | None:
        """What the answer behind the prompt has to follow, if anything. `answer` is what the body asks for, and
        `most_thoughts` the tokens that thoughts may have."""
        dialect, specials = self._dialect, self._specials
        reader = self.reader(prompt) if self.shows_thoughts else None
        stage = "said" if reader is None else reader.stage
        head = content_head(dialect, stage, specials)
        held = self.tools.constraint(dialect.calls, specials, answer, head)
        limit = None if most_thoughts is None or stage == "said" else self._limit(most_thoughts)
        if held is None and limit is not None:
            free = GrammarSource("lark", free_answer(dialect, stage, specials))
            held = Constraint(free, "thinking", "The limit of thoughts cannot be held")
        if held is None:
            return None
        lead = lead_of(dialect, stage, specials, head if held is answer else "", limit)
        return replace(held, source=replace(held.source, lead=lead)) if lead else held

    def _limit(self, num_tokens: int) -> ThoughtLimit:
        """Thoughts are ended with one token: what ends them is not looked for in the middle of a text."""
        _, end = thought_marks(self._dialect)
        ids = self._tokenizer.encode(end, add_special_tokens=False)
        if len(ids) != 1:
            raise unsupported(
                "thinking.budget_tokens",
                f"Thoughts of this model end with the text {end!r}, which is no single token: their number cannot be "
                'limited. Use `thinking: {"type": "adaptive"}`, and `max_tokens` for all of the answer.',
            )
        return ThoughtLimit(num_tokens, ids[0])


def dialect_of(context: Context, template: str | None = None) -> Dialect:
    """The model's, as its template shows it or as a flag says. `template`: a client's own."""
    config, own = context.config, context.text.chat_template
    plain, with_tools = (template, template) if template or own is None else (own.source, own.tool_source)
    named = config.reasoning_parser
    reasoning = reasoning_of(plain, named) or reasoning_of(with_tools, named)
    return Dialect(reasoning, calls_of(with_tools, config.tool_call_parser))


def _specials(tokenizer: TokenizerLike, marks: Iterable[str]) -> dict[str, int]:
    """The special tokens in the marks, by their text: bytes cannot spell them."""
    ids = {token for mark in marks for token in tokenizer.encode(mark, add_special_tokens=False)}
    return {tokenizer.token_text(token): token for token in ids if token in tokenizer.special_ids}


def _begun(dialect: Dialect, tokenizer: TokenizerLike, prompt: Prompt) -> str:
    """What the prompt holds of the answer's turn, as far as its reader has to know."""
    origin = prompt.origin
    if not isinstance(origin, Conversation):
        return dialect.opening(tokenizer.decode(prompt.said_ids[-_TAIL_TOKENS:], skip_special_tokens=False))
    begun = dialect.opening(origin.prompt_text)
    if origin.answer_at is not None:
        return begun + tokenizer.decode(prompt.token_ids[origin.answer_at :], skip_special_tokens=False)
    if origin.continued and not begun:
        content = origin.messages[-1]["content"]
        said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        return dialect.spoken(said)
    return begun
