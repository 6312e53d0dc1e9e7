"""Codes of a few bits, one behind the other in words of 32."""

from __future__ import annotations

import torch
from torch import Tensor


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """words [R, W] int32 → the first `count` codes of each row, [R, count] uint8, lowest bits first. A code may lie
    across two words."""
    # Of a little-endian machine, as all that we run on are.
    octets: Tensor = words.reshape(-1).view(torch.uint8).view(words.shape[0], -1)
    if bits == 8:
        return octets[:, :count]
    if bits == 4:
        return torch.stack([octets & 15, octets >> 4], dim=2).flatten(1)[:, :count]
    stream = (octets[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1  # [R, 4 W, 8]
    codes: Tensor = stream.flatten(1)[:, : count * bits].unflatten(1, (count, bits))
    return (codes << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
