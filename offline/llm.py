"""LLM: a model in this process, for scripts and notebooks.

from bequest import LLM, SamplingParams
with LLM() as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text)
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt

from bequest.engine.types import ModelInfo
from bequest.offline.answers import Completion, OwnCompletion, Piece, Score, States
from bequest.offline.async_llm import AsyncCompletion, AsyncLLM, AsyncStream
from bequest.offline.params import ChatOptions, Options, SamplingParams
from bequest.offline.requests import Messages, Params, Prompt, Prompts
from bequest.server.audio.subtitles import Transcript
from bequest.server.interfaces import TokenizerLike

_T = TypeVar("_T")


class SyncCompletion(OwnCompletion["LLM"]):
    """The answer to one prompt or conversation, from which others can go on."""

    __slots__ = ()

    def continue_(
        self, more: Prompt | Messages = "", params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> SyncCompletion:
        """Goes on behind this answer with `more`: text or tokens, or the next messages of a chat. Nothing that was
        computed for this answer is computed again, as long as the cache has it."""
        return self._owner._continue(self, more, params, options)


class LLM:
    """`model` is a directory, a .gguf file or a name, as for `bequest serve`; None is the embedded model. `flags` are
    those of the command line: `max_model_len` is --max-model-len. `progress` shows how loading goes; None: on a
    terminal. Close it, or use it in a `with` block; the end of the process closes it too.

    Every method may be called from any thread, and from a notebook.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, progress: bool | None = None, **flags: Any
    ) -> None:
        self._async = AsyncLLM(model, progress=progress, **flags)
        self._thread = _LoopThread()
        self._end = weakref.finalize(self, _close, self._async, self._thread)
        try:
            self._run(self._async.start())
        except BaseException:
            self._end()
            raise

    @property
    def info(self) -> ModelInfo:
        return self._async.info

    @property
    def tokenizer(self) -> TokenizerLike:
        return self._async.tokenizer

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self, prompts: Prompt, params: Params = None, *, progress: bool | None = None, **options: Unpack[Options]
    ) -> SyncCompletion: ...

    @overload
    def generate(
        self, prompts: Prompts, params: Params = None, *, progress: bool | None = None, **options: Unpack[Options]
    ) -> list[SyncCompletion]: ...

    def generate(
        self,
        prompts: Prompt | Prompts,
        params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> SyncCompletion | list[SyncCompletion]:
        """The answer to one prompt, or a list of those to many. A prompt is text, token ids, or an object as
        /v1/completions takes them. `params` are for all prompts, or one for each."""
        work: Any = self._async.generate(prompts, params, progress=progress, **options)
        return self._own(self._run(work))

    @overload
    def chat(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self, messages: Messages, params: Params = None, *, progress: bool | None = None, **options: Unpack[ChatOptions]
    ) -> SyncCompletion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[SyncCompletion]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> SyncCompletion | list[SyncCompletion]:
        """The answer to one conversation, or a list of those to many. A text is what a user says."""
        work: Any = self._async.chat(messages, params, progress=progress, **options)
        return self._own(self._run(work))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]) -> Stream:
        """The pieces of an answer, as they come."""
        return Stream(self, self._async.stream(prompt, params, **options))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        return Stream(self, self._async.stream_chat(messages, params, **options))

    @overload
    def beam_search(  # type: ignore[overload-overlap]
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
    ) -> SyncCompletion: ...

    @overload
    def beam_search(
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
    ) -> list[SyncCompletion]: ...

    def beam_search(
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
    ) -> SyncCompletion | list[SyncCompletion]:
        """The likeliest answers, best first: all beams, or the best `n` of them."""
        search: Any = self._async.beam_search(
            prompts,
            beam_width,
            params,
            n=n,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            progress=progress,
            **options,
        )
        return self._own(self._run(search))

    def score(
        self,
        prompt: Prompt,
        suffixes: Prompt | Sequence[str] | Sequence[Sequence[int]],
        *,
        logprobs: int | None = None,
        **options: Unpack[Options],
    ) -> list[Score]:
        """How likely each suffix is behind the prompt; nothing is sampled."""
        return self._run(self._async.score(prompt, suffixes, logprobs=logprobs, **options))

    def embed(
        self,
        inputs: Prompt | Prompts,
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        model: str | None = None,
        progress: bool | None = None,
    ) -> npt.NDArray[np.float32]:
        """[inputs, H], or [H] of a single input. Of length 1, unless `normalize` is False."""
        work = self._async.embed(
            inputs, pooling=pooling, dimensions=dimensions, normalize=normalize, model=model, progress=progress
        )
        return self._run(work)

    @overload
    def hidden_states(  # type: ignore[overload-overlap]
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
    def hidden_states(
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

    def hidden_states(
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
        """States of any layers and positions, of inputs or of an answer (`continuation_of`)."""
        work: Any = self._async.hidden_states(
            inputs,
            layers=layers,
            positions=positions,
            pooling=pooling,
            dtype=dtype,
            stack=stack,
            progress=progress,
            **options,
        )
        found: States | list[States] = self._run(work)
        return found

    def transcribe(
        self,
        audio: str | os.PathLike[str] | bytes,
        *,
        language: str | None = None,
        prompt: str | None = None,
        temperature: float | None = None,
        timestamps: bool = False,
    ) -> Transcript:
        """What is said in a file of audio, by a Whisper model."""
        work = self._async.transcribe(
            audio, language=language, prompt=prompt, temperature=temperature, timestamps=timestamps
        )
        return self._run(work)

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self._thread.run(coroutine)

    def _own(self, answers: AsyncCompletion | list[AsyncCompletion]) -> SyncCompletion | list[SyncCompletion]:
        return [self._one(one) for one in answers] if isinstance(answers, list) else self._one(answers)

    def _one(self, answer: Completion) -> SyncCompletion:
        return SyncCompletion.of(answer, self)

    def _continue(
        self, parent: Completion, more: Any, params: SamplingParams | None, options: ChatOptions
    ) -> SyncCompletion:
        return self._one(self._run(self._async._continue(parent, more, params, options)))


class Stream:
    """Pieces of an answer as they come; `completion` is the whole, once they have."""

    def __init__(self, llm: LLM, source: AsyncStream) -> None:
        self._llm = llm
        self._source = source

    @property
    def completion(self) -> SyncCompletion | None:
        found = self._source.completion
        return None if found is None else self._llm._one(found)

    def __iter__(self) -> Iterator[Piece]:
        try:
            while (piece := self._llm._run(_next(self._source))) is not None:
                yield piece
        finally:
            self.close()

    def close(self) -> None:
        """Stops an answer that nobody wants to hear the rest of. The end of the LLM has stopped it too."""
        if not self._llm.closed:
            self._llm._run(self._source.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next(source: AsyncStream) -> Piece | None:
    """A StopAsyncIteration cannot leave through a future."""
    return await anext(source, None)


class _LoopThread:
    """An event loop in a thread of its own, which a fork of the process does not have."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bequest-llm", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if not self._thread.is_alive():
            coroutine.close()
            why = "is closed" if self.is_ours else "was loaded before a fork: load another"
            raise RuntimeError(f"this LLM {why}")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # a Ctrl-C: what was asked for must not go on
            future.cancel()
            raise

    @property
    def is_ours(self) -> bool:
        return self._process == os.getpid()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _close(llm: AsyncLLM, thread: _LoopThread) -> None:
    if thread.is_ours:
        thread.run(llm.close())
        thread.end()
