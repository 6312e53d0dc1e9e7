"""A model that costs nothing: tokens come from a table. What is left is the engine's and the server's own time."""

from __future__ import annotations

import numpy as np

from engine.types import StepPlan, StepResult


class NullRunner:
    """Row r's token at position p is one of `tokens`, ordinary words of the vocabulary; no work, no memory."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens.astype(np.int32)

    def execute(self, plan: StepPlan) -> StepResult:
        chosen = self._tokens[(plan.sample_positions * 7919 + plan.sample_rows * 104_729) % len(self._tokens)]
        return StepResult(plan.step, chosen, np.zeros(len(chosen), np.bool_), None)

    def close(self) -> None:
        pass
