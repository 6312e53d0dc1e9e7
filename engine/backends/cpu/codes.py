"""Codes of checkpoints as the CPU's kernels take them: groups of 32 of a row, value = scale · code + offset.

Scale and offset are float16. A scale of a checkpoint nearly always is, and so is the offset of symmetric codes, which
is a power of two times it. Of other codes the offset is rounded, by less than a hundredth of a step between two codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bequest.engine.kernels.cpu_weights import GROUP, QuantisedRows
from bequest.engine.layers.codes import Codes, Float8Rows, IntegerRows


def packable(matrices: Sequence[Codes]) -> list[QuantisedRows] | None:
    """All of one kind; None where the kernels do not multiply this kind."""
    rows = [_packable(matrix) for matrix in matrices]
    found = [matrix for matrix in rows if matrix is not None]
    return found if len(found) == len(rows) else None


def _packable(codes: Codes) -> QuantisedRows | None:
    if isinstance(codes, QuantisedRows):
        return codes
    if isinstance(codes, Float8Rows) or codes.order is not None or not _divides(codes):
        return None
    if codes.bits <= 4:
        return QuantisedRows("Q4_1", _of_4_bits(codes))
    return QuantisedRows("Q8_0", _of_8_bits(codes)) if bool((codes.zeros == 128).all()) else None


def _divides(codes: IntegerRows) -> bool:
    depth = codes.codes.shape[1]
    return depth % GROUP == 0 and (codes.group % GROUP == 0 or codes.group >= depth)


def _of_4_bits(codes: IntegerRows) -> Tensor:
    """Q4_1 of a GGUF file: scale, offset, and the first 16 codes of a group below the other 16."""
    scales = _spread(codes.scales, codes)
    offsets = _spread(-codes.scales * codes.zeros, codes)
    groups = codes.codes.unflatten(1, (-1, 2, GROUP // 2))
    words = groups[:, :, 0] | groups[:, :, 1] << 4
    return torch.cat([_octets(scales), _octets(offsets), words], dim=2).flatten(1)


def _of_8_bits(codes: IntegerRows) -> Tensor:
    """Q8_0 of a GGUF file: scale and codes."""
    signed = (codes.codes ^ 128).unflatten(1, (-1, GROUP))  # two's complement of what is 128 too large
    return torch.cat([_octets(_spread(codes.scales, codes)), signed], dim=2).flatten(1)


def _spread(groups: Tensor, codes: IntegerRows) -> Tensor:
    """[N, G] → [N, K / 32]"""
    count = codes.codes.shape[1] // GROUP
    if groups.shape[1] == 1:
        return groups.expand(-1, count)
    return groups.repeat_interleave(codes.group // GROUP, dim=1)[:, :count]


def _octets(numbers: Tensor) -> Tensor:
    """[N, G] → [N, G, 2] uint8, as float16."""
    halves = numbers.half().reshape(-1)  # a column of a transposed tensor counts as contiguous, and has no octets
    return halves.view(torch.uint8).view(*numbers.shape, 2)
