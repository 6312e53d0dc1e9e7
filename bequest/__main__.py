"""The command `bequest`, and `python -m bequest`: `cluster` runs servers, and everything else is a server's own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        try:
            _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where its failure can be caught
    except BrokenPipeError:  # whoever read the output has enough of it, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the interpreter, which flushes once more
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:  # while a command's libraries are read, or at a question of its own
        sys.exit(128 + signal.SIGINT)


def _run(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["cluster"]:
        from bequest.cluster.command import main as cluster

        sys.exit(cluster(arguments[1:]))
    from bequest.server.__main__ import main as serve

    serve(arguments)


if __name__ == "__main__":
    main()
