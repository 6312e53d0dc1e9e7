"""A model that costs nothing: tokens come from a table. What is left is the engine's and the server's own time."""

from __future__ import annotations

import numpy as np

from bequest.engine.types import BeamCandidates, BeamSpec, StepPlan, StepResult


class NullRunner:
    """Row r's token at position p is one of `tokens`, ordinary words of the vocabulary; no work, no memory."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens.astype(np.int32)

    def is_quick(self, plan: StepPlan) -> bool:
        return False

    def launch(self, plan: StepPlan) -> StepResult:
        chosen = self._tokens[(plan.sample_positions * 7919 + plan.sample_rows * 104_729) % len(self._tokens)]
        beams = tuple([self._candidates(plan.step, spec) for spec in plan.beams])
        return StepResult(plan.step, chosen, np.zeros(len(chosen), np.bool_), None, beams=beams)

    def _candidates(self, step: int, spec: BeamSpec) -> BeamCandidates:
        """Beams take turns, so that most tables are forked."""
        numbers = np.arange(spec.num_candidates, dtype=np.int32)
        tokens = self._tokens[(step * 7919 + numbers) % len(self._tokens)]
        logprobs = -0.01 * (1 + numbers.astype(np.float32))
        return BeamCandidates(spec.scores[0] + logprobs, numbers * 7 % len(spec.scores), tokens, logprobs)

    def close(self) -> None:
        pass
