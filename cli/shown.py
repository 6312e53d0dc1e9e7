"""An answer on the terminal while it comes: what is said on stdout, what is thought beside it, dimmed, if somebody
looks."""

from __future__ import annotations

import sys
from typing import Any


class ShownAnswer:
    def __init__(self) -> None:
        self.text = ""
        self._thinks = False

    def take(self, delta: dict[str, Any]) -> None:
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        if thought and sys.stderr.isatty():
            self._thinks = True
            print(f"\x1b[2m{thought}\x1b[0m", end="", flush=True, file=sys.stderr)
        said = delta.get("content") or ""
        if said and self._thinks:
            self._thinks = False
            print("\n", flush=True, file=sys.stderr)
        self.text += said
        print(said, end="", flush=True)
