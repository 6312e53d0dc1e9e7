"""The values that cross a boundary: frozen, complete when constructed, without torch.

server → engine: Request; engine → device thread and back: StepPlan, StepResult; engine → server: Delta. The rest of the
engine stands on this folder, and it imports nothing of the engine but the errors.
"""

from bequest.engine.types.arrays import BoolArray, FloatArray, IntArray
from bequest.engine.types.delta import (
    ChoiceDelta,
    Delta,
    FinishReason,
    Inheritance,
    Retained,
    Sink,
    Source,
    StopReason,
    TokenLogprob,
    Usage,
)
from bequest.engine.types.device import PendingStep, Runner
from bequest.engine.types.model import ModelInfo
from bequest.engine.types.plan import BeamSpec, PromptLogprobSpec, RowSpec, StepPlan
from bequest.engine.types.record import ChoiceEntry, Grade, GradeLoad, Parent, ParentChoice, RecordEntry
from bequest.engine.types.request import Lineage, OutputMode, Request, Retain
from bequest.engine.types.result import BeamCandidates, LogprobArrays, StepResult
from bequest.engine.types.sampling import (
    MAX_BEAM_CANDIDATES,
    MAX_BEAM_WIDTH,
    BeamParams,
    Grammar,
    Matcher,
    SamplingParams,
)

__all__ = [
    "BeamCandidates",
    "BeamParams",
    "BeamSpec",
    "BoolArray",
    "ChoiceDelta",
    "ChoiceEntry",
    "Delta",
    "FinishReason",
    "FloatArray",
    "Grade",
    "GradeLoad",
    "Grammar",
    "Matcher",
    "Inheritance",
    "IntArray",
    "Lineage",
    "LogprobArrays",
    "MAX_BEAM_CANDIDATES",
    "MAX_BEAM_WIDTH",
    "ModelInfo",
    "OutputMode",
    "Parent",
    "ParentChoice",
    "PendingStep",
    "PromptLogprobSpec",
    "RecordEntry",
    "Request",
    "Retain",
    "Retained",
    "RowSpec",
    "Runner",
    "SamplingParams",
    "Sink",
    "Source",
    "StepPlan",
    "StepResult",
    "StopReason",
    "TokenLogprob",
    "Usage",
]
