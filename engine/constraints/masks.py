"""Token masks of rows that follow a grammar: made on the host while the step's forward runs, needed when it samples.

A plan names its constrained rows before the tokens they stand behind are known here. Their masks come later, on a
channel of their own, by a number that the plan has too: they are made as soon as those tokens are back (mask_maker.py),
and waited for between forward and sampling, by the device thread or by the device itself. Nothing waits the other way
round: the step before is already queued or done, so that a launched step always ends. When the engine stops, masks that
nobody will make allow anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from bequest.engine.kernels.flag import Flag
from bequest.engine.types import IntArray, mask_words


class StepMasks:
    """The masks [rows, words] of some samples of a step. Filled once, from another thread."""

    __slots__ = ("_lock", "_masks", "_ready", "_target", "shape")

    def __init__(self, num_rows: int, words: int) -> None:
        self.shape = num_rows, words
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._masks: IntArray | None = None
        self._target: tuple[IntArray, Callable[[], None]] | None = None

    def send_to(self, place: IntArray, then: Callable[[], None]) -> None:
        """Has the masks written to `place` [rows, words] and calls `then`, once: now, if they are there, or else on the
        thread that fills them."""
        with self._lock:
            self._target = place, then
            if self._masks is not None:
                self._send(self._masks)

    @property
    def target(self) -> tuple[IntArray | None, Flag | None]:
        """Where they are best made, and what whoever makes them there may set by himself."""
        if self._target is None:
            return None, None
        place, then = self._target
        return place, then if isinstance(then, Flag) else None

    def fill(self, masks: IntArray, flag_is_set: bool = False) -> None:
        """`masks` [rows, words]. `flag_is_set`: they are where they are sent to, and that is known there."""
        assert masks.shape == self.shape and masks.dtype == np.int32
        with self._lock:
            if self._masks is None:
                self._masks = masks
                if not flag_is_set:
                    self._send(masks)
                self._ready.set()

    def _send(self, masks: IntArray) -> None:
        if self._target is not None:
            place, then = self._target
            if masks is not place:
                np.copyto(place, masks)
            then()

    def abandon(self) -> None:
        """Nobody looks at what is sampled any more."""
        self.fill(np.full(self.shape, -1, np.int32))

    @property
    def filled(self) -> bool:
        return self._ready.is_set()

    def wait(self) -> IntArray:
        """[rows, words]; blocks until they are there."""
        self._ready.wait()
        assert self._masks is not None
        return self._masks


class MaskChannel:
    """The masks of launched steps by their numbers. Opened and closed by who makes them, looked up by a runner."""

    def __init__(self, vocab_size: int) -> None:
        self._words = mask_words(vocab_size)
        self._open: dict[int, StepMasks] = {}

    def open(self, number: int, num_rows: int) -> StepMasks:
        """Before the plan that names it is launched."""
        assert number not in self._open
        masks = self._open[number] = StepMasks(num_rows, self._words)
        return masks

    def of(self, number: int) -> StepMasks:
        return self._open[number]

    def close(self, number: int) -> None:
        """The step has come back. Who still holds its masks may look at them."""
        del self._open[number]

    def abandon(self) -> None:
        """Lets go of every step: nobody looks at what is sampled any more."""
        for masks in list(self._open.values()):
            masks.abandon()
