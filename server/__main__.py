"""`bequest`: the composition root. It alone builds concrete objects."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from bequest.engine.config import EngineConfig, ServerConfig
from bequest.server.interfaces import EngineLike, TextLike
from bequest.server.operation.logs import configure_logging
from bequest.server.operation.metrics import Metrics
from bequest.server.process.options import parse
from bequest.server.process.serve import EXIT_OK, serve
from bequest.server.stores.leases import LeaseTimes


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and (command := _command(arguments[0])) is not None:
        sys.exit(command(arguments[1:]))
    engine_config, server_config = parse(arguments)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are keys to read again
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while the model loads is no error to show a traceback of
    configure_logging(server_config.log_level, server_config.log_format)
    _exit(_run(engine_config, server_config))


def _command(name: str) -> Callable[[Sequence[str]], int] | None:
    """What a word other than `serve` asks for; a server needs nothing of it, so it is imported here."""
    match name:
        case "bench":
            from bequest.bench.command import main as found
        case "install-service":
            from bequest.server.process.service import main as found
        case "chat":
            from bequest.cli.chat import main as found
        case "run":
            from bequest.cli.run import main as found
        case "pull":
            from bequest.cli.models import pull as found
        case "list":
            from bequest.cli.models import list_models as found
        case "rm":
            from bequest.cli.models import rm as found
        case _:
            return None
    return found


def _exit(code: int) -> NoReturn:
    """A server that failed ends at once: a device that hangs could hold the interpreter's own end up for ever."""
    if code != EXIT_OK:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _run(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    async def load(metrics: Metrics) -> tuple[EngineLike, TextLike]:
        from bequest.engine.build import build_engine  # torch is slow to import, and --help does not need it

        built = await build_engine(engine_config, metrics)
        return built.engine, built.text

    leases = LeaseTimes(engine_config.default_ttl, engine_config.max_ttl)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(server_config, leases, load))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; None is asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


if __name__ == "__main__":
    main()
