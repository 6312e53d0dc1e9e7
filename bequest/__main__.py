"""The command `bequest`, and `python -m bequest`: `cluster` runs servers, and everything else is a server's own."""

from __future__ import annotations

import os
import select
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
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            code = 128 + signal.SIGPIPE
        elif _is_unwritten():
            print(f"bequest: standard output cannot be written: {error.strerror}", file=sys.stderr)
            code = 1
        else:
            raise  # it was another file or pipe, to a process of a command's own say
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the interpreter, which flushes once more
        sys.exit(code)
    except KeyboardInterrupt:  # while a command's libraries are read, or at a question of its own
        sys.exit(128 + signal.SIGINT)


def _is_unread() -> bool:
    """Whether whoever read the output has enough of it, as `| head` has."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _is_unwritten() -> bool:
    """Whether output cannot be written, as to a disk that is full: not even an end of the line."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _run(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["cluster"]:
        from bequest.cluster.command import main as cluster

        sys.exit(cluster(arguments[1:]))
    from bequest.server.__main__ import main as serve

    serve(arguments)


if __name__ == "__main__":
    main()
