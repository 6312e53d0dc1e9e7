"""What an answer tells of its parent and of its lease: `continuation` and `retained`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.types import Delta, Request


@dataclass(frozen=True, slots=True)
class Report:
    """What one engine request has to tell, beside its choices."""

    parent: str | None = None  # of a continuation, as the client named it
    prompt_len: int = 0
    leased: bool = False  # a lease was asked for

    def continuation(self, opening: Delta) -> dict[str, Any]:
        """`opening` is the first delivery. Without an inheritance nothing of the parent was in the prompt."""
        if self.parent is None:
            return {}
        taken = opening.inheritance
        if taken is not None:
            told: dict[str, Any] = {
                "parent": taken.parent,
                "at": taken.at,
                "inherited_tokens": taken.inherited_tokens,
                "computed_tokens": taken.computed_tokens,
                "source": taken.source,
            }
        else:
            cached = 0 if opening.usage is None else opening.usage.cached_tokens
            told = {
                "parent": self.parent,
                "at": 0,
                "inherited_tokens": cached,
                "computed_tokens": self.prompt_len - cached,
                "source": "recompute",
            }
        return {"continuation": told}

    def retained(self, ending: Delta) -> dict[str, Any]:
        """`ending` is the last delivery."""
        if not self.leased:
            return {}
        lease = ending.retained
        if lease is None:
            return {"retained": None, "retained_reason": ending.retention_lost}
        told = {"id": lease.id, "expires_at": int(lease.expires_at), "tokens": lease.tokens, "blocks": lease.blocks}
        return {"retained": told}


NOTHING_TO_REPORT = Report()


def report_of(request: Request, parent: str | None) -> Report:
    """`parent` as the client named it; None: no continuation."""
    return Report(parent, len(request.prompt_token_ids), request.retain is not None)
