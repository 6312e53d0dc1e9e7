"""The command `bequest`, and `python -m bequest`: `cluster` runs servers, and everything else is a server's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["cluster"]:
        from bequest.cluster.command import main as cluster

        sys.exit(cluster(arguments[1:]))
    from bequest.server.__main__ import main as serve

    serve(arguments)


if __name__ == "__main__":
    main()
