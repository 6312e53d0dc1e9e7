"""Writes GGUF's K types, which the gguf package only reads: each value to the nearest code, by the published layout."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

Floats = npt.NDArray[np.float32]
Octets = npt.NDArray[np.uint8]


def quantise(values: npt.NDArray[np.float32], kind: GGMLQuantizationType) -> Octets:
    """[…, K] → […, bytes], in any type."""
    write = {
        GGMLQuantizationType.Q4_K: lambda blocks: _with_offsets(blocks, 4),
        GGMLQuantizationType.Q5_K: lambda blocks: _with_offsets(blocks, 5),
        GGMLQuantizationType.Q6_K: _q6_k,
    }.get(kind)
    if write is None:
        stored: Octets = gguf.quantize(values, kind)
        return stored
    return write(values.reshape(-1, 256).astype(np.float32)).reshape(*values.shape[:-1], -1)


def _halves(values: Floats) -> Octets:
    return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8)


def _with_offsets(blocks: Floats, bits: int) -> Octets:
    """Q4_K and Q5_K: value = half · scale · code - half · offset."""
    groups = blocks.reshape(-1, 8, 32)
    offsets = np.maximum(-groups.min(-1), 0)
    scales = np.maximum((groups.max(-1) + offsets) / (2**bits - 1), 1e-6)
    halves = np.stack([scales.max(1) / 63, np.maximum(offsets.max(1), 1e-6) / 63], 1).astype(np.float16)
    wide = halves.astype(np.float32)
    sixes = [np.clip(np.rint(p / wide[:, i : i + 1]), 0, 63).astype(np.uint8) for i, p in enumerate((scales, offsets))]
    scale, least = (wide[:, i, None] * six for i, six in enumerate(sixes))
    steps = np.where(scale > 0, scale, 1)[..., None]
    codes = np.clip(np.rint((groups + least[..., None]) / steps), 0, 2**bits - 1).astype(np.uint8)
    low = (codes & 15).reshape(-1, 4, 2, 32)
    parts = [_halves(wide), _sixes(*sixes), (low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128)]
    if bits == 5:
        high = (codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]
        parts.insert(2, np.bitwise_or.reduce(high, axis=1))
    return np.concatenate(parts, axis=1)


def _sixes(scales: Octets, offsets: Octets) -> Octets:
    """Two times 8 numbers of 6 bits in 12 octets."""
    first = (scales[:, :4] | scales[:, 4:] >> 4 << 6, offsets[:, :4] | offsets[:, 4:] >> 4 << 6)
    return np.concatenate([*first, (scales[:, 4:] & 15) | offsets[:, 4:] << 4], axis=1)


def _q6_k(blocks: Floats) -> Octets:
    groups = blocks.reshape(-1, 16, 16)
    scales = np.maximum(np.abs(groups).max(-1) / 31, 1e-6)
    half = (scales.max(1) / 127).astype(np.float16)
    octets = np.clip(np.rint(scales / half[:, None].astype(np.float32)), 1, 127).astype(np.int8)
    steps = half[:, None].astype(np.float32) * octets
    codes = (np.clip(np.rint(groups / steps[..., None]), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    nibbles = np.concatenate([low[:, :, :2].reshape(-1, 2, 64) | low[:, :, 2:].reshape(-1, 2, 64) << 4], axis=2)
    pairs = np.bitwise_or.reduce(high << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    parts = [nibbles.reshape(-1, 128), pairs.reshape(-1, 64), octets.view(np.uint8), _halves(half[:, None])]
    return np.concatenate(parts, axis=1)
