"""Token masks of rows that follow a grammar: made on the host while the step's forward runs, needed when it samples.

A plan names its constrained rows before the tokens they stand behind are known here. Its StepMasks is the one thing of
a plan that comes later: it is made as soon as those tokens are back (mask_maker.py), and waited for between forward
and sampling, by the device thread or by the device itself. Nothing waits the other way round: the step before is
already queued or done, so that a launched step always ends. When the engine stops, masks that nobody will make allow
anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from bequest.engine.types import IntArray


def mask_words(vocab_size: int) -> int:
    """Words of a mask: bit i % 32 of word i / 32 says whether token i may come."""
    return -(-vocab_size // 32)


class StepMasks:
    """The masks of samples [first_sample, first_sample + num_rows) of a step. Filled once, from another thread."""

    __slots__ = ("_lock", "_masks", "_place", "_ready", "_then", "first_sample", "num_rows", "vocab_size")

    def __init__(self, first_sample: int, num_rows: int, vocab_size: int) -> None:
        self.first_sample = first_sample
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._masks: IntArray | None = None
        self._place: IntArray | None = None
        self._then: Callable[[], None] | None = None

    def send_to(self, place: IntArray, then: Callable[[], None]) -> None:
        """Has the masks written to `place` [num_rows, words] and calls `then`, once: now, if they are there, or else on
        the thread that fills them."""
        with self._lock:
            self._place, self._then = place, then
            if self._masks is not None:
                self._send(self._masks)

    @property
    def place(self) -> IntArray | None:
        """Where they are best made."""
        return self._place

    def fill(self, masks: IntArray) -> None:
        """`masks` [num_rows, words]."""
        assert masks.shape == (self.num_rows, mask_words(self.vocab_size)) and masks.dtype == np.int32
        with self._lock:
            if self._masks is None:
                self._masks = masks
                self._send(masks)
                self._ready.set()

    def _send(self, masks: IntArray) -> None:
        if self._place is not None and self._then is not None:
            if masks is not self._place:
                np.copyto(self._place, masks)
            self._then()

    def abandon(self) -> None:
        """Nobody looks at what is sampled any more."""
        self.fill(np.full((self.num_rows, mask_words(self.vocab_size)), -1, np.int32))

    @property
    def filled(self) -> bool:
        return self._ready.is_set()

    def wait(self) -> IntArray:
        """[num_rows, words]; blocks until they are there."""
        self._ready.wait()
        assert self._masks is not None
        return self._masks
