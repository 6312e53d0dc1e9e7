"""The figures of a run: a row for each mode at each concurrency, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bequest.bench.checks import Differences
from bequest.bench.tables import SHARES, aligned, percentile
from bequest.bench.two_stage import JobResult, Mode


@dataclass(frozen=True, slots=True)
class Row:
    concurrency: int
    mode: Mode
    jobs: int
    first_ms: Mapping[int, float]  # stage 2, to its first token, by percentile
    total_ms: Mapping[int, float]  # stage 2, to its end
    stage1_ms: Mapping[int, float]
    computed_tokens: tuple[int, int, int]  # least, median, most
    sources: Mapping[str, int]  # of continuations
    differences: Differences
    speed_up: float | None  # of the median first token, against re-sending at the same concurrency


@dataclass(frozen=True, slots=True)
class Failure:
    """A mode that could not be measured at a concurrency."""

    concurrency: int
    mode: Mode
    error: str


def summarise(
    concurrency: int, mode: Mode, results: Sequence[JobResult], differences: Differences, resend: Row | None
) -> Row:
    first = _percentiles([result.stage2.first_seconds for result in results])
    computed = [result.stage2.computed_tokens for result in results]
    told = [result.stage2.continuation for result in results]
    return Row(
        concurrency=concurrency,
        mode=mode,
        jobs=len(results),
        first_ms=first,
        total_ms=_percentiles([result.stage2.total_seconds for result in results]),
        stage1_ms=_percentiles([result.stage1.total_seconds for result in results]),
        computed_tokens=(min(computed), int(statistics.median(computed)), max(computed)),
        sources=Counter(continuation["source"] for continuation in told if continuation is not None),
        differences=differences,
        speed_up=resend.first_ms[50] / first[50] if resend is not None else None,
    )


def _percentiles(seconds: Sequence[float]) -> dict[int, float]:
    return {share: percentile(seconds, share) * 1e3 for share in SHARES}


def table(rows: Sequence[Row], beams: bool) -> str:
    """`beams` cannot stream: their first token comes with the whole answer."""
    first = "stage 2" if beams else "first token"
    titles = ["at once", "mode", f"{first}, ms: p50", "p90", "p99", "total p50", "p99", "computed", "from", "speed-up"]
    titles.append("differ")
    return aligned([titles, *(_cells(row) for row in rows)], left={1, 8})


def _cells(row: Row) -> list[str]:
    least, median, most = row.computed_tokens
    wrong = row.differences
    return [
        str(row.concurrency),
        row.mode.value,
        *(f"{row.first_ms[share]:,.1f}" for share in SHARES),
        *(f"{row.total_ms[share]:,.1f}" for share in (50, 99)),
        str(median) if least == most else f"{least}…{most}",
        ", ".join(f"{count} {source}" for source, count in sorted(row.sources.items())) or "–",
        f"{row.speed_up:,.1f}×" if row.speed_up is not None else "–",
        str(wrong.stage1 + wrong.stage2 + wrong.leases),
    ]


def as_json(
    rows: Sequence[Row], failures: Sequence[Failure], settings: Mapping[str, Any], notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "settings": dict(settings),
        "notes": list(notes),
        "rows": [_row_json(row) for row in rows],
        "failures": [asdict(failure) | {"mode": failure.mode.value} for failure in failures],
    }


def _row_json(row: Row) -> dict[str, Any]:
    fields = asdict(row)
    for name in ("first_ms", "total_ms", "stage1_ms"):
        fields[name] = {f"p{share}": round(value, 3) for share, value in fields[name].items()}
    fields["computed_tokens"] = dict(zip(("least", "median", "most"), row.computed_tokens, strict=True))
    return fields | {"mode": row.mode.value, "sources": dict(row.sources)}
