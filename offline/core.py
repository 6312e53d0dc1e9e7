"""The engine behind LLM and AsyncLLM: fields of bodies go in, answers come out. It lives on one event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig, ServerConfig
from bequest.engine.types import Delta
from bequest.offline.answers import Completion, Growing, Piece, Score, States, completion_of, scores_of
from bequest.offline.errors import own_errors
from bequest.offline.params import read
from bequest.server.access.key_file import KeyLimits
from bequest.server.access.keys import Caller, KeyRing
from bequest.server.answers.extraction import extracted
from bequest.server.answers.running import Job, collect
from bequest.server.app import close_context, make_context
from bequest.server.asks.ask import Ask
from bequest.server.asks.call import Call
from bequest.server.asks.notes import ConversationNotes
from bequest.server.asks.reading import Reading
from bequest.server.asks.tools import chat_tools
from bequest.server.asks.wish import prompt_states
from bequest.server.audio.form import TranscriptionBody
from bequest.server.audio.subtitles import Transcript
from bequest.server.audio.transcriptions import transcribed
from bequest.server.context import Context
from bequest.server.generation.asks import chat_ask, completion_ask
from bequest.server.generation.scoring import score_ask
from bequest.server.operation.metrics import Metrics
from bequest.server.states.embeddings import embeddings_ask, vector_length, vectors_of
from bequest.server.states.hidden_states import states_ask
from bequest.server.stores.leases import LeaseTimes
from bequest.server.wire.bodies import ChatBody, CompletionBody, EmbeddingsBody, HiddenStatesBody
from bequest.server.wire.names import new_id

Fields = Mapping[str, Any]  # of a body

# Whoever has the process may do what the server allows anybody.
_LOCAL = Caller("local", "local", KeyLimits(lowest_priority=-(2**31)), operator=True)
_Body = TypeVar("_Body", bound=msgspec.Struct)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Core:
    """Many requests may be given at once: so many of them as keep the engine busy are in it at a time."""

    def __init__(self, context: Context, window: int) -> None:
        self.context = context
        self._places = asyncio.Semaphore(window)

    @classmethod
    async def load(cls, engine: EngineConfig, server: ServerConfig) -> Core:
        """Raises ModelError."""
        metrics = Metrics()
        built = await build_engine(engine, metrics, notes=ConversationNotes())
        leases = LeaseTimes(engine.default_ttl, engine.max_ttl, engine.durable_by_default)
        context = make_context(built.engine, built.text, server, leases, KeyRing(), metrics)
        return cls(context, max(1, min(2 * engine.max_num_seqs, engine.max_queued)))

    async def close(self) -> None:
        await self.context.engine.stop()
        close_context(self.context)

    # --- answers -------------------------------------------------------------------------------------------------

    async def completions(self, requests: Sequence[Fields], progress: bool | None) -> list[Completion]:
        return await self._each(requests, self._completion, progress)

    async def chats(self, requests: Sequence[Fields], progress: bool | None) -> list[Completion]:
        return await self._each(requests, self._chat, progress)

    async def pieces(self, request: Fields) -> AsyncIterator[Piece | Completion]:
        """Of a completion or a chat: pieces as they come, and the whole at the end."""
        with own_errors():
            streamed = {**request, "stream": True}
            ask, reading = await (self._chat_ask(streamed) if "messages" in request else self._text_ask(streamed))
            growing, sink = Growing(self.context, ask, reading), _Deltas()
            async with self._places:
                with Job(self.context.engine, ask.requests, [sink]):
                    async for delta in sink:
                        for piece in growing.take(delta):
                            yield piece
            yield growing.completion(delta)

    async def _completion(self, request: Fields) -> Completion:
        ask, reading = await self._text_ask(request)
        return await self._whole(ask, reading)

    async def _chat(self, request: Fields) -> Completion:
        ask, reading = await self._chat_ask(request)
        return await self._whole(ask, reading)

    async def _text_ask(self, request: Fields) -> tuple[Ask, Reading | None]:
        return await completion_ask(self._call(request, CompletionBody, "cmpl-")), None

    async def _chat_ask(self, request: Fields) -> tuple[Ask, Reading | None]:
        call = self._call(request, ChatBody, "chatcmpl-")
        tools = chat_tools(call.body.tools, call.body.tool_choice, call.body.parallel_tool_calls)
        reading = Reading(self.context, tools, call.body.chat_template)
        return await chat_ask(call, reading), reading

    async def _whole(self, ask: Ask, reading: Reading | None) -> Completion:
        [result] = await collect(self.context.engine, ask.requests)
        return completion_of(self.context, ask, result, reading)

    # --- numbers -------------------------------------------------------------------------------------------------

    async def scores(self, request: Fields) -> list[Score]:
        with own_errors():
            call = self._call({"max_tokens": 0, **request}, CompletionBody, "cmpl-")
            ask = await score_ask(call, call.body.continuation_suffixes or [])
            async with self._places:
                [result] = await collect(self.context.engine, ask.requests)
        return scores_of([choice for _, choice in sorted(result.choices.items())])

    async def embeddings(self, requests: Sequence[Fields], progress: bool | None) -> npt.NDArray[np.float32]:
        """[inputs, H]"""
        found = await self._each(requests, self._embedding, progress)
        return np.stack(found) if found else np.empty((0, self.context.engine.info.hidden_size), np.float32)

    async def states(self, requests: Sequence[Fields], progress: bool | None) -> list[States]:
        return await self._each(requests, self._states, progress)

    async def _embedding(self, request: Fields) -> npt.NDArray[np.float32]:
        call = self._call(request, EmbeddingsBody, "hs-")
        length = vector_length(call.body.dimensions, self.context.engine.info.hidden_size)
        ask = await embeddings_ask(call)
        async with extracted(self.context, ask.requests) as results:
            found = [result.states for result in results]
            [vector] = await vectors_of(self.context, found, length, call.body.normalize is not False)
            return np.asarray(vector.assemble(), np.float32)

    async def _states(self, request: Fields) -> States:
        call = self._call(request, HiddenStatesBody, "hs-")
        ask = await states_ask(call, prompt_states(call.body, self.context.engine.info))
        async with extracted(self.context, ask.requests) as [result]:
            states = result.states
            values = await asyncio.get_running_loop().run_in_executor(self.context.encoder, states.assemble)
            return States(values, states.layers, states.positions, result.usage)

    # --- sound ---------------------------------------------------------------------------------------------------

    async def transcript(self, audio: str | os.PathLike[str] | bytes, request: Fields) -> Transcript:
        with own_errors():
            data = audio if isinstance(audio, bytes) else await asyncio.to_thread(Path(audio).read_bytes)
            call = self._call(request, TranscriptionBody, "trns-")
            async with self._places:
                return await transcribed(call, bytearray(data))

    # --- how they run --------------------------------------------------------------------------------------------

    def _call(self, request: Fields, body: type[_Body], prefix: str) -> Call[_Body]:
        asked = read(request, body)
        name = self.context.served_name(getattr(asked, "model", None), _LOCAL)
        return Call(self.context, asked, new_id(prefix), name, _LOCAL, time.monotonic())

    async def _each(
        self, items: Sequence[_Item], work: Callable[[_Item], Awaitable[_Result]], progress: bool | None
    ) -> list[_Result]:
        """The result of each, in order. The first error ends them all."""
        # tqdm's None: silent where stderr is not a terminal.
        disable = (None if len(items) > 1 else True) if progress is None else not progress
        with tqdm(total=len(items), unit=" requests", disable=disable) as bar:

            async def one(item: _Item) -> _Result:
                async with self._places:
                    with own_errors():
                        result = await work(item)
                bar.update()
                return result

            tasks = [asyncio.ensure_future(one(item)) for item in items]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()


class _Deltas:
    """The sink of a stream, and what came into it."""

    def __init__(self) -> None:
        self.finished = False
        self._queue: asyncio.Queue[Delta] = asyncio.Queue()

    def __call__(self, delta: Delta) -> None:
        self.finished = delta.finished
        self._queue.put_nowait(delta)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            delta = await self._queue.get()
            if delta.error is not None:
                raise delta.error
            yield delta
            if delta.finished:
                return
