"""What the jobs say: a prompt of its own for each, and a suffix, of the lengths that were asked for.

Prompts are made of common words, so that they work with any tokenizer. Where the server has /tokenize and tells the
tokens it samples, prompts are cut to the token and everything is sent as token ids. Elsewhere it is sent as text, with
as many words as the usage of a first answer suggests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from bequest.bench.client import Answer, BenchError, Client, Prompt, ServerError
from bequest.bench.options import TwoStageOptions

_WORDS = """water stone river light paper green house letter music winter garden bridge window silver market simple
morning engine forest summer second doctor island number circle yellow button animal planet corner bottle ladder pencil
mirror castle copper valley travel future kitchen station harbor mountain village teacher picture machine library
thunder weather history science captain blanket orchard pattern compass journey"""
_SUFFIX = "In short, the answer to all of this is"
_SAMPLE_WORDS = 200


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and suffix are all token ids or all text."""

    prompts: tuple[Prompt, ...]
    suffix: Prompt

    @property
    def as_text(self) -> bool:
        return isinstance(self.suffix, str)

    def whole(self, number: int, stage1: Answer) -> Prompt:
        """What stage 2 continues: a job's prompt, what stage 1 sampled, the suffix."""
        [choice] = stage1.choices
        prompt, suffix = self.prompts[number], self.suffix
        if isinstance(prompt, str) or isinstance(suffix, str):
            return f"{prompt}{choice.text}{suffix}"
        if choice.token_ids is None:
            raise BenchError("the server told token ids at first, and then left them out of an answer")
        return prompt + choice.token_ids + suffix

    def fresh_prompt(self, number: int, draw: random.Random) -> Prompt:
        """As long as a job's prompt, in an order of words that nobody has sent before."""
        prompt = self.prompts[number]
        return _text(draw, len(prompt.split())) if isinstance(prompt, str) else tuple(draw.sample(prompt, len(prompt)))


async def make_workload(client: Client, model: str, options: TwoStageOptions, jobs: int) -> Workload:
    draws = [random.Random(f"{options.seed}/{job}") for job in range(jobs)]
    sample = _text(random.Random("sample"), min(options.prompt_tokens, _SAMPLE_WORDS))
    body = {"model": model, "prompt": sample, "max_tokens": 1, "return_token_ids": True}
    answer = await client.complete(body)
    if answer.choices[0].token_ids is not None and await _tokenize(client, model, sample, special=True):
        prompts = [await _prompt_ids(client, model, draw, options.prompt_tokens) for draw in draws]
        return Workload(tuple(prompts), await _suffix_ids(client, model, options.suffix_tokens))
    counted = answer.usage.get("prompt_tokens")
    if not counted:
        raise BenchError("the server has no /tokenize and tells no usage.prompt_tokens: lengths cannot be chosen")
    words = max(1, round(options.prompt_tokens * len(sample.split()) / counted))
    return Workload(tuple(_text(draw, words) for draw in draws), _suffix_text(options.suffix_tokens))


async def prompt_texts(client: Client, model: str, num_tokens: int, seed: int, count: int) -> list[str]:
    """Prompts of words that all differ from their first word on, about as long as is wanted."""
    sample = _text(random.Random("sample"), _SAMPLE_WORDS)
    body = {"model": model, "messages": [{"role": "user", "content": sample}], "max_tokens": 1}
    try:
        told: Any = (await client.call("POST", "/v1/chat/completions", body)).get("usage") or {}
    except ServerError as error:
        if error.status not in (400, 404):
            raise
        told = (await client.complete({"model": model, "prompt": sample, "max_tokens": 1})).usage
    counted = told.get("prompt_tokens") or _SAMPLE_WORDS
    words = max(1, round(num_tokens * _SAMPLE_WORDS / counted))
    return [_text(random.Random(f"{seed}/{number}"), words) for number in range(count)]


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS.split(), k=words))


def _suffix_text(words: int) -> str:
    some = _SUFFIX.split()
    return "".join(f" {some[i % len(some)]}" for i in range(words))


async def _tokenize(client: Client, model: str, text: str, special: bool) -> tuple[int, ...]:
    """The token ids of a text; none where the server cannot tell them."""
    body = {"model": model, "prompt": text, "add_special_tokens": special}
    try:
        answer: Any = await client.call("POST", "/tokenize", body)
    except ServerError as error:
        if error.status in (404, 405, 501):
            return ()
        raise
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return tuple(tokens) if isinstance(tokens, list) and all(type(token) is int for token in tokens) else ()


async def _prompt_ids(client: Client, model: str, draw: random.Random, length: int) -> tuple[int, ...]:
    """A prompt of `length` tokens. A word is a token or more, so there are enough of them."""
    tokens = await _tokenize(client, model, _text(draw, length), special=True)
    if len(tokens) < length:
        raise BenchError(f"{length} words have only {len(tokens)} tokens here: lower --prompt-tokens")
    return tokens[:length]


async def _suffix_ids(client: Client, model: str, length: int) -> tuple[int, ...]:
    return (await _tokenize(client, model, _suffix_text(length), special=False))[:length] if length else ()
