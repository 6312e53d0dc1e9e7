"""The figures as a picture. matplotlib is no dependency: whoever wants a picture has it or installs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from bequest.bench.client import BenchError
from bequest.bench.report import Row
from bequest.bench.two_stage import Mode


def need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: `pip install 'bequest[bench]'`, or leave --plot out")


def draw(rows: Sequence[Row], path: str, title: str) -> None:
    """Bars of the median, a group for each concurrency, with a line up to the 99th percentile."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    levels = list(dict.fromkeys(row.concurrency for row in rows))
    modes = [mode for mode in Mode if any(row.mode is mode for row in rows)]
    figure, axes = pyplot.subplots(figsize=(max(7.0, 1.5 + 2.2 * len(levels)), 4.5), layout="constrained")
    width = 0.8 / len(modes)
    for place, mode in enumerate(modes):
        drawn = [row for row in rows if row.mode is mode]
        middles = [levels.index(row.concurrency) + (place - (len(modes) - 1) / 2) * width for row in drawn]
        medians = [row.first_ms[50] for row in drawn]
        tails = [row.first_ms[99] - row.first_ms[50] for row in drawn]
        axes.bar(middles, medians, width, yerr=([0] * len(drawn), tails), capsize=2, label=mode.value)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("{x:,g}")
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
    axes.set_xlabel("jobs at once")
    axes.set_ylabel("stage 2, ms: median, line to p99")
    axes.set_title(title, fontsize=9)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
