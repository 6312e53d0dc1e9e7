"""Products of integers over codes, slowly: what csrc/ops/cpu/linear_integer.h promises, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
MOST = np.float32(32512)
BLOCK = 32  # values of a row of x with one step


@dataclass(frozen=True)
class Decoded:
    """A matrix [N, K] in integers: value = scale · code + offset."""

    codes: npt.NDArray[np.int64]  # [N, K]
    scales: Floats  # [N, groups]
    offsets: Floats | None  # [N, K / 32]

    def values(self) -> Floats:
        each = self.codes.shape[1] // self.scales.shape[1]
        exact = self.codes * np.repeat(self.scales, each, 1).astype(np.float64)
        if self.offsets is not None:
            exact = exact + np.repeat(self.offsets, BLOCK, 1)
        return exact.astype(np.float32)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a · b + c, rounded once. The product is exact in float64; a sum that is not is made odd, so that rounding it
    again to float32 rounds as the exact sum would."""
    product = a.astype(np.float64) * b.astype(np.float64)
    c_wide = c.astype(np.float64)
    total = product + c_wide
    other = total - product
    error = (product - (total - other)) + (c_wide - other)
    bits = total.view(np.int64)
    toward = np.where((error > 0) == (total > 0), bits, bits - 1) | 1
    inexact = (error != 0) & (bits & 1 == 0)
    return np.where(inexact, toward.view(np.float64), total).astype(np.float32)


def rounded(x: Floats) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """x [T, K] → integers [T, K], steps [T, K / 32], and steps times sums of integers."""
    blocks = x.reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    most = np.abs(blocks).max(-1)
    large = most > np.float32(1e-30)
    safe = np.where(large, most, np.float32(1))
    inverse, steps = np.where(large, MOST / safe, np.float32(0)), np.where(large, safe / MOST, np.float32(0))
    integers = np.rint(blocks.astype(np.float64) * inverse[..., None].astype(np.float64)).astype(np.int64)
    return integers.reshape(x.shape), steps, steps * integers.sum(-1).astype(np.float32)


def product(x: Floats, weight: Decoded, bias: Floats | None = None) -> Floats:
    """[T, K] → [T, N]"""
    integers, steps, sums = rounded(x)
    # Sums of a group stay below 2^53: products of float64, which are fast, are those of the integers.
    left, right = integers.astype(np.float64), weight.codes.T.astype(np.float64)
    tokens, outputs = len(x), len(weight.codes)
    num_scales = weight.scales.shape[1]
    each = x.shape[1] // num_scales
    total = np.zeros((tokens, outputs), np.float32)
    for group in range(num_scales):
        part = slice(group * each, (group + 1) * each)
        dots = left[:, part] @ right[part]
        block = group * each // BLOCK
        scaled = dots.astype(np.float32) * weight.scales[None, :, group]
        total = fused(scaled, np.broadcast_to(steps[:, block, None], total.shape), total)
        if weight.offsets is not None and (group + 1) * each % BLOCK == 0:
            offsets = np.broadcast_to(weight.offsets[None, :, block], total.shape)
            total = fused(offsets, np.broadcast_to(sums[:, block, None], total.shape), total)
    return total if bias is None else total + bias
