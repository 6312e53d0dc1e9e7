"""`bequest`: the composition root. It alone builds concrete objects.

A command imports what it needs when it is chosen: --help and a wrong flag answer without a server's libraries.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from bequest.engine.config import EngineConfig, ServerConfig
    from bequest.server.interfaces import EngineLike, TextLike
    from bequest.server.operation.metrics import Metrics


def main(arguments: Sequence[str] | None = None) -> None:
    _open_standard_files()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and (command := _command(arguments[0])) is not None:
        sys.exit(command(arguments[1:]))
    from bequest.server.process.options import parse

    engine_config, server_config = parse(arguments)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are keys to read again
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while the model loads is no error to show a traceback of
    from bequest.server.operation.logs import configure_logging

    configure_logging(server_config.log_level, server_config.log_format)
    _exit(_run(engine_config, server_config))


def _command(name: str) -> Callable[[Sequence[str]], int] | None:
    """What a word other than `serve` asks for."""
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
        case "estate":
            from bequest.cli.estates import main as found
        case _:
            return None
    return found


def _open_standard_files() -> None:
    """Whoever started us may have closed them; a socket that got their number would be written the log.

    No text is an error to them: what the terminal has no letter for is a question mark, and bytes that are no text
    come in as surrogates, as they do on the command line, for whoever reads them to refuse."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def _exit(code: int) -> NoReturn:
    """At once: the interpreter's own end would wait for every worker thread, and one that hangs, or that is an hour
    from the end of its text, would hold it up."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _run(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    from bequest.server.asks.notes import ConversationNotes
    from bequest.server.process.serve import serve
    from bequest.server.stores.leases import LeaseTimes

    async def load(metrics: Metrics) -> tuple[EngineLike, TextLike]:
        from bequest.engine.build import build_engine  # torch is slow to import: the socket is open first

        built = await build_engine(engine_config, metrics, notes=ConversationNotes())
        return built.engine, built.text

    leases = LeaseTimes(
        engine_config.default_ttl,
        engine_config.max_ttl,
        engine_config.durable_by_default,
        engine_config.estate_dir,
        engine_config.estate_peers,
        engine_config.keeps_estates,
    )
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
