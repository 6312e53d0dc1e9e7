"""`python -m bequest`: the same as the command `bequest`."""

from __future__ import annotations

from bequest.server.__main__ import main

if __name__ == "__main__":
    main()
