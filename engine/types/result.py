"""What a step brought: device thread → event-loop thread. Data (data.py). Dims as in plan.py; K alternatives."""

from __future__ import annotations

from bequest.engine.types.arrays import BoolArray, FloatArray, IntArray
from bequest.engine.types.data import Data
from bequest.engine.types.states import StatesArray


class LogprobArrays(Data, frozen=True, kw_only=True, eq=False):
    """Raw log-probabilities of R rows: of the chosen token, its rank (1 is best), and the K best tokens, best first."""

    chosen: FloatArray  # [R]
    rank: IntArray  # [R]
    top_ids: IntArray  # [R, K]
    top: FloatArray  # [R, K]


class BeamCandidates(Data, frozen=True, kw_only=True, eq=False):
    """The best continuations of one group's beams, best first; only allowed ones. `bad`: logits held a NaN."""

    scores: FloatArray  # [K] the beam's score and the token's log-probability
    rows: IntArray  # [K] which of the group's beams
    tokens: IntArray  # [K]
    logprobs: FloatArray  # [K] the raw model's, of the token
    bad: bool = False


class StepResult(Data, frozen=True, kw_only=True, eq=False):
    step: int
    tokens: IntArray  # [N]; where tokens were drafted, those behind a sample that is not its draft mean nothing
    bad_rows: BoolArray  # [N] logits held a NaN: the row's request fails, nobody else's
    logprobs: LogprobArrays | None = None
    prompt_logprobs: tuple[LogprobArrays, ...] = ()  # as in the plan
    beams: tuple[BeamCandidates, ...] = ()  # as in the plan
    device_seconds: float = 0.0  # that the device worked on it
    states: tuple[StatesArray, ...] = ()  # as plan.taps splits them: [R, layers, H], owned by nobody else
    experts: tuple[int, int] = (0, 0)  # that it read, each once for each layer, and that all layers have
    drafts: IntArray | None = None  # [N] as the plan's, with those of the draft model; None: they are the plan's
