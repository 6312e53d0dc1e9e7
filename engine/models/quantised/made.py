"""Codes of a checkpoint that is in numbers, made while it is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.layers.codes import Codes, Float8Rows
from bequest.engine.models.quantised.described import Quantisation
from bequest.engine.models.weights import SourceOver

_LARGEST_CODE = 448.0  # of e4m3


class MadeFloat8(SourceOver):
    """A WeightSource over another: matrices of layers are float8 with a scale for each row. The embedding and the
    head stay in numbers."""

    def load_codes(self, name: str) -> Codes | None:
        return float8_rows(self._source.load(name)) if ".layers." in name else None


def check_fp8(stored: Quantisation | None, storage: torch.dtype, *, on_cpu: bool, is_dense: bool) -> None:
    """Raises ModelError where codes could not be kept. `stored`: how the checkpoint is quantised already; `is_dense`:
    it is a decoder without experts."""
    if on_cpu:
        raise ModelError("quantization=fp8 is for a GPU; on a CPU take a .gguf file, or an AWQ or GPTQ checkpoint")
    if not is_dense:
        raise ModelError("quantization=fp8 is for decoders without experts; experts and encoders stay in bfloat16")
    if storage is not torch.bfloat16:
        raise ModelError("quantization=fp8 goes with dtype=bfloat16")
    if stored is not None:
        raise ModelError(f"quantization=fp8, but the checkpoint is quantised already ({stored.method})")


def float8_rows(matrix: Tensor) -> Float8Rows:
    """The largest magnitude of a row becomes the largest code."""
    largest = matrix.abs().amax(1, keepdim=True).float()
    scales = torch.where(largest > 0, largest / _LARGEST_CODE, 1.0)
    return Float8Rows((matrix.float() / scales).to(torch.float8_e4m3fn), scales, matrix.shape[1])
