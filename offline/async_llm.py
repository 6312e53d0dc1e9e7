"""AsyncLLM: LLM's methods for programs that have an event loop of their own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from bequest.engine.types import ModelInfo
from bequest.offline.answers import Completion, OwnCompletion, Piece, Score, States
from bequest.offline.configs import configs_of
from bequest.offline.core import Core
from bequest.offline.loading import announced
from bequest.offline.params import ChatOptions, Options, SamplingParams, plain
from bequest.offline.requests import (
    Messages,
    Params,
    Prompt,
    Prompts,
    beam_fields,
    chat_fields,
    completion_fields,
    continued_fields,
    input_fields,
    is_single,
    is_single_chat,
    stream_fields,
)
from bequest.server.audio.subtitles import Transcript
from bequest.server.interfaces import TokenizerLike


class AsyncCompletion(OwnCompletion["AsyncLLM"]):
    """The answer to one prompt or conversation, from which others can go on."""

    __slots__ = ()

    async def continue_(
        self, more: Prompt | Messages = "", params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncCompletion:
        """Goes on behind this answer with `more`: text or tokens, or the next messages of a chat. Nothing that was
        computed for this answer is computed again, as long as the cache has it."""
        return await self._owner._continue(self, more, params, options)


class AsyncLLM:
    """Loads a model in `async with`, or with `await llm.start()`. The arguments are LLM's."""

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, progress: bool | None = None, **flags: Any
    ) -> None:
        self._configs = configs_of(model, flags)
        self._progress = progress
        self._core: Core | None = None

    async def start(self) -> Self:
        if self._core is None:
            with announced(self._configs[0], self._progress):
                self._core = await Core.load(*self._configs)
        return self

    async def close(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            await core.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def core(self) -> Core:
        if self._core is None:
            raise RuntimeError("the model is not loaded: use `async with`, or `await llm.start()`")
        return self._core

    @property
    def info(self) -> ModelInfo:
        return self.core.context.engine.info

    @property
    def tokenizer(self) -> TokenizerLike:
        return self.core.context.text.tokenizer

    @overload
    async def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self, prompts: Prompt, params: Params = None, *, progress: bool | None = None, **options: Unpack[Options]
    ) -> AsyncCompletion: ...

    @overload
    async def generate(
        self, prompts: Prompts, params: Params = None, *, progress: bool | None = None, **options: Unpack[Options]
    ) -> list[AsyncCompletion]: ...

    async def generate(
        self,
        prompts: Prompt | Prompts,
        params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> AsyncCompletion | list[AsyncCompletion]:
        bodies = completion_fields(prompts, params, options)
        found = [self._own(answer) for answer in await self.core.completions(bodies, progress)]
        return found[0] if is_single(prompts) else found

    @overload
    async def chat(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self, messages: Messages, params: Params = None, *, progress: bool | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncCompletion: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Messages],
        params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[AsyncCompletion]: ...

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncCompletion | list[AsyncCompletion]:
        bodies = chat_fields(messages, params, options)
        found = [self._own(answer) for answer in await self.core.chats(bodies, progress)]
        return found[0] if is_single_chat(messages) else found

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]) -> AsyncStream:
        return AsyncStream(self, self.core.pieces(stream_fields(prompt, params, options)))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncStream:
        [body] = chat_fields([messages], params, options)
        return AsyncStream(self, self.core.pieces(body))

    @overload
    async def beam_search(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        beam_width: int,
        params: Params = None,
        *,
        n: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | str | None = None,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> AsyncCompletion: ...

    @overload
    async def beam_search(
        self,
        prompts: Prompts,
        beam_width: int,
        params: Params = None,
        *,
        n: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | str | None = None,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> list[AsyncCompletion]: ...

    async def beam_search(
        self,
        prompts: Prompt | Prompts,
        beam_width: int,
        params: Params = None,
        *,
        n: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | str | None = None,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> AsyncCompletion | list[AsyncCompletion]:
        beams = beam_fields(beam_width, n, length_penalty, early_stopping)
        bodies = [{**body, **beams} for body in completion_fields(prompts, params, options)]
        found = [self._own(answer) for answer in await self.core.completions(bodies, progress)]
        return found[0] if is_single(prompts) else found

    async def score(
        self,
        prompt: Prompt,
        suffixes: Prompt | Sequence[str] | Sequence[Sequence[int]],
        *,
        logprobs: int | None = None,
        **options: Unpack[Options],
    ) -> list[Score]:
        [body] = completion_fields([prompt], SamplingParams(logprobs=logprobs), options)
        given = [suffixes] if is_single(suffixes) else suffixes
        return await self.core.scores({**body, "continuation_suffixes": plain(given, "suffixes")})

    async def embed(
        self,
        inputs: Prompt | Prompts,
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        model: str | None = None,
        progress: bool | None = None,
    ) -> npt.NDArray[np.float32]:
        fields = {"pooling": pooling, "dimensions": dimensions, "normalize": normalize, "model": model}
        found = await self.core.embeddings(input_fields(inputs, fields), progress)
        return cast(npt.NDArray[np.float32], found[0]) if is_single(inputs) else found

    @overload
    async def hidden_states(  # type: ignore[overload-overlap]
        self,
        inputs: Prompt | None = None,
        *,
        layers: str | Sequence[int] | None = None,
        positions: Any = None,
        pooling: str | None = None,
        dtype: str = "float32",
        stack: str | None = None,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> States: ...

    @overload
    async def hidden_states(
        self,
        inputs: Prompts,
        *,
        layers: str | Sequence[int] | None = None,
        positions: Any = None,
        pooling: str | None = None,
        dtype: str = "float32",
        stack: str | None = None,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> list[States]: ...

    async def hidden_states(
        self,
        inputs: Prompt | Prompts | None = None,
        *,
        layers: str | Sequence[int] | None = None,
        positions: Any = None,
        pooling: str | None = None,
        dtype: str = "float32",
        stack: str | None = None,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> States | list[States]:
        fields = {"layers": layers, "positions": positions, "pooling": pooling, "dtype": dtype, "stack": stack}
        found = await self.core.states(input_fields(inputs, {**fields, **options}), progress)
        return found[0] if inputs is None or is_single(inputs) else found

    async def transcribe(
        self,
        audio: str | os.PathLike[str] | bytes,
        *,
        language: str | None = None,
        prompt: str | None = None,
        temperature: float | None = None,
        timestamps: bool = False,
    ) -> Transcript:
        fields = {"language": language, "prompt": prompt, "temperature": temperature}
        return await self.core.transcript(audio, {**fields, "response_format": "verbose_json" if timestamps else None})

    def _own(self, answer: Completion) -> AsyncCompletion:
        return AsyncCompletion.of(answer, self)

    async def _continue(
        self, parent: Completion, more: Any, params: SamplingParams | None, options: ChatOptions
    ) -> AsyncCompletion:
        bodies = continued_fields(parent, more, params, options)
        run = self.core.chats if parent.is_chat else self.core.completions
        [answer] = await run(bodies, None)
        return self._own(answer)


class AsyncStream:
    """Pieces of an answer as they come; `completion` is the whole, once they have."""

    def __init__(self, llm: AsyncLLM, source: AsyncIterator[Piece | Completion]) -> None:
        self._llm = llm
        self._source = source
        self.completion: AsyncCompletion | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        piece = await anext(self._source)
        if isinstance(piece, Piece):
            return piece
        self.completion = self._llm._own(piece)
        return await self.__anext__()  # which ends

    async def close(self) -> None:
        """Stops an answer that nobody wants to hear the rest of."""
        await cast(Any, self._source).aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
