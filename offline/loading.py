"""What is shown while a model loads. The weights have a bar of their own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bequest.engine.config import EngineConfig


@contextmanager
def announced(config: EngineConfig, progress: bool | None) -> Iterator[None]:
    """Two lines on stderr; `progress` None: on a terminal alone."""
    shown = sys.stderr.isatty() if progress is None else progress
    began, name = time.monotonic(), config.model or "the embedded model"
    if shown:
        print(f"loading {name} ...", file=sys.stderr, flush=True)
    yield
    if shown:
        print(f"loaded {name} in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
