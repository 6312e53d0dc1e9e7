"""The engine itself, synchronously and for many prompts: its own requests and parameters, which nobody has checked.

bequest.LLM is what users have; it goes through the server's rules.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tqdm import tqdm

from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.constraints.grammar import Grammar, GrammarSource, Vocabulary
from bequest.engine.types import ChoiceDelta, OutputMode, Request, SamplingParams, TokenLogprob, Usage
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.hidden import HiddenStatesParams
from bequest.engine.types.states import ChoiceStates

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncoderDecoderPrompt:
    """A prompt of an encoder-decoder model whose decoder does not begin as the model likes it."""

    encoder: str | Sequence[int] | EncoderInput
    decoder: str | Sequence[int] | None = None


Prompt = str | Sequence[int] | EncoderInput | EncoderDecoderPrompt


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt: n whole choices."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[ChoiceDelta, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    hidden_states: tuple[ChoiceStates, ...] = ()  # of each choice, if asked for


class LLM:
    """Loads a model and answers batches of prompts, synchronously. Close it, or use it in a `with` block."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bequest-llm", daemon=True)
        self._thread.start()
        self._vocabulary: Vocabulary | None = None
        try:
            self._built: Built = self._run(build_engine(config or EngineConfig()))
        except BaseException:
            self._end_loop()
            raise

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        hidden_states: HiddenStatesParams | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """One Completion per prompt, in order. Prompts are strings or token lists; params one for all or one each.

        Of an encoder-decoder model a prompt is the encoder's, and may be audio; EncoderDecoderPrompt names both.
        With max_tokens 0 `hidden_states` are the prompts'; `completion.hidden_states[0].assemble()` is an array.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} SamplingParams")
        return self._run(self._generate(prompts, each, hidden_states, progress))

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> Completion:
        """The answer to a conversation, through the model's chat template."""
        template = self._built.text.chat_template
        if template is None:
            raise ValueError("this model has no chat template")
        prompt = self._built.text.tokenizer.encode(template.render(messages), add_special_tokens=False)
        return self.generate([prompt], params, progress=False)[0]

    def grammar(self, source: GrammarSource) -> Grammar:
        """For SamplingParams.grammar: answers that the source describes, and nothing else. Raises GrammarError."""
        if self._vocabulary is None:
            info = self._built.engine.info
            self._vocabulary = Vocabulary(self._built.text.tokenizer, info.vocab_size, info.eos_token_ids)
        return Grammar(source, self._vocabulary)

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._built.engine.stop())
            self._end_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        params: list[SamplingParams],
        states: HiddenStatesParams | None,
        progress: bool,
    ) -> list[Completion]:
        with tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:
            tasks = [asyncio.ensure_future(self._one(p, q, states, bar)) for p, q in zip(prompts, params, strict=True)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _one(
        self, prompt: Prompt, params: SamplingParams, states: HiddenStatesParams | None, bar: tqdm[Any]
    ) -> Completion:
        request = replace(self._request(prompt, params), hidden_states=states)
        token_ids = request.prompt_token_ids
        async for delta in self._built.engine.generate(request):
            if delta.usage is not None:
                bar.update()
                found = () if delta.hidden_states is None else delta.hidden_states.choices
                return Completion(token_ids, delta.choices, delta.usage, delta.prompt_logprobs, found)
        raise AssertionError("a request ends with usage or an error")

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        id, info = f"llm-{uuid.uuid4().hex}", self._built.engine.info.encoder
        if info is None:
            if isinstance(prompt, EncoderInput | EncoderDecoderPrompt):
                raise ValueError("this model has no encoder")
            return Request(id, "local", self._tokens(prompt), params, output=OutputMode.FINAL)
        given = prompt if isinstance(prompt, EncoderDecoderPrompt) else EncoderDecoderPrompt(prompt)
        read = given.encoder
        encoder = read if isinstance(read, EncoderInput) else EncoderInput.of_tokens(self._tokens(read))
        # A decoder's text stands in the middle of an answer: without what the tokenizer puts around a whole one.
        decoder = info.decoder_prompt(None if given.decoder is None else self._tokens(given.decoder, special=False))
        rules = info.rules(len(decoder), ends=params.ends_at_eos)
        return Request(id, "local", decoder, replace(params, rules=rules), output=OutputMode.FINAL, encoder=encoder)

    def _tokens(self, prompt: str | Sequence[int], special: bool = True) -> tuple[int, ...]:
        return tuple(self._built.text.tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


__all__ = ["LLM", "Completion", "EngineConfig", "GrammarSource", "HiddenStatesParams", "SamplingParams"]
