"""How far the weights are: a bar on a terminal, and a line of the log now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Layer = TypeVar("Layer")
_log = logging.getLogger("bequest.start")
_SECONDS = 10.0  # between lines


def shown(layers: Iterable[Layer], count: int) -> Iterator[Layer]:
    """The layers themselves."""
    if sys.stderr.isatty():
        yield from tqdm(layers, "loading weights", count, unit=" layers", leave=False)
        return
    told = time.monotonic()
    for number, layer in enumerate(layers, 1):
        if number < count and time.monotonic() - told >= _SECONDS:
            told = time.monotonic()
            _log.info("weights: %d of %d layers", number, count)
        yield layer
