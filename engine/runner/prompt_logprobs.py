"""Log-probabilities of prompts: computed for all that ask in a step, then each gets its own. Device thread only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bequest.engine.types import LogprobArrays, PromptLogprobSpec


def split_logprobs(parts: Sequence[LogprobArrays], specs: Sequence[PromptLogprobSpec]) -> tuple[LogprobArrays, ...]:
    """`parts`: the rows of all specs, one after the other, with as many alternatives as the most that one wants."""
    chosen, rank, top_ids, top = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("chosen", "rank", "top_ids", "top")
    )
    ends = np.cumsum([len(spec.targets) for spec in specs]).tolist()
    return tuple(
        LogprobArrays(
            chosen=chosen[end - len(spec.targets) : end],
            rank=rank[end - len(spec.targets) : end],
            top_ids=top_ids[end - len(spec.targets) : end, : spec.top],
            top=top[end - len(spec.targets) : end, : spec.top],
        )
        for spec, end in zip(specs, ends, strict=True)
    )
