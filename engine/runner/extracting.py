"""How long steps of nothing but extractions of hidden states are. A generation that comes meanwhile should not wait."""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.models.decoder import Decoder
from bequest.engine.models.load import LoadedModel
from bequest.engine.runner.cuda_sizes import mixed_ladder

_CPU_TOKENS = 64
_CPU_SHORT = (4, 8, 16, 32)
# On a GPU, in multiply-adds: sixteen milliseconds of an H200. Shorter steps of a large model cost throughput.
_CUDA_WORK = 5.4e12
_CUDA_LEAST = 256
_CUDA_STEP_OF_LADDER = 128  # no step is padded
# Fewer tokens take little longer than a token of a stream, and a graph of them is faster than its kernels one by one.
_CUDA_LEAST_YIELDING = 128
# Of a piece of a step that yields: a millisecond, and the time to launch the next one.
_CUDA_WORK_OF_PIECE = 3.4e11


@dataclass(frozen=True, slots=True)
class ExtractingSteps:
    """As in ExtractionLimits."""

    rows: int  # max_step_rows
    tokens: int  # max_step_tokens
    short: tuple[int, ...]  # short_steps
    yields_from: int | None = None


def extracting_on_cpu(rows: int) -> ExtractingSteps:
    return ExtractingSteps(rows, _CPU_TOKENS, _CPU_SHORT)


def extracting_on_gpu(loaded: LoadedModel, rows: int, most: int, *, yields: bool) -> ExtractingSteps:
    """`most`: tokens of any step; `yields`: steps may, where they are long."""
    work = int(_CUDA_WORK / loaded.num_active_parameters)
    tokens = min(max(work // _CUDA_STEP_OF_LADDER * _CUDA_STEP_OF_LADDER, _CUDA_LEAST), most)
    if yields and tokens < most:
        return ExtractingSteps(rows, most, (), _CUDA_LEAST_YIELDING)
    return ExtractingSteps(rows, tokens, tuple(size for size in mixed_ladder(most) if size < tokens))


def tokens_of_piece(loaded: LoadedModel) -> int:
    """Of a step of so many tokens one layer is a piece. 0: the model's layers cannot be launched in pieces."""
    if not isinstance(loaded.model, Decoder):
        return 0
    return int(_CUDA_WORK_OF_PIECE * loaded.config.num_layers / loaded.num_active_parameters)
