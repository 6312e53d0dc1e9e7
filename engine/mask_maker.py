"""Who makes the masks of launched steps: asked by the event loop, made on a thread of its own (engine/masks.py).

A step's masks can be made when the tokens before them are known: at once for rows whose last token was applied, else
when the step before it comes back, which is when the device begins with this one. The mask thread then has the time of
a forward pass. It owns every matcher; the event loop hands over tokens, and looks inside only when a row has failed.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.grammar import GrammarMasks, GrammarMatcher
from engine.masks import StepMasks, mask_words
from engine.sequence import Sequence, Status
from engine.step import Launch

log = logging.getLogger("bequest.engine")

_SWITCH_SECONDS = 1e-4

# A matcher and the tokens it has not seen; None: the sequence has ended, and nobody will look at what is sampled.
_Row = tuple[GrammarMatcher, list[int]] | None


class MaskMaker:
    """All methods are called on the event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bequest-masks")
        self._filler: GrammarMasks | None = None  # made when the first grammar comes
        self._unasked: deque[Launch] = deque()
        self._asked: deque[StepMasks] = deque()

    def add(self, launch: Launch) -> None:
        """A step was launched; it is the last one."""
        if launch.plan.masks is not None:
            self._unasked.append(launch)

    def ask(self) -> None:
        """Has the masks made of the steps whose tokens have become known."""
        while self._unasked and _is_known(self._unasked[0]):
            launch = self._unasked.popleft()
            masks = launch.plan.masks
            assert masks is not None
            while self._asked and self._asked[0].filled:
                self._asked.popleft()
            self._asked.append(masks)
            self._thread.submit(self._make, masks, [_row_of(sequence) for sequence, _ in launch.masked])
            time.sleep(0)  # lets the mask thread have the interpreter at once: the device is further than this loop

    def stop(self) -> None:
        """Lets go of every step: what it samples is not looked at any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for masks in [*self._asked, *(launch.plan.masks for launch in self._unasked)]:
            if masks is not None:
                masks.abandon()
        self._unasked.clear()
        self._asked.clear()

    def _make(self, masks: StepMasks, rows: Items[_Row]) -> None:
        filled = np.full((masks.num_rows, mask_words(masks.vocab_size)), -1, np.int32)
        try:
            live = [(index, row[0]) for index, row in enumerate(rows) if row is not None]
            for matcher, tokens in filter(None, rows):
                matcher.advance(tokens)
            if self._filler is None:
                # From the result of a step to the masks of the next the interpreter changes hands three times.
                sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
                self._filler = GrammarMasks()
            self._filler.fill(live, filled)
        except Exception:
            log.exception("token masks could not be made; the constrained requests of the step fail")
            filled = np.zeros_like(filled)
        masks.fill(filled)


def _is_known(launch: Launch) -> bool:
    """Whether every token before those that the step samples has been applied, or does not matter any more."""
    return all(s.status is Status.FINISHED or len(s.tokens) >= position for s, position in launch.masked)


def _row_of(sequence: Sequence) -> _Row:
    matcher = sequence.matcher
    if sequence.status is Status.FINISHED:
        return None
    assert matcher is not None
    tokens = list(sequence.tokens[sequence.num_prompt + matcher.num_given :])
    matcher.num_given += len(tokens)
    return matcher, tokens
