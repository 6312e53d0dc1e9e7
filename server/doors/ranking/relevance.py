"""By log-probability: the model is asked whether a document answers a query, and the score is how sure it is of yes.

The score is p(yes) / (p(yes) + p(no)), of the tokens that would come first in its answer. Nothing is sampled. The query
stands before the document, so that all documents of a request share the beginning of their prompts in the cache.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from msgspec import structs

from bequest.engine.errors import context_exceeded
from bequest.engine.types import OutputMode, Usage
from bequest.server.answers.running import collect, long_answer
from bequest.server.asks.ask import Ask, params_of
from bequest.server.asks.chats import ChatSource, rendered_chat
from bequest.server.asks.lengths import Length
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.prompts import TextSource, encode, plain_prompts
from bequest.server.asks.reading import Reading
from bequest.server.asks.sampling import NOTHING_CHOSEN, Chosen, Sampling
from bequest.server.asks.terms import AskTerms
from bequest.server.asks.tools import Tools
from bequest.server.context import Context
from bequest.server.doors.ranking.body import Pair
from bequest.server.wire.errors import from_engine
from bequest.server.wire.names import part_id

_TASK = 'Decide whether the document fits the query as the instruction says. Answer with "yes" or "no" alone.'
_INSTRUCTION = "The document should contain what the query asks for."
_ANSWERS = ("yes", "no")
_SCORED = Sampling(chosen=Chosen({**NOTHING_CHOSEN, "logprobs": 0}), length=Length(0))
_AT_ONCE = 64  # pairs that the engine knows of at a time


class Judge:
    """Asks the same question about each pair of one request."""

    def __init__(self, context: Context, answer_id: str, terms: AskTerms, instruction: str | None, field: str) -> None:
        """`field` is the client's name of the documents."""
        self._context = context
        self._id = answer_id
        self._field = field
        self._terms = terms
        self._instruction = instruction or _INSTRUCTION
        self._places = asyncio.Semaphore(_AT_ONCE)
        self.usages: list[Usage] = []

    async def scores(self, pairs: Sequence[Pair]) -> list[float]:
        """The first pair goes ahead: what its prompt has in common with the others is then computed."""
        answers = await self._answers()
        async with long_answer(self._context.engine):
            first = await self._score(0, pairs[0], answers)
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(self._score(i, pair, answers)) for i, pair in enumerate(pairs) if i]
        return [first, *(task.result() for task in others)]

    async def _score(self, index: int, pair: Pair, answers: tuple[tuple[int, ...], ...]) -> float:
        async with self._places:
            prompt = await self._prompt(pair, f"{self._field}[{index}]")
            self._check_room(prompt, answers)
            params = params_of(self._context, prompt, _SCORED, self._terms)
            ask = Ask(
                id=part_id(self._id, index),
                prompts=(prompt,),
                params=(params,),
                terms=self._terms,
                suffixes=answers,
                output=OutputMode.FINAL,
            )
            [result] = await collect(self._context.engine, ask.requests, goes_on=True)
        if result.usage is not None:
            self.usages.append(result.usage)
        yes, no = (result.choices[number].cumulative_logprob for number in range(len(_ANSWERS)))
        return share(yes, no)

    def _check_room(self, prompt: Prompt, answers: tuple[tuple[int, ...], ...]) -> None:
        limit, longest = self._context.engine.info.max_model_len, max(map(len, answers))
        if len(prompt.token_ids) + longest > limit:
            raise from_engine(context_exceeded(len(prompt.token_ids), longest, limit), prompt.param)

    async def _answers(self) -> tuple[tuple[int, ...], ...]:
        """Behind a template an answer begins with its word, in plain text with a space."""
        words = _ANSWERS if self._converses else tuple(f" {word}" for word in _ANSWERS)
        return tuple(map(tuple, await encode(self._context, list(words), add_special_tokens=False)))

    @property
    def _converses(self) -> bool:
        return self._context.text.chat_template is not None

    async def _prompt(self, pair: Pair, param: str) -> Prompt:
        asked = f"Instruction: {self._instruction}\n\nQuery: {pair.query}\n\nDocument: {pair.document}"
        if not self._converses:
            source = TextSource(given=f"{_TASK}\n\n{asked}\n\nAnswer:", field=param)
            [prompt] = await plain_prompts(self._context, source)
            return structs.replace(prompt, param=param)
        reading = Reading(self._context, Tools(), template=None)
        kwargs = reading.template_kwargs("none", None) if reading.shows_thoughts else None
        messages = [{"role": "system", "content": _TASK}, {"role": "user", "content": asked}]
        rendered = await rendered_chat(self._context, ChatSource(given=messages, template_kwargs=kwargs))
        return Prompt(rendered.token_ids, param=param)


def share(yes: float | None, no: float | None) -> float:
    """p(yes) of the two, from their log-probabilities. A half, where neither can come."""
    assert yes is not None and no is not None
    if not math.isfinite(yes) or not math.isfinite(no):
        return float(math.isfinite(yes)) if math.isfinite(yes) != math.isfinite(no) else 0.5
    gap = yes - no
    return 1 / (1 + math.exp(-gap)) if gap > -700 else 0.0
