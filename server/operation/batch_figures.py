"""How batches go: what waits and runs at this moment, and what has come of lines and batches since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_ENDS = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class BatchLoad:
    batches: int = 0  # that have not ended
    running: int = 0  # lines
    waiting: int = 0  # lines whose answers are still to come, and that do not run


class BatchFigures:
    def __init__(self) -> None:
        self.load: Callable[[], BatchLoad] = BatchLoad  # asked at each exposition
        self._lines = {"completed": 0, "failed": 0}
        self._ended: Counter[str] = Counter()

    def on_line(self, *, failed: bool) -> None:
        self._lines["failed" if failed else "completed"] += 1

    def on_end(self, status: str) -> None:
        self._ended[status] += 1

    def collect(self) -> Iterator[Metric]:
        load = self.load()
        for name, text, value in (
            ("bequest:batches_open", "Batches that have not ended.", load.batches),
            ("bequest:batch_lines_running", "Lines of batches that run.", load.running),
            ("bequest:batch_lines_waiting", "Lines of batches that wait to run.", load.waiting),
        ):
            yield GaugeMetricFamily(name, text, value)
        lines = CounterMetricFamily("bequest:batch_lines", "Lines that were answered.", labels=["outcome"])
        for outcome, count in self._lines.items():
            lines.add_metric([outcome], count)
        yield lines
        ended = CounterMetricFamily("bequest:batches", "Batches that ended, by status.", labels=["status"])
        for status in _ENDS:
            ended.add_metric([status], self._ended[status])
        yield ended
