"""Numbers of four bits in groups of 32 with a scale that is a power of two (OCP Microscaling, MXFP4)."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # values that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # one bit of mantissa; the fourth bit is the sign
BIAS = 127  # of a scale's exponent
_NO_NUMBER = 255  # as a scale


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., G, 16] uint8, two values in each, the lower four bits first; scales [..., G] uint8 → [..., 32 G]
    bfloat16, which has them exactly."""
    both = _pairs().index_select(0, blocks.flatten().int()).view(*blocks.shape[:-1], GROUP)
    values = torch.ldexp(both, (scales.int() - BIAS)[..., None])
    values[scales == _NO_NUMBER] = torch.nan
    return values.bfloat16().flatten(-2)


def integers(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers as integers from -12 to 12, [..., 32 G] int16, and what those of a group are multiplied by,
    [..., G] float32."""
    pairs = _pairs().mul(2).to(blocks.device, torch.int16)
    both = pairs.index_select(0, blocks.flatten().int()).view(*blocks.shape[:-1], GROUP)
    factors = torch.ldexp(torch.full(scales.shape, 0.5, device=scales.device), scales.int() - BIAS)
    factors[scales == _NO_NUMBER] = torch.nan
    return both.flatten(-2), factors


def _pairs() -> Tensor:
    """[256, 2]: the values of each byte."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
