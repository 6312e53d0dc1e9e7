"""Who makes the masks of launched steps (engine/constraints/masks.py), beside the event loop.

A step's masks can be made when the tokens before them are known: at once for rows that have sampled nothing yet, else
when the step before it comes back, which is when the device begins with this one. So results come here straight from
the thread that gets them: the masks are made in the time of a forward pass, whatever the event loop does meanwhile. A
thread that has only waited for the result makes them itself, because another one would have to wake up first; all
others leave them to the mask thread. Who has the lock has the matchers; the event loop only says which steps there are.

The thread that makes them tells the event loop of the result first, which then wants the interpreter. So everything is
prepared before, and one call makes the masks and tells the device, without the interpreter: on a slow host each wait
for it takes a tenth of a millisecond.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import cast

import numpy as np

from bequest.engine.constraints.grammar import GrammarMasks, GrammarMatcher, StepAnswers, mask_threads
from bequest.engine.constraints.masks import MaskChannel, StepMasks
from bequest.engine.kernels.flag import Flag
from bequest.engine.types import NO_DRAFT, IntArray, MaskSpec, Matcher, StepPlan, StepResult

log = logging.getLogger("bequest.engine")

_TURNS = 4  # steps whose masks may be in use or in the making at once


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step: its masks, the matchers they are of, and the tokens that were drafted for each of those."""

    spec: MaskSpec
    masks: StepMasks
    matchers: Sequence[GrammarMatcher]
    answers: StepAnswers  # the same
    drafts: tuple[tuple[int, ...], ...] | None = None  # None: nobody drafts, and each has one mask

    def see(self, result: StepResult) -> None:
        """Tells the matchers what the step has sampled."""
        if self.drafts is None:
            self.answers.see(result.tokens, result.bad_rows, self.spec.first_sample)
            return
        part = self.spec.part
        sampled = zip(result.tokens[part].tolist(), result.bad_rows[part].tolist(), strict=True)
        tokens = iter([None if bad else token for token, bad in sampled])
        for matcher, drafts in zip(self.matchers, self.drafts, strict=True):
            matcher.see(_accepted(list(islice(tokens, 1 + len(drafts))), drafts))


class MaskMaker:
    """`add` and `stop` are called on the event loop, `take` by whoever gets the results."""

    def __init__(self, channel: MaskChannel) -> None:
        self._channel = channel
        self._launched: dict[int, _Step] = {}  # by number: those with masks whose results have not come
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # for the mask thread
        self._work: _Work | None = None  # from the first grammar on

    def add(self, plan: StepPlan, matchers: Sequence[Matcher]) -> None:
        """A step is about to be launched; it is the last one. `matchers`: of the samples that have masks."""
        spec = plan.samples.masks
        if spec is None:
            return
        drafted = plan.samples.drafts
        drafts = None if drafted is None else _split(drafted[spec.part].tolist())
        if drafts is not None:  # as often as it is sampled
            firsts = accumulate((1 + len(tokens) for tokens in drafts[:-1]), initial=0)
            matchers = [matchers[first] for first in firsts]
        known = cast(Sequence[GrammarMatcher], matchers)
        step = _Step(spec, self._channel.open(spec.number, spec.num_rows), known, StepAnswers(known), drafts)
        self._launched[plan.step] = step
        if self._work is None:
            self._work = _Work()
            threading.Thread(target=self._run, name="bequest-masks", daemon=True).start()
        # Mostly the step before runs, and who gets its result makes these masks: nobody has to wake up now.
        if self._work.can_make_next(step):
            self._news.put(self._work.make)

    def take(self, result: StepResult, tell: Callable[[], None] | None) -> None:
        """A step has come back. Any thread; in the order of the steps. `tell`: tells the event loop, and this thread
        makes the masks. None: it has been told or is this thread, and the mask thread makes them."""
        step = self._launched.pop(result.step, None)
        if step is not None:
            self._channel.close(step.spec.number)
            assert self._work is not None
            if tell is None:
                self._news.put(partial(self._work.go_on, step, result, _nothing))
            else:
                self._work.go_on(step, result, tell)
        elif tell is not None:
            tell()

    def stop(self) -> None:
        """Lets go of every step: what it samples is not looked at any more."""
        self._news.put(None)
        self._channel.abandon()
        self._launched.clear()

    def _run(self) -> None:
        """The mask thread."""
        while (work := self._news.get()) is not None:
            work()


class _Work:
    """Steps whose masks are not made, and what it takes to make them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._filler = GrammarMasks(mask_threads())
        self._due: deque[_Step] = deque()  # in the order of the steps
        self._buffers: deque[IntArray] = deque()  # [rows, words], which take turns

    def can_make_next(self, step: _Step) -> bool:
        """A step is about to be launched. On the event loop, which has not got the lock: where its tokens come at the
        same time, this says so, or who has them finds the step."""
        self._due.append(step)
        return step.answers.ready

    def go_on(self, step: _Step, result: StepResult, tell: Callable[[], None]) -> None:
        """A step has come back, of which the event loop is to be told."""
        if not self._lock.acquire(blocking=False):
            tell()  # the mask thread is at the first masks of others
            tell = _nothing
            self._lock.acquire()
        try:
            self._advance(step, result)
            make = self._prepare(self._due.popleft()) if self._next_is_ready else _nothing
            tell()
            make()
            self._make_all()
        finally:
            self._lock.release()

    def make(self) -> None:
        with self._lock:
            self._make_all()

    def _make_all(self) -> None:
        """The masks that can be made now."""
        while self._next_is_ready:
            self._prepare(self._due.popleft())()

    @property
    def _next_is_ready(self) -> bool:
        return len(self._due) > 0 and self._due[0].answers.ready

    def _advance(self, step: _Step, result: StepResult) -> None:
        try:
            step.see(result)
        except Exception as error:
            log.exception("matchers could not be moved; their requests fail")
            for matcher in step.matchers:
                matcher.failed = repr(error)

    def _prepare(self, step: _Step) -> Callable[[], None]:
        """What makes the masks."""
        place, flag = step.masks.target
        filled = self._buffer(*step.masks.shape) if place is None else place
        return partial(self._make, step, filled, flag)

    def _make(self, step: _Step, filled: IntArray, flag: Flag | None) -> None:
        is_set = False
        try:
            if step.drafts is None:
                is_set = self._filler.fill_step(step.answers, step.matchers, filled, flag)
            else:
                self._filler.fill(step.matchers, filled, step.drafts)
        except Exception:
            log.exception("token masks could not be made; the constrained requests of the step fail")
            filled[:] = 0
        step.masks.fill(filled, is_set)

    def _buffer(self, num_rows: int, words: int) -> IntArray:
        """Memory that was touched before: new pages would take longer than the masks."""
        buffer = self._buffers.popleft() if len(self._buffers) == _TURNS else None
        if buffer is None or buffer.shape[0] < num_rows or buffer.shape[1] != words:
            buffer = np.empty((num_rows, words), np.int32)
        self._buffers.append(buffer)
        return buffer[:num_rows]


def _nothing() -> None:
    pass


def _split(drafts: list[int]) -> tuple[tuple[int, ...], ...]:
    """Of each matcher, whose last sample has none behind it."""
    split: list[tuple[int, ...]] = []
    begin = 0
    for number, token in enumerate(drafts):
        if token == NO_DRAFT:
            split.append(tuple(drafts[begin:number]))
            begin = number + 1
    return tuple(split)


def _accepted(tokens: list[int | None], drafts: tuple[int, ...]) -> list[int | None]:
    """Up to the first that is not as drafted."""
    wrong = next((i for i, draft in enumerate(drafts) if tokens[i] != draft), len(drafts))
    return tokens[: wrong + 1]
