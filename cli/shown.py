"""An answer on the terminal while it comes: what is said on stdout, what is thought beside it, dimmed, if somebody
looks."""

from __future__ import annotations

import os
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
            print(dimmed(thought), end="", flush=True, file=sys.stderr)
        said = delta.get("content") or ""
        if said and self._thinks:
            self._thinks = False
            print("\n", flush=True, file=sys.stderr)
        self.text += said
        print(said, end="", flush=True)

    def break_off(self) -> None:
        """An error stands on a line of its own, behind what was said."""
        if self.text:
            print(flush=True)


def dimmed(text: str) -> str:
    """Where the terminal can, and its user has nothing against it (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"
