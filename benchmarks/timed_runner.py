"""A device that is not there, and takes its time: steps are queued behind each other, and their tokens keep to masks.

A step begins when it is launched and the one before it has ended, takes as long as it is told to, and ends no earlier
than its masks are there, as on a GPU. So what the host does between two steps shows as a step that is late.
"""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np

from benchmarks.null_runner import NullRunner
from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.engine import AsyncEngine
from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.text import TextBundle, load_text
from bequest.engine.types import IntArray, MaskSource, ModelInfo, StepPlan, StepResult, mask_words

_GROUPS = 8  # of rows, which look for an allowed token from different places on


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
            self.masks = np.empty((spec.num_rows, self._runner.words), np.int32)
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

    def connect(self, masks: MaskSource) -> None:
        self._source = masks

    def launch(self, plan: StepPlan) -> TimedStep:  # type: ignore[override]  # queued, where the other is done
        step = TimedStep(self, plan)
        assert self._source is not None
        step.send(self._source)
        return step

    def sampled(self, plan: StepPlan, masks: IntArray | None) -> StepResult:
        result = super().launch(plan)
        spec = plan.samples.masks
        if masks is not None and spec is not None:
            result.tokens[spec.part] = _allowed(masks, plan.step)
        return result


def _allowed(masks: IntArray, step: int) -> IntArray:
    """A token of each mask [rows, words]: the first behind a place that is another one in each step."""
    chosen = np.empty(len(masks), np.int32)
    for group in range(min(_GROUPS, len(masks))):
        rows = masks[group::_GROUPS]
        begin = (step * 7919 + group * 104_729) % rows.shape[1]
        some = np.concatenate([rows[:, begin:], rows[:, :begin]], axis=1) != 0
        words = (some.argmax(axis=1) + begin) % rows.shape[1]
        bits = rows[np.arange(len(rows)), words].view(np.uint32).astype(np.int64)
        chosen[group::_GROUPS] = 32 * words + np.log2(bits & -bits).astype(np.int32)
    return chosen


def timed_engine(seconds: float, most: int) -> tuple[AsyncEngine, TextBundle]:
    """An engine over such a device, with the embedded model's tokenizer. Within a running event loop."""
    text = load_text(embedded_model_path())
    words = np.asarray(text.tokenizer.encode("What is the capital of France? Paris, of course. " * 20))
    eos = text.tokenizer.eos_token_id
    assert eos is not None
    info = ModelInfo("timed", "timed", 8192, text.tokenizer.vocab_size, (eos,), "none", 0)
    runner = TimedRunner(words, seconds, info.vocab_size)
    limits = SchedulerLimits(max_num_seqs=most, max_num_batched_tokens=8192, prefix_caching=True)
    make = partial(make_scheduler, limits, CacheSizes(16, 20_000), info.eos_token_ids)
    engine = AsyncEngine(info, make(), runner, text.tokenizer)  # type: ignore[arg-type]  # no bytes of blocks
    return engine, text
