"""Answers that are sent whole. One with many log-probabilities takes seconds to write: others are served meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from bequest.engine.types import TokenLogprob
from bequest.server.answers.running import Collector
from bequest.server.context import Context
from bequest.server.transport.work import off_loop

_CHARS = 10  # of a text, that a log-probability takes as long as


async def written(context: Context, results: Sequence[Collector], answer: Callable[[], dict[str, Any]]) -> bytes:
    """The JSON that `answer` makes of the results, made in a worker thread where it is large."""
    return await off_loop(context, _CHARS * sum(map(_num_logprobs, results)), lambda: orjson.dumps(answer()))


def _num_logprobs(result: Collector) -> int:
    """As many as if all choices were like the first: near enough."""
    if result.beams is not None and result.prompt_logprobs is None:
        return 0
    first = result.choices.get(0)
    sampled = () if first is None else first.logprobs or ()
    prompt = result.prompt_logprobs or ()
    return len(result.choices) * (_width(sampled[:1]) * len(sampled) + _width(prompt[1:2]) * len(prompt))


def _width(entries: Sequence[TokenLogprob | None]) -> int:
    return sum(1 + len(entry.top) for entry in entries if entry is not None)
