"""An engine that plays scripts, and a tokenizer of bytes, behind the interfaces of the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bequest.engine.errors import (
    AdapterInUse,
    AdapterNotFound,
    EngineDead,
    EngineDraining,
    EngineError,
    InvalidAdapter,
    InvalidRequest,
    QueueFull,
)
from bequest.engine.scheduling.limits import ExtractionLimits
from bequest.engine.state.contents import Contents
from bequest.engine.types import ChoiceDelta, Delta, ModelInfo, OutputMode, Request, Sink, TokenLogprob, Usage
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.image import Image, PreparedImage, VisionInfo
from bequest.engine.types.listening import CrossHeads, FloatRows
from bequest.engine.types.model import Numbers
from bequest.engine.watching.block_map import NO_GROUP, NOBODY, BlockField, BlockMap
from bequest.engine.watching.observation import EngineLoad
from bequest.engine.watching.snapshot import OpenRequest, Snapshot
from tests.server.fake_records import FakeRecords
from tests.server.fake_states import HIDDEN, NUM_LAYERS, FakeStates

BOS, EOS = 256, 257
IMAGE = "\x01"
PIECES = ("Hel", "lo", " wör", "ld", " 👋", '"quoted"\n', "end")


class ByteTokenizer:
    """Token i < 256 is byte i; then BOS and EOS."""

    max_chars_per_token = 4
    special_ids = frozenset({BOS, EOS})
    spells_bytes = True
    role_tokens: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.added: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_behind(self, text: str, last: int | None = None) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i in self.special_ids)]
        pieces = [kept[start : start + 4096] for start in range(0, len(kept), 4096)]  # each holds the interpreter
        return b"".join([b"".join(map(self.token_bytes, piece)) for piece in pieces]).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        return self.added.get(token)

    def token_string(self, token_id: int | None) -> str | None:
        return None

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else {BOS: b"<s>", EOS: b"</s>"}.get(token_id, b"<%d>" % token_id)


class PlainTemplate:
    """One line per message."""

    source = tool_source = ""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        self.seen.append({"messages": messages, **options})
        if messages[0]["content"] == "refuse me":
            raise InvalidRequest("The template refuses: roles must alternate.", field="messages")
        lines = [f"{message['role']}: {_plain(message['content'])}\n" for message in messages]
        if options["continue_final_message"]:
            return "".join(lines).removesuffix("\n")
        return "".join(lines) + ("assistant: " if options["add_generation_prompt"] else "")


def _plain(content: str | list[dict[str, Any]]) -> str:
    """An image is one byte, which no text has (`seeing_engine`)."""
    return content if isinstance(content, str) else "+".join(part.get("text", IMAGE) for part in content)


@dataclass
class FakeText:
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    chat_template: PlainTemplate | None = field(default_factory=PlainTemplate)


@dataclass
class Run:
    request: Request
    sink: Sink
    deltas: Iterator[Delta]
    begun: bool = False


class FakeAdapters:
    """Loads everything but what is called "missing"."""

    def __init__(self) -> None:
        self.loaded: dict[str, AdapterRef] = {}
        self.directories: list[Path] = []
        self.used: set[str] = set()

    @property
    def refs(self) -> tuple[AdapterRef, ...]:
        return tuple(self.loaded.values())

    def find(self, name: str) -> AdapterRef | None:
        return self.loaded.get(name)

    async def load(self, name: str, directory: Path, *, replaces: bool = False) -> AdapterRef:
        if name in self.loaded:
            if not replaces:
                raise InvalidAdapter("It is loaded already.", reason="adapter_loaded", name=name)
            self.unload(name)
        self.directories.append(directory)
        if directory.name == "missing":
            raise InvalidAdapter("There is no such directory.")
        ref = self.loaded[name] = AdapterRef(name, len(self.directories), str(len(self.directories)))
        return ref

    def unload(self, name: str) -> None:
        if name not in self.loaded:
            raise AdapterNotFound(f"There is no adapter '{name}'.", reason="adapter_unknown", name=name)
        if name in self.used:
            facts = {"name": name, "users": "1 lease(s)", "ids": "cmpl-1"}
            raise AdapterInUse("It is needed.", reason="adapter_in_use", details={"leases": ["cmpl-1"]}, **facts)
        del self.loaded[name]


class FakeEngine(FakeRecords):
    """Plays the deltas of `script` one per loop iteration; with `held` only when `advance` says so."""

    def __init__(self, script: Callable[[Request], Iterator[Delta]] | None = None) -> None:
        super().__init__()
        self.info = ModelInfo(
            name="fake/model",
            architecture="Fake",
            max_model_len=512,
            vocab_size=258,
            eos_token_ids=(EOS,),
            dtype="float32",
            num_parameters=1,
            num_layers=NUM_LAYERS,
            hidden_size=HIDDEN,
            numbers=Numbers("fp8_e4m3"),
        )
        self.adapters = FakeAdapters()
        self.extraction_limits = ExtractionLimits()
        self.contents = Contents()
        self.takes_embeds = False
        self.states = FakeStates(self.info)
        self.looked: list[CrossHeads] = []
        self.looked_ahead: list[int] = []  # first ids
        self.state: Any = "ready"
        self.script = script or pieces_script
        self.refusal: EngineError | None = None
        self.full = False
        self.held = False
        self.most_extractions = 1024
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.runs: dict[str, Run] = {}
        self.num_steps = 0
        self.expected_tenants = self.long_answers = 0
        self.grace: float | None = None  # once it is stopped
        self.device_works = asyncio.Event()
        self.device_works.set()
        self.died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def look_ahead(self, image: Image) -> None:
        self.looked_ahead.append(image.first_id)

    @asynccontextmanager
    async def long_answer(self) -> AsyncIterator[None]:
        self.long_answers += 1
        yield
        self.long_answers -= 1

    def submit(self, request: Request, sink: Sink, *, goes_on: bool = False) -> None:
        if self.state == "draining" and not (goes_on and self.long_answers):
            raise EngineDraining("The server is shutting down and takes no new work.")
        if self.refusal is not None:
            raise self.refusal
        assert request.id not in self.runs, "ids are unique"
        if request.extracts and sum(run.request.extracts for run in self.runs.values()) >= self.most_extractions:
            raise QueueFull("The server's queue is full.")
        self.begin(request)
        self.submitted.append(request)
        self.runs[request.id] = Run(request, sink, self.script(request))
        asyncio.get_running_loop().call_soon(self._play, request.id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if run := self.runs.pop(request_id, None):
            self.abandon(run.request)

    def advance(self, request_id: str | None = None) -> bool:
        """Delivers the next delta of one request, or of all; False if nothing runs."""
        for key in [request_id] if request_id else list(self.runs):
            run = self.runs.get(key)
            if run is not None:
                delta = self.follow(run.request, next(run.deltas), first=not run.begun)
                delta = self.states.follow(run.request, delta)
                run.begun = True
                if delta.finished:
                    del self.runs[key]
                run.sink(delta)
        return bool(self.runs)

    def _play(self, request_id: str) -> None:
        if not self.held and request_id in self.runs:
            self.advance(request_id)
            asyncio.get_running_loop().call_soon(self._play, request_id)

    def die(self) -> None:
        self.state = "dead"
        for run in list(self.runs.values()):
            run.sink(Delta(run.request.id, error=EngineDead("The engine has failed.")))
        self.runs.clear()
        self.died.set_result(RuntimeError("device fault"))

    def snapshot(self) -> Snapshot:
        empty = BlockField(np.zeros(3, np.uint8), np.full(3, NOBODY, np.int16), np.full(3, NO_GROUP, np.int8))
        requests = tuple(
            OpenRequest(r.id, r.terms.name, r.tenant, "running", 1.0, len(r.prompt_token_ids), 0, 0, 1, 1, 0)
            for r in (run.request for run in self.runs.values())
        )
        return Snapshot(16, BlockMap((), (0,), empty, empty), requests)

    def expect_tenants(self, count: int) -> None:
        self.expected_tenants = count

    def check_room(self, tenant: str) -> None:
        if self.full:
            raise QueueFull("The server's queue is full.")

    def num_waiting(self, tenant: str) -> int:
        return sum(not run.begun for run in self.runs.values() if run.request.tenant == tenant)

    asleep = False

    async def cross_weights(self, asked: CrossHeads) -> FloatRows:
        """Each token takes five positions, and the last one the rest."""
        self.looked.append(asked)
        num_tokens = len(asked.states) - asked.first
        at = np.minimum(np.arange(asked.num_positions) // 5, num_tokens - 1)
        return np.where(at == np.arange(num_tokens)[:, None], np.float32(1), np.float32(-1))

    async def sleep(self, *, wakes_itself: bool) -> int:
        self.asleep = True
        return 1000

    async def wake(self) -> None:
        self.asleep = False

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0)

    @property
    def num_open(self) -> int:
        return len(self.runs)

    async def probe(self) -> None:
        await self.device_works.wait()

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109
        self.state = "draining"
        for _ in range(int(timeout / 0.001)):
            if not self.runs:
                return True
            await asyncio.sleep(0.001)
        return False

    async def stop(self, grace: float = 10.0) -> None:
        self.grace = grace
        for run in list(self.runs.values()):
            run.sink(Delta(run.request.id, error=EngineDraining("The server is going down.")))
        self.runs.clear()

    async def wait_dead(self) -> BaseException:
        return await asyncio.shield(self.died)


def pieces_script(request: Request) -> Iterator[Delta]:
    """Choice i says PIECES from its i-th on; each piece counts as one token, whose id is its first byte."""
    if request.suffixes:
        yield _scores(request)
        return
    params = request.params
    texts = [(PIECES[i % 3 :])[: params.max_tokens] for i in range(params.n)]
    prompt = _prompt_logprobs(request) if params.prompt_logprobs is not None else None
    usage = Usage(len(request.prompt_token_ids), sum(map(len, texts)), cached_tokens=1)
    if request.output is OutputMode.FINAL or params.max_tokens == 0:
        choices = tuple(_choice(request, i, text, True) for i, text in enumerate(texts))
        yield Delta(request.id, choices, first=True, prompt_logprobs=prompt, cached_tokens=1, usage=usage)
        return
    for step in range(max(map(len, texts))):
        choices = tuple(
            _choice(request, i, text[step : step + 1], step == len(text) - 1)
            for i, text in enumerate(texts)
            if step < len(text)
        )
        last = step == max(map(len, texts)) - 1
        yield Delta(
            request.id,
            choices,
            first=step == 0,
            prompt_logprobs=prompt if step == 0 else None,
            cached_tokens=1 if step == 0 else 0,
            usage=usage if last else None,
        )


def _scores(request: Request) -> Delta:
    """Each token of a suffix has the log-probability -(its id) / 8, and as many alternatives as are wanted."""
    wanted = request.params.logprobs or 0
    choices = tuple(
        ChoiceDelta(
            index,
            bytes(i for i in ids if i < BOS).decode("utf-8", "replace"),
            ids,
            tuple(TokenLogprob(i, -i / 8, 3, ((65, -0.25), (66, -0.5))[:wanted]) for i in ids),
            finish_reason="length",
            stop_reason=None,
            cumulative_logprob=-sum(ids) / 8,
        )
        for index, ids in enumerate(request.suffixes)
    )
    num_prompt = len(request.prompt_token_ids) + sum(map(len, request.suffixes))
    return Delta(request.id, choices, first=True, usage=Usage(num_prompt, 0, cached_tokens=1))


def _choice(request: Request, index: int, pieces: tuple[str, ...], last: bool) -> ChoiceDelta:
    params = request.params
    ids = tuple(piece.encode()[0] for piece in pieces)
    logprobs = None
    if params.logprobs is not None:
        logprobs = tuple(TokenLogprob(i, -0.5, 1, ((i, -0.5), (65, float("-inf")))[: params.logprobs]) for i in ids)
    reason: Any = None
    if last:
        reason = "stop" if pieces and pieces[-1] == PIECES[-1] else "length"
    scored = last and (params.logprobs is not None or params.beams is not None)
    return ChoiceDelta(
        index,
        "".join(pieces),
        ids,
        logprobs,
        finish_reason=reason,
        stop_reason=None,
        cumulative_logprob=-0.5 * len(ids) if scored else None,
        beam_score=-0.5 - index if scored and params.beams is not None else None,
    )


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...]:
    top = ((66, -0.25),)[: request.params.prompt_logprobs]
    return (None, *(TokenLogprob(i, -1.5, 7, top) for i in request.prompt_token_ids[1:]))


def failing_script(error: EngineError, after: int) -> Callable[[Request], Iterator[Delta]]:
    """As pieces_script, but the delta number `after` is the error."""

    def script(request: Request) -> Iterator[Delta]:
        for number, delta in enumerate(pieces_script(request)):
            if number == after:
                break
            yield delta
        yield Delta(request.id, error=error)

    return script


def seeing_engine() -> FakeEngine:
    """One of a model that sees: every image has four rows."""
    engine = FakeEngine()
    prepared = PreparedImage(np.zeros((1, 2, 2, 3), np.uint8), (4,), 4)
    engine.info = replace(engine.info, vision=VisionInfo(ord(IMAGE), lambda image, low: prepared, 4))
    return engine
