"""A model that costs nothing: tokens come from a table. What is left is the engine's and the server's own time."""

from __future__ import annotations

import numpy as np

from bequest.engine.types import BeamCandidates, BeamSpec, MaskSource, StepPlan, StepResult
from bequest.engine.types.catalogue import Catalogue


class NullRunner:
    """Row r's token at position p is one of `tokens`, ordinary words of the vocabulary; no work, no memory."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens.astype(np.int32)

    def connect(self, masks: MaskSource) -> None:
        pass

    def register(self, handle: int, catalogue: Catalogue) -> None:
        pass

    def release(self, handle: int) -> None:
        pass

    def is_quick(self, plan: StepPlan) -> bool:
        return False

    def launch(self, plan: StepPlan) -> StepResult:
        samples = plan.samples
        chosen = self._tokens[(samples.positions * 7919 + samples.rows * 104_729) % len(self._tokens)]
        beams = tuple([self._candidates(plan.step, spec) for spec in plan.beams])
        return StepResult(step=plan.step, tokens=chosen, bad_rows=np.zeros(len(chosen), np.bool_), beams=beams)

    def _candidates(self, step: int, spec: BeamSpec) -> BeamCandidates:
        """Beams take turns, so that most tables are forked."""
        numbers = np.arange(spec.num_candidates, dtype=np.int32)
        tokens = self._tokens[(step * 7919 + numbers) % len(self._tokens)]
        logprobs = -0.01 * (1 + numbers.astype(np.float32))
        rows = numbers * 7 % len(spec.scores)
        return BeamCandidates(scores=spec.scores[0] + logprobs, rows=rows, tokens=tokens, logprobs=logprobs)

    def close(self) -> None:
        pass
