"""What replicas say of themselves on /metrics, each and in sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from prometheus_client.parser import text_string_to_metric_families

_NAMES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "leases": "bequest:leases",
    "leased_blocks": "bequest:retention_charged_blocks",
    "budget_blocks": "bequest:retention_budget_blocks",
    "generated_tokens": "vllm:generation_tokens_total",
    "queued_requests": "vllm:request_queue_time_seconds_count",
    "queued_seconds": "vllm:request_queue_time_seconds_sum",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one replica, or of several together. The last three count from the start of each."""

    running: float = 0.0
    waiting: float = 0.0
    leases: float = 0.0
    leased_blocks: float = 0.0
    budget_blocks: float = 0.0
    generated_tokens: float = 0.0
    queued_requests: float = 0.0
    queued_seconds: float = 0.0

    @property
    def leased_share(self) -> float:
        return self.leased_blocks / self.budget_blocks if self.budget_blocks else 0.0

    def mean_wait(self, before: Figures) -> float:
        """Seconds that requests since then have waited to run."""
        count = self.queued_requests - before.queued_requests
        return (self.queued_seconds - before.queued_seconds) / count if count > 0 else 0.0


def read(exposition: str) -> Figures:
    """Raises ValueError for what is no exposition."""
    wanted = {metric: name for name, metric in _NAMES.items()}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in wanted:
                name = wanted[sample.name]
                found[name] = found.get(name, 0.0) + sample.value
    return Figures(**found)


def total(figures: Iterable[Figures]) -> Figures:
    known = list(figures)
    return Figures(**{field.name: sum(getattr(one, field.name) for one in known) for field in fields(Figures)})


def as_dict(figures: Figures) -> Mapping[str, float]:
    return {field.name: getattr(figures, field.name) for field in fields(Figures)} | {
        "leased_share": figures.leased_share
    }
