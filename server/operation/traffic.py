"""What went over HTTP: answers by route and status, errors by code, and the last errors for the console."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric

_LAST_ERRORS = 50
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # clients may invent others


@dataclass(frozen=True, slots=True)
class SeenError:
    at: float  # seconds since 1970
    request_id: str
    route: str
    status: int
    code: str
    message: str


class Traffic:
    def __init__(self) -> None:
        self._answers: Counter[tuple[str, str, int]] = Counter()
        self._errors: Counter[str] = Counter()
        self.last_errors: deque[SeenError] = deque(maxlen=_LAST_ERRORS)

    def on_answer(self, method: str, route: str, status: int) -> None:
        self._answers[method if method in _METHODS else "other", route, status] += 1

    def on_error(self, request_id: str, route: str, status: int, code: str, message: str) -> None:
        self._errors[code] += 1
        self.last_errors.append(SeenError(time.time(), request_id, route, status, code, message))

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "bequest:http_requests", "Answers, by method, route and status.", labels=["method", "route", "status"]
        )
        for (method, route, status), count in self._answers.items():
            answers.add_metric([method, route, str(status)], count)
        yield answers
        errors = CounterMetricFamily("bequest:errors", "Errors that clients got, by code.", labels=["code"])
        for code, count in self._errors.items():
            errors.add_metric([code], count)
        yield errors
