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
from bequest.engine.types.device import ComingMasks, MaskSource, PendingStep, Registration, Release, Runner, mask_words
from bequest.engine.types.model import ModelInfo
from bequest.engine.types.plan import (
    DRAFTED,
    NO_DRAFT,
    NO_ROW,
    NO_SLOT,
    NO_STATE,
    NO_TOKEN,
    BeamSpec,
    MaskSpec,
    PromptLogprobSpec,
    StepBatch,
    StepMoves,
    StepPlan,
    StepRows,
    StepSamples,
)
from bequest.engine.types.record import ChoiceEntry, Grade, GradeLoad, Parent, ParentChoice, RecordEntry
from bequest.engine.types.request import Lineage, OutputMode, Request, Retain, Terms
from bequest.engine.types.result import BeamCandidates, LogprobArrays, StepResult
from bequest.engine.types.row import CatalogueSpec, DrawParams, Penalties, RowSpec, TimestampSpec, TokenBounds
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
    "CatalogueSpec",
    "ChoiceDelta",
    "ChoiceEntry",
    "ComingMasks",
    "Delta",
    "DrawParams",
    "FinishReason",
    "FloatArray",
    "Grade",
    "GradeLoad",
    "Grammar",
    "Inheritance",
    "IntArray",
    "Lineage",
    "LogprobArrays",
    "MAX_BEAM_CANDIDATES",
    "MAX_BEAM_WIDTH",
    "MaskSource",
    "MaskSpec",
    "Matcher",
    "ModelInfo",
    "DRAFTED",
    "NO_DRAFT",
    "NO_ROW",
    "NO_SLOT",
    "NO_STATE",
    "NO_TOKEN",
    "OutputMode",
    "Parent",
    "ParentChoice",
    "Penalties",
    "PendingStep",
    "PromptLogprobSpec",
    "RecordEntry",
    "Registration",
    "Release",
    "Request",
    "Retain",
    "Retained",
    "RowSpec",
    "Runner",
    "SamplingParams",
    "Sink",
    "Source",
    "StepBatch",
    "StepMoves",
    "StepPlan",
    "StepResult",
    "StepRows",
    "StepSamples",
    "StopReason",
    "Terms",
    "TimestampSpec",
    "TokenBounds",
    "TokenLogprob",
    "Usage",
    "mask_words",
]
