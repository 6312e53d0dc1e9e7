"""The server of benchmarks/overload.py: it takes down when each request reached which stage.

    python -m benchmarks.staged_server TIMED STAGES WITHOUT serve [flags]

TIMED is 1 for a device that only waits, 8 ms per step and 40 µs per token; STAGES is the file that the stages of all
requests are written to at the end; WITHOUT is a mechanism of benchmarks/policy.py that is switched off, or empty. Times
are on time.monotonic, which processes share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy import WITHOUT
from bequest.engine.build import CacheSizes, build_engine, make_scheduler
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning
from bequest.engine.text import load_text
from bequest.engine.types import Delta, MaskSource, ModelInfo, Request, Sink, StepPlan, StepResult
from bequest.engine.types.catalogue import Catalogue
from bequest.server.access.marks import ARRIVED
from bequest.server.interfaces import EngineLike, TextLike
from bequest.server.operation.logs import CURRENT, configure_logging
from bequest.server.operation.metrics import Metrics
from bequest.server.process.options import parse
from bequest.server.process.serve import serve
from bequest.server.stores.leases import LeaseTimes

STAGES = ("read", "submitted", "admitted", "computed", "delivered")  # of a first token, in this order


class TimedRunner:
    """Takes the time that a device would, and samples a word."""

    def __init__(self, words: list[int]) -> None:
        self._words = np.asarray(words, np.int32)

    def connect(self, masks: MaskSource) -> None:
        pass

    def register(self, handle: int, catalogue: Catalogue) -> None:
        pass

    def release(self, handle: int) -> None:
        pass

    def is_quick(self, plan: StepPlan) -> bool:
        return False

    def launch(self, plan: StepPlan) -> StepResult:
        time.sleep(0.008 + 40e-6 * plan.num_tokens)
        chosen = self._words[plan.samples.positions % len(self._words)]
        return StepResult(step=plan.step, tokens=chosen, bad_rows=np.zeros(len(chosen), np.bool_))

    def close(self) -> None:
        pass


class StagedEngine:
    """An engine, and when its requests reached their stages, by their ids."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.stages: dict[str, list[float | None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, sink: Sink, *, goes_on: bool = False) -> None:
        http = CURRENT.get()
        began, submitted = None if http is None else http[ARRIVED], time.monotonic()

        def first(delta: Delta) -> None:
            nonlocal deliver
            deliver = sink
            self.stages[request.id] = [began, submitted, times.admitted, times.first_token, time.monotonic()]
            sink(delta)

        deliver: Callable[[Delta], None] = first
        self._engine.submit(request, lambda delta: deliver(delta), goes_on=goes_on)
        times = self._engine._groups[request.id].times


def timed_engine(config: EngineConfig, metrics: Metrics, tuning: Tuning) -> tuple[AsyncEngine, TextLike]:
    """All is real but the device."""
    sys.setswitchinterval(0.0005)
    text = load_text(embedded_model_path())
    info = ModelInfo("timed", "timed", 2048, text.tokenizer.vocab_size, (), "none", 0)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=256, prefix_caching=True, tuning=tuning
    )
    runner = TimedRunner(text.tokenizer.encode("one two three four five"))
    scheduler = make_scheduler(limits, CacheSizes(16, 20_000), ())
    engine = AsyncEngine(info, scheduler, runner, text.tokenizer, max_queued=config.max_queued, observer=metrics)
    return engine, text


def main() -> None:
    timed, file, without, *arguments = sys.argv[1:]
    tuning = WITHOUT[without] if without else DEFAULT
    engine_config, config = parse(arguments)
    configure_logging("info")
    staged: list[StagedEngine] = []

    async def load(metrics: Metrics) -> tuple[EngineLike, TextLike]:
        if timed == "1":
            engine, text = timed_engine(engine_config, metrics, tuning)
        else:
            built = await build_engine(engine_config, metrics, tuning=tuning)
            engine, text = built.engine, built.text
        staged.append(StagedEngine(engine))
        return staged[0], text

    code = asyncio.run(serve(config, LeaseTimes(300, 600), load))
    Path(file).write_text(json.dumps(staged[0].stages))
    sys.exit(code)


if __name__ == "__main__":
    main()
