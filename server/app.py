"""The web application: routes, and what their handlers need."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from pathlib import Path

from aiohttp import web

from bequest.engine.config import ServerConfig
from bequest.engine.errors import ModelError
from bequest.engine.text.foreign_template import TemplateRenderer
from bequest.server.about import adapters, console, console_state, health, models, sleeping, tokens
from bequest.server.about.openapi import openapi
from bequest.server.access.admission import Admission
from bequest.server.access.auth import Gate
from bequest.server.access.in_flight import InFlight
from bequest.server.access.keys import KeyRing
from bequest.server.access.threads import DaemonThreads
from bequest.server.access.turns import Entrance, FairPool
from bequest.server.audio import form, transcriptions
from bequest.server.batches import batches, files
from bequest.server.batches.running import BATCH_RUNNER, BatchRunner
from bequest.server.context import CONTEXT, Context
from bequest.server.door import Handler
from bequest.server.doors.finding import DOORS
from bequest.server.generation.chat import chat_completions
from bequest.server.generation.completions import completions
from bequest.server.interfaces import EngineLike, TextLike
from bequest.server.keeping import catalogues, continuations, estates
from bequest.server.middleware import common_headers, guard
from bequest.server.operation.metrics import Metrics
from bequest.server.operation.tracing import start_tracing
from bequest.server.operation.version import system_fingerprint, tokens_of
from bequest.server.responses import responses, stored
from bequest.server.states.embeddings import embeddings
from bequest.server.states.hidden_states import hidden_states
from bequest.server.stores.batches import Disk
from bequest.server.stores.catalogues import CatalogueStore
from bequest.server.stores.grammars import GrammarStore
from bequest.server.stores.images import RecentContents, images_of
from bequest.server.stores.kept_grammars import KeptGrammars
from bequest.server.stores.leases import LeaseTimes
from bequest.server.stores.response_file import ResponseFile
from bequest.server.stores.responses import ResponseStore
from bequest.server.stores.room import Room
from bequest.server.stores.speech import speech_of
from bequest.server.transport.intake import Expectation, body_limit, expect_continue, unmet_expectation
from bequest.server.transport.protocol import JsonProtocol
from bequest.server.transport.replies import ERROR_FORMS, ErrorForms

_STATES_WORKERS = max(2, min(4, (os.cpu_count() or 1) // 4))  # each copies gigabytes in a second
_WORKERS = 2  # tokenising leaves the interpreter lock, but must not starve the engine of cores

# A stored response. What stands beside them under the same path is none, or its 405 would name their methods.
_RESPONSE = r"/v1/responses/{id:(?!input_tokens(?:/|$))[^/]+}"

Answering = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Route = tuple[str, str, Handler]  # method, path, handler
ROUTES: list[Route] = [
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/hidden_states", hidden_states),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/responses", responses.create),
    ("POST", "/v1/responses/input_tokens", responses.input_tokens),
    ("GET", _RESPONSE, stored.retrieve),
    ("DELETE", _RESPONSE, stored.delete),
    ("GET", _RESPONSE + "/input_items", stored.input_items),
    ("POST", _RESPONSE + "/cancel", stored.cancel),
    ("GET", "/v1/continuations", continuations.list_records),
    ("GET", "/v1/continuations/{id}/estate", estates.export),
    ("PUT", "/v1/continuations/{id}/estate", estates.take_in),
    ("POST", "/v1/continuations/{id}/prefetch", continuations.prefetch),
    ("GET", "/v1/continuations/{id:.+}", continuations.retrieve),
    ("PATCH", "/v1/continuations/{id:.+}", continuations.change),
    ("DELETE", "/v1/continuations/{id:.+}", continuations.delete),
    ("POST", "/v1/catalogues", catalogues.upload),
    ("GET", "/v1/catalogues", catalogues.list_catalogues),
    ("GET", "/v1/catalogues/{name:.+}", catalogues.retrieve),
    ("DELETE", "/v1/catalogues/{name:.+}", catalogues.delete),
    ("POST", "/v1/files", files.upload),
    ("GET", "/v1/files", files.list_files),
    ("GET", "/v1/files/{id}", files.retrieve),
    ("DELETE", "/v1/files/{id}", files.delete),
    ("GET", "/v1/files/{id}/content", files.content),
    ("POST", "/v1/batches", batches.create),
    ("GET", "/v1/batches", batches.list_batches),
    ("GET", "/v1/batches/{id}", batches.retrieve),
    ("POST", "/v1/batches/{id}/cancel", batches.cancel),
    ("POST", "/v1/audio/transcriptions", transcriptions.transcriptions),
    ("POST", "/v1/audio/translations", transcriptions.translations),
    ("POST", "/v1/load_lora_adapter", adapters.load),
    ("POST", "/v1/unload_lora_adapter", adapters.unload),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{id:.+}", models.retrieve_model),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/v1/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/v1/detokenize", tokens.detokenize),
    ("GET", "/tokenizer_info", tokens.tokenizer_info),
    ("POST", "/sleep", sleeping.sleep),
    ("POST", "/wake_up", sleeping.wake_up),
    ("GET", "/is_sleeping", sleeping.is_sleeping),
    ("GET", "/health", health.health),
    ("GET", "/live", health.live),
    ("GET", "/version", health.version),
    ("GET", "/metrics", health.metrics),
    ("GET", "/openapi.json", openapi),
    *((route.method, route.path, route.handler) for door in DOORS for route in door.routes),
]
# A page of ours and what it asks for: no part of the API.
CONSOLE_ROUTES: list[Route] = [
    ("GET", "/", console.page),
    *(("GET", path, console.script) for path in sorted(console.STATIC_PATHS - {"/"})),
    ("GET", "/console/state", console_state.state),
]


def make_context(
    engine: EngineLike, text: TextLike, config: ServerConfig, leases: LeaseTimes, keys: KeyRing, metrics: Metrics
) -> Context:
    """`close_context` ends its threads."""
    names = tuple(config.served_model_name) or (engine.info.name,)
    for name in names:
        if engine.adapters.find(name) is not None:
            raise ModelError(f"lora={name}: the model itself has this name; choose another one for the adapter")
    metrics.model_name = names[0]
    metrics.cache_dtype = engine.info.kv_cache_dtype
    metrics.load = engine.load
    gate = Gate(
        keys,
        host=config.host,
        guard_metrics=config.guard_metrics,
        allowed_origins=config.allowed_origins,
        static_paths=console.STATIC_PATHS,
    )
    extraction = engine.extraction_limits
    recent = RecentContents(engine.contents, int(config.images_mb * 2**20))
    archive = None
    if leases.directory is not None:
        path = Path(leases.directory).absolute() / "responses.sqlite"
        archive = ResponseFile(path, tokens_of(engine.info), leases.has_neighbours)
    return Context(
        engine=engine,
        text=text,
        config=config,
        leases=leases,
        gate=gate,
        admission=Admission(),
        in_flight=InFlight(int(config.max_in_flight_mb * 2**20), lambda: keys.num_tenants),
        tracing=start_tracing(os.environ),
        metrics=metrics,
        model_names=names,
        stored=ResponseStore(config.stored_responses, int(config.stored_mb * 2**20), archive),
        archive=archive,
        catalogues=CatalogueStore(int(config.catalogues_mb * 2**20)),
        grammars=GrammarStore(
            text.tokenizer,
            engine.info,
            config.grammar_seconds,
            KeptGrammars(int(config.grammars_mb * 2**20), lambda: keys.num_tenants),
        ),
        templates=TemplateRenderer(config.chat_template_seconds),
        entrance=Entrance(),
        pool=FairPool(_WORKERS, "text"),
        builder=FairPool(1, "catalogues", most_late=2),
        speech=speech_of(engine.info, text.tokenizer),
        recent=recent,
        images=images_of(engine.info, text.tokenizer, recent),
        encoder=DaemonThreads(_STATES_WORKERS, "states"),
        room=Room(extraction.max_bytes, extraction.max_queued),
        fingerprint=system_fingerprint(engine.info),
        disk=None
        if config.files_dir is None
        else Disk(config.files_dir, int(config.files_mb * 2**20), lambda: keys.num_tenants, config.replica_tag),
    )


def close_context(context: Context) -> None:
    hearing = [] if context.speech is None else [context.speech.pool]
    seeing = [] if context.images is None else [context.images.pool]
    for pool in (context.pool, context.builder, *seeing):
        pool.shutdown()
    for threads in (context.encoder, *hearing):
        threads.shutdown(wait=False, cancel_futures=True)
    context.grammars.close()
    context.templates.close()
    if context.disk is not None:
        context.disk.close()


def make_app(
    engine: EngineLike, text: TextLike, config: ServerConfig, leases: LeaseTimes, keys: KeyRing, metrics: Metrics
) -> web.Application:
    context = make_context(engine, text, config, leases, keys, metrics)
    app = web.Application(middlewares=[guard], client_max_size=body_limit(context).num_bytes)
    app[CONTEXT] = context
    app[ERROR_FORMS] = ErrorForms(
        {path: door.error_form for door in DOORS for path in door.paths},
        {door.error_header: door.error_form for door in DOORS if door.error_header is not None},
    )
    for door in DOORS:
        if door.setup is not None:
            door.setup(app)
    app[console_state.LAST_LOOK] = console_state.LastLook()
    for resource in _resources():
        app.router.register_resource(resource)
    app.on_response_prepare.append(common_headers)
    app.cleanup_ctx.append(_worker_pool)
    if context.archive is not None:
        app.cleanup_ctx.append(_responses)
    if context.disk is not None:
        app[BATCH_RUNNER] = BatchRunner(context, context.disk)
        app.cleanup_ctx.append(_batches)
    return app


@cache
def _resources() -> tuple[web.AbstractResource, ...]:
    """Paths and what answers at each: the same in every application of a process, so they are made once."""
    router = web.UrlDispatcher()
    expect, expect_audio = expect_continue(), expect_continue(form.check_head)
    expecting: dict[object, Expectation] = {
        catalogues.upload: expect_continue(catalogues.check_head),
        files.upload: expect_continue(files.check_head),
        estates.take_in: expect_continue(estates.check_head),
        transcriptions.transcriptions: expect_audio,
        transcriptions.translations: expect_audio,
        **{route.handler: route.expectation for door in DOORS for route in door.routes if route.expectation},
    }
    for method, path, handler in (*ROUTES, *CONSOLE_ROUTES):
        resource = router.add_resource(path)
        for verb in (method, "HEAD") if method == "GET" else (method,):
            resource.add_route(verb, handler, expect_handler=expecting.get(handler, expect))
    return tuple(router.resources())


async def _worker_pool(app: web.Application) -> AsyncIterator[None]:
    yield
    close_context(app[CONTEXT])


async def _responses(app: web.Application) -> AsyncIterator[None]:
    """Of earlier processes are here when the first request comes; the last ones are in their file at the end."""
    context = app[CONTEXT]
    assert context.archive is not None
    context.stored.restore(await context.archive.load())
    yield
    await context.archive.close()


async def _batches(app: web.Application) -> AsyncIterator[None]:
    app[BATCH_RUNNER].start()
    yield
    await stop_batches(app)


async def stop_batches(app: web.Application) -> None:
    """Of what runs in the background nobody waits for the end."""
    if BATCH_RUNNER in app:
        await app[BATCH_RUNNER].stop()


class AppRunner(web.AppRunner):
    """Runs the application such that a client that leaves cancels its handler, and every error is JSON."""

    def __init__(self, app: web.Application, shutdown_timeout: float = 1.0, client_timeout: float = 30.0) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=shutdown_timeout)
        self._client_timeout = client_timeout

    @property
    def busy(self) -> bool:
        """Whether answers are on their way."""
        return self.server is not None and any(connection.busy for connection in self.server.connections)  # type: ignore[attr-defined]

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _JsonServer(
            _with_json_errors(server.request_handler),
            request_factory=server.request_factory,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # server/transport/decoding.py
            client_timeout=self._client_timeout,
        )


def _with_json_errors(handler: Answering) -> Answering:
    """What is refused before any middleware runs: an expectation at a URL where nothing is."""

    async def answering(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPExpectationFailed:
            response = unmet_expectation().response()
            response.force_close()
            return response

    return answering


class _JsonServer(web.Server):
    def __call__(self) -> JsonProtocol:
        return JsonProtocol(self, loop=self._loop, **self._kwargs)
