"""A device that is not there, and takes its time: steps are queued behind each other, and their tokens keep to masks.

A step begins when it is launched and the one before it has ended, takes as long as it is told to, and ends no earlier
than its masks are there, as on a GPU. So what the host does between two steps shows as a step that is late. Tokens
that a grammar allows are chosen beforehand: a device takes no time of the host to choose them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.null_runner import NullRunner
from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.constraints.grammar import Grammar, GrammarMasks
from bequest.engine.engine import AsyncEngine
from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.text import TextBundle, load_text
from bequest.engine.types import IntArray, MaskSource, ModelInfo, StepPlan, StepResult, mask_words

_TURNS = 4  # steps whose masks are in use at once


class TimedStep:
    slow_to_read = False

    def __init__(self, runner: TimedRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan
        self._launched = time.perf_counter()
        self._masked = threading.Event()
        self.masks: IntArray | None = None
        self.masked_at = 0.0

    def send(self, source: MaskSource) -> None:
        spec = self._plan.samples.masks
        if spec is not None:
            self.masks = self._runner.place(spec.num_rows)
            source.of(spec.number).send_to(self.masks, self._note_masks)

    def _note_masks(self) -> None:
        self.masked_at = time.perf_counter()
        self._masked.set()

    @property
    def done(self) -> bool:
        return False

    def wait_computed(self) -> None:
        pass

    def wait(self) -> StepResult:
        runner = self._runner
        end = max(self._launched, runner.busy_until) + runner.seconds
        if (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        if self.masks is not None:
            self._masked.wait()
        runner.busy_until = max(end, self.masked_at)
        return runner.sampled(self._plan, self.masks)


class TimedRunner(NullRunner):
    def __init__(self, tokens: IntArray, seconds: float, vocab_size: int) -> None:
        super().__init__(tokens)
        self.seconds = seconds
        self.words = mask_words(vocab_size)
        self.busy_until = 0.0
        self._source: MaskSource | None = None
        self._scripts = np.zeros((1, 0), np.int32)
        self._prompt_len = 0
        self._places: deque[IntArray] = deque()  # of masks; they take turns, as a GPU's pinned memory does

    def place(self, num_rows: int) -> IntArray:
        """[num_rows, words]"""
        place = self._places.popleft() if len(self._places) == _TURNS else None
        if place is None or len(place) < num_rows:
            place = np.zeros((num_rows, self.words), np.int32)
        self._places.append(place)
        return place[:num_rows]

    def connect(self, masks: MaskSource) -> None:
        self._source = masks

    def launch(self, plan: StepPlan) -> TimedStep:  # type: ignore[override]  # queued, where the other is done
        step = TimedStep(self, plan)
        assert self._source is not None
        step.send(self._source)
        return step

    def follow(self, scripts: IntArray, prompt_len: int) -> None:
        """`scripts` [rows, tokens]: what rows with a grammar say behind a prompt."""
        self._scripts, self._prompt_len = scripts, prompt_len

    def sampled(self, plan: StepPlan, masks: IntArray | None) -> StepResult:
        result = super().launch(plan)
        spec = plan.samples.masks
        if masks is not None and spec is not None:
            rows, positions = plan.samples.rows[spec.part], plan.samples.positions[spec.part]
            chosen = self._scripts[rows % len(self._scripts), positions - self._prompt_len]
            assert (masks[np.arange(len(masks)), chosen // 32] >> chosen % 32 & 1).all(), "a mask is another one"
            result.tokens[spec.part] = chosen
        return result


def scripts_of(grammar: Grammar, num_rows: int, num_tokens: int) -> IntArray:
    """[rows, tokens] that a grammar allows: each is any of those that may come, with equal chances. REQUIRES: it has
    no end"""
    random = np.random.default_rng(1)
    scripts = np.zeros((num_rows, num_tokens), np.int32)
    mask = np.zeros((1, mask_words(grammar.vocab_size)), np.int32)
    for script in scripts:
        matcher, masks = grammar.matcher(), GrammarMasks(1)
        for number in range(num_tokens):
            masks.fill([matcher], mask)
            script[number] = random.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))
            matcher.see([int(script[number])])
    return scripts


def timed_engine(
    seconds: float, most: int, directory: Path | None = None
) -> tuple[AsyncEngine, TextBundle, TimedRunner]:
    """An engine over such a device, with the tokenizer of a model, else the embedded one's. Within a running event
    loop."""
    text = load_text(embedded_model_path() if directory is None else directory)
    words = np.asarray(text.tokenizer.encode("What is the capital of France? Paris, of course. " * 20))
    vocab_size, eos = text.tokenizer.vocab_size, text.tokenizer.eos_token_id
    if eos is None:
        eos = vocab_size - 1
    info = ModelInfo("timed", "timed", 8192, vocab_size, (eos,), "none", 0)
    runner = TimedRunner(words, seconds, info.vocab_size)
    limits = SchedulerLimits(max_num_seqs=most, max_num_batched_tokens=8192, prefix_caching=True)
    make = partial(make_scheduler, limits, CacheSizes(16, 20_000), info.eos_token_ids)
    engine = AsyncEngine(info, make(), runner, text.tokenizer)  # type: ignore[arg-type]  # no bytes of blocks
    return engine, text, runner
