"""The figures of a load: a row for each level, as a table, as JSON and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bequest.bench.load import LevelResult
from bequest.bench.tables import SHARES, aligned, percentile

_COLUMNS = ("first_ms", "between_ms", "total_ms")


@dataclass(frozen=True, slots=True)
class LoadRow:
    level: str
    concurrency: int
    rate: float | None
    requests: int
    failed: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    first_ms: Mapping[int, float]  # to the first token, by percentile
    between_ms: Mapping[int, float]  # between two events of a stream
    total_ms: Mapping[int, float]
    errors: Mapping[str, int]


def summarise_load(result: LevelResult) -> LoadRow:
    answers, level = result.answers, result.level
    seconds = max(result.seconds, 1e-9)
    return LoadRow(
        level=str(level),
        concurrency=level.concurrency,
        rate=level.rate,
        requests=len(answers) + len(result.errors),
        failed=len(result.errors),
        seconds=result.seconds,
        requests_per_second=len(answers) / seconds,
        output_tokens_per_second=sum(answer.output_tokens for answer in answers) / seconds,
        prompt_tokens_per_second=sum(answer.prompt_tokens for answer in answers) / seconds,
        first_ms=_percentiles([answer.first_seconds for answer in answers]),
        between_ms=_percentiles([gap for answer in answers for gap in answer.gaps]),
        total_ms=_percentiles([answer.total_seconds for answer in answers]),
        errors=Counter(result.errors),
    )


def _percentiles(seconds: Sequence[float]) -> dict[int, float]:
    return {share: percentile(seconds, share) * 1e3 for share in SHARES} if seconds else {}


def load_table(rows: Sequence[LoadRow]) -> str:
    titles = ["load", "requests/s", "output tokens/s", "first token, ms: p50", "p90", "p99", "between: p50", "p99"]
    titles += ["total: p50", "p99", "failed"]
    return aligned([titles, *map(_cells, rows)], left={0})


def _cells(row: LoadRow) -> list[str]:
    def shown(values: Mapping[int, float], shares: Sequence[int]) -> list[str]:
        return [f"{values[share]:,.1f}" if values else "–" for share in shares]

    return [
        row.level,
        f"{row.requests_per_second:,.2f}",
        f"{row.output_tokens_per_second:,.1f}",
        *shown(row.first_ms, SHARES),
        *shown(row.between_ms, (50, 99)),
        *shown(row.total_ms, (50, 99)),
        str(row.failed),
    ]


def load_json(rows: Sequence[LoadRow], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"settings": dict(settings), "rows": [_row_json(row) for row in rows]}


def _row_json(row: LoadRow) -> dict[str, Any]:
    fields = asdict(row)
    for name in _COLUMNS:
        fields[name] = {f"p{share}": round(value, 3) for share, value in fields[name].items()}
    return fields


def draw_load(rows: Sequence[LoadRow], path: str, title: str) -> None:
    """Output tokens a second as bars, the first token's median and 99th percentile as lines."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (rate, wait) = pyplot.subplots(1, 2, figsize=(10.0, 4.0), layout="constrained")
    places = range(len(rows))
    rate.bar(places, [row.output_tokens_per_second for row in rows])
    rate.set_ylabel("output tokens a second")
    for share in (50, 99):
        wait.plot(places, [row.first_ms.get(share, 0.0) for row in rows], marker="o", label=f"p{share}")
    wait.set_ylabel("to the first token, ms")
    wait.set_ylim(bottom=0)
    wait.legend()
    for axes in (rate, wait):
        axes.set_xticks(list(places), [row.level for row in rows])
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
