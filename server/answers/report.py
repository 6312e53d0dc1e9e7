"""What an answer tells of its parent and of its lease: `continuation` and `retained`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bequest.engine.types import Delta
from bequest.server.asks.ask import Ask


@dataclass(frozen=True, slots=True)
class Report:
    """What one engine request has to tell, beside its choices."""

    leased: bool = False  # a lease was asked for
    prompt_tokens: int | None = None  # where each event of a stream tells the usage so far

    @property
    def counts(self) -> bool:
        """Whether each event of a stream tells the usage so far."""
        return self.prompt_tokens is not None

    def usage(self, num_written: int) -> dict[str, Any]:
        """After so many tokens of the answer."""
        if self.prompt_tokens is None:
            return {}
        total = self.prompt_tokens + num_written
        told = {"prompt_tokens": self.prompt_tokens, "completion_tokens": num_written, "total_tokens": total}
        return {"usage": told}

    def continuation(self, opening: Delta) -> dict[str, Any]:
        """`opening` is the first delivery."""
        taken = opening.inheritance
        if taken is None:
            return {}
        told = {
            "parent": taken.parent,
            "at": taken.at,
            "inherited_tokens": taken.inherited_tokens,
            "computed_tokens": taken.computed_tokens,
            "source": taken.source,
        }
        return {"continuation": told}

    def retained(self, ending: Delta) -> dict[str, Any]:
        """`ending` is the last delivery."""
        if not self.leased:
            return {}
        lease = ending.retained
        if lease is None:
            return {"retained": None, "retained_reason": ending.retention_lost}
        told: dict[str, Any] = {"id": lease.id, "expires_at": int(lease.expires_at)}
        told |= {"tokens": lease.tokens, "blocks": lease.blocks}
        if lease.durable is not None:
            told["durable"] = lease.durable
        if lease.durable_reason is not None:
            told["durable_reason"] = lease.durable_reason
        return {"retained": told}


def report_of(ask: Ask) -> Report:
    return Report(leased=ask.terms.record.retain is not None)
