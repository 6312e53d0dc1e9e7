"""The life of the server process: load, listen, serve, drain, exit.

SIGTERM or SIGINT: no new work, what runs gets --drain-timeout seconds to finish, exit 0. A second one ends at once,
and a third does not even wait for the device.
While the model loads there is nothing to finish, and the first one ends the process as it would any other.
SIGHUP reads the key file and the certificate again, at any time.
An engine that dies fails every open request, and then the process, with exit code 1: a supervisor starts it anew.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from aiohttp import web

from bequest.engine.config import ServerConfig
from bequest.engine.errors import ModelError
from bequest.server.access.auth import is_loopback
from bequest.server.access.keys import KeyRing
from bequest.server.app import AppRunner, make_app, stop_batches
from bequest.server.asks.reading import dialect_of
from bequest.server.context import CONTEXT, Context
from bequest.server.interfaces import EngineLike, TextLike
from bequest.server.operation.metrics import Metrics
from bequest.server.process.certificate import Certificate
from bequest.server.process.loading import loading_front
from bequest.server.process.memory import keep_trimmed
from bequest.server.process.systemd import Notifier, inherited_socket, keep_informed
from bequest.server.process.throughput import keep_reporting
from bequest.server.stores.batches import check_directory
from bequest.server.stores.leases import LeaseTimes
from bequest.server.wire.sentences import with_flags

_log = logging.getLogger("bequest")

# Loads the model: given the observer of its steps, an engine that is ready, and its text side.
Loader = Callable[[Metrics], Awaitable[tuple[EngineLike, TextLike]]]

EXIT_OK, EXIT_FAILED = 0, 1
_LOOK = 0.02  # seconds between looks whether the last answers have left
# New objects that the collector of cycles waits for. Requests leave none in cycles; but to look at those that are
# open, prompts of thousands of tokens among them, takes half a millisecond.
_YOUNG = 10_000
_BACKLOG = 2048  # connections that arrive at once; a refused one costs its client a second
_ACCEPTED_AT_ONCE = 16  # of them, before the event loop looks at what else there is to do
_GRACE, _HURRY = 10.0, 0.5  # seconds that the device gets for its last steps; it may hang
_LAST_ANSWERS = 1.0  # seconds for the errors of open requests to leave, when the engine is dead


async def serve(config: ServerConfig, leases: LeaseTimes, load: Loader) -> int:
    """Runs the server to its end; returns the exit code."""
    began = time.monotonic()
    try:
        keys = KeyRing(_all_keys(config), config.api_key_file)
        if config.files_dir is not None:
            check_directory(config.files_dir)
        certificate = None if config.ssl_certfile is None else Certificate(config.ssl_certfile, config.ssl_keyfile)
        tls = None if certificate is None else certificate.context
        listener = inherited_socket(os.environ) or _bind(config)
        config = replace(config, host=_host(listener))  # what systemd listens on, not what the flags say, is served
    except (ValueError, OSError) as error:
        _log.error("%s", error)
        return EXIT_FAILED
    notifier = Notifier(os.environ)
    with listener:
        metrics = Metrics()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _read_again, keys, certificate)
        notifier.status("loading the model")
        try:
            async with loading_front(listener, tls):
                engine, text = await load(metrics)
        except ModelError as error:
            _log.error("%s", with_flags(error))
            return EXIT_FAILED
        gc.freeze()  # what was loaded lives as long as the process: the collector need not look at it again
        gc.set_threshold(_YOUNG)
        _raise_file_limit()
        _warn_if_open(listener, keys)
        try:
            app = make_app(engine, text, config, leases, keys, metrics)
        except ModelError as error:
            _log.error("%s", with_flags(error))
            await engine.stop(_HURRY)
            return EXIT_FAILED
        engine.expect_tenants(keys.num_tenants)
        runner = AppRunner(app, client_timeout=config.client_timeout)
        await runner.setup()
        beside: list[asyncio.Future[None]] = []
        code = EXIT_FAILED
        try:
            signals = _Signals(keys, certificate, engine, notifier)  # who knows that it is ready may end it
            await web.SockSite(runner, listener, backlog=_ACCEPTED_AT_ONCE, ssl_context=tls).start()
            listener.listen(_BACKLOG)  # asyncio takes one number for both
            _log.info("%s", _dialect_line(app[CONTEXT]))
            _log.info("%s", _ready_line(listener, tls is not None, app[CONTEXT].model_names, time.monotonic() - began))
            notifier.ready(_status(engine))
            beside.append(asyncio.ensure_future(keep_informed(notifier, engine, lambda: _status(engine))))
            beside.append(asyncio.ensure_future(keep_trimmed()))
            beside.append(asyncio.ensure_future(keep_reporting(metrics, engine.load)))
            if certificate is not None:
                beside.append(asyncio.ensure_future(certificate.keep_fresh()))
            code = await _until_end(engine, runner, signals, notifier, config.drain_timeout)
            return code
        finally:
            for task in beside:
                task.cancel()
            # Tells what still runs, so that its streams end with an error and not with a cut.
            await engine.stop(_GRACE if code == EXIT_OK else _HURRY)
            await runner.cleanup()


class _Signals:
    """SIGTERM and SIGINT, one after the other, until they are given back. SIGHUP reads keys and certificate again."""

    def __init__(self, keys: KeyRing, certificate: Certificate | None, engine: EngineLike, notifier: Notifier) -> None:
        self._keys, self._certificate = keys, certificate
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self._called: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        for number in self._before:
            self._loop.add_signal_handler(number, self._called.put_nowait, number)
        self._loop.add_signal_handler(signal.SIGHUP, _reload, keys, certificate, engine, notifier)

    def next(self) -> asyncio.Task[signal.Signals]:
        return asyncio.create_task(self._called.get())

    def give_back(self) -> None:
        for number, before in self._before.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, before)  # one more ends the process; Python's own would show a traceback
        # It must not end what is about to end.
        self._loop.add_signal_handler(signal.SIGHUP, _read_again, self._keys, self._certificate)


async def _until_end(
    engine: EngineLike, runner: AppRunner, signals: _Signals, notifier: Notifier, drain_timeout: float
) -> int:
    """Waits for a signal or the engine's death, and for what has to follow it."""
    death = asyncio.ensure_future(engine.wait_dead())
    called = signals.next()
    draining: asyncio.Future[bool] | None = None
    try:
        await asyncio.wait({death, called}, return_when=asyncio.FIRST_COMPLETED)
        if not death.done():
            _log.info("%s", _draining_line(called.result(), engine.num_open, drain_timeout))
            notifier.stopping(f"draining {engine.num_open} requests for up to {drain_timeout:g} s")
            draining = asyncio.ensure_future(_drain(engine, runner, drain_timeout))
            called = signals.next()
            await asyncio.wait({death, called, draining}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            _log.error("the engine died: %r", death.result())
            notifier.stopping(f"the engine died: {death.result()!r}")
            await asyncio.sleep(_LAST_ANSWERS)
            return EXIT_FAILED
        if called.done():
            _log.info("%s again: ending at once", called.result().name)
            return 128 + called.result()
        assert draining is not None
        _log.info("drained" if draining.result() else "drain timeout: what was still open was ended")
        return EXIT_OK
    finally:
        for task in (death, called, draining):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        signals.give_back()


async def _drain(engine: EngineLike, runner: AppRunner, seconds: float) -> bool:
    """Takes no new work, and waits until what was asked for is done and its answers have left; False: not in time."""
    end = time.monotonic() + seconds
    _, drained = await asyncio.gather(stop_batches(runner.app), engine.drain(seconds))
    if not drained:
        return False
    while runner.busy:
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(_LOOK)
    return True


def _draining_line(number: signal.Signals, num_open: int, seconds: float) -> str:
    again = "Ctrl-C again" if number is signal.SIGINT else f"another {number.name}"
    return f"{number.name}: draining {num_open} requests for up to {seconds:g} s; {again} to stop at once"


def _dialect_line(context: Context) -> str:
    """How answers are read: by the model's template, or by the flags."""
    dialect = dialect_of(context)
    return f"reasoning parser: {dialect.reasoning or 'none'}; tool call parser: {dialect.calls.name}"


def _ready_line(listener: socket.socket, encrypted: bool, names: Sequence[str], seconds: float) -> str:
    """What a client needs: where, and by which name."""
    address, model = _address(listener, encrypted), " and ".join(names)
    if listener.family == socket.AF_UNIX:
        return f"ready on {address} in {seconds:.1f} s: {model}"
    return f"ready on {address} in {seconds:.1f} s: {model}; API {address}/v1, console {address}/"


def _status(engine: EngineLike) -> str:
    load = engine.load()
    used = 100 * load.used_blocks / max(load.usable_blocks, 1)
    return f"{engine.state}: {load.running} sequences run, {load.waiting} wait, {used:.0f}% of the cache is in use"


def _reload(keys: KeyRing, certificate: Certificate | None, engine: EngineLike, notifier: Notifier) -> None:
    notifier.reloading()
    try:
        _read_again(keys, certificate)
        engine.expect_tenants(keys.num_tenants)
    finally:
        notifier.send("READY=1")


def _read_again(keys: KeyRing, certificate: Certificate | None) -> None:
    if certificate is not None:
        certificate.read_again()
    if keys.path is not None:
        _read_keys_again(keys)
    elif certificate is None:
        _log.info("SIGHUP: there is no --api-key-file to read again")


def _read_keys_again(keys: KeyRing) -> None:
    try:
        keys.reload()
    except (ValueError, OSError) as error:
        _log.error("SIGHUP: the keys stay as they were: %s", error)
    else:
        _log.info("SIGHUP: %d keys", len(keys))


def _all_keys(config: ServerConfig) -> list[str]:
    """Keys of the command line and of the environment, which does not show in a process list."""
    named = os.environ.get("BEQUEST_API_KEY", "").split(",")
    return [*config.api_key, *(key for key in named if key.strip())]


def _bind(config: ServerConfig) -> socket.socket:
    """Before the model is loaded: a port that is taken should not cost a minute to find out."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from None
    return listener


def _raise_file_limit() -> None:
    """Every stream is a descriptor, and the usual soft limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _host(listener: socket.socket) -> str:
    """An IP address, or the path of a Unix socket."""
    name = listener.getsockname()
    return os.fsdecode(name) if listener.family == socket.AF_UNIX else str(name[0])


def _address(listener: socket.socket, encrypted: bool) -> str:
    host = _host(listener)
    if listener.family == socket.AF_UNIX:
        return f"unix:{host}"
    port = listener.getsockname()[1]
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _warn_if_open(listener: socket.socket, keys: KeyRing) -> None:
    host = _host(listener)
    if not keys and listener.family != socket.AF_UNIX and not is_loopback(host):
        _log.warning("listening on %s without keys: whoever reaches this address may use the model", host)
