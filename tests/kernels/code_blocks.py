"""Blocks of random codes as GGUF files hold them, and what they mean in integers."""

from __future__ import annotations

import gguf.quants
import numpy as np
import numpy.typing as npt

from bequest.engine.kernels.cpu_weights import STORED_CODES, StoredType
from tests.kernels.integer_reference import Decoded

Octets = npt.NDArray[np.uint8]
TYPES: list[StoredType] = list(STORED_CODES)
# Where the float16 scales and offsets of a block are.
_HALVES = {
    "Q4_0": slice(0, 2),
    "Q4_1": slice(0, 4),
    "Q8_0": slice(0, 2),
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
}


def whole(kind: StoredType, in_features: int) -> int:
    """The next number that is a whole number of blocks."""
    values = STORED_CODES[kind].layout.values
    return -(-in_features // values) * values


def blocks_of(kind: StoredType, out_features: int, in_features: int, seed: int = 0) -> Octets:
    """[blocks, bytes]: random codes under random scales and offsets, of subnormal size too."""
    stored = STORED_CODES[kind]
    rng = np.random.default_rng(seed)
    count = out_features * in_features // stored.layout.values
    blocks = rng.integers(0, 256, (count, stored.block_bytes), dtype=np.uint8)
    place = _HALVES[kind]
    halves = (place.stop - place.start) // 2
    sizes = rng.choice([1.0, 1e-3, 1e-7], (count, halves), p=[0.8, 0.1, 0.1])
    blocks[:, place] = (rng.standard_normal((count, halves)) * sizes).astype(np.float16).view(np.uint8)
    return blocks


def values_of(kind: StoredType, blocks: Octets, out_features: int) -> npt.NDArray[np.float32]:
    """[N, K], as the gguf package has them."""
    values: npt.NDArray[np.float32] = getattr(gguf.quants, kind).dequantize_blocks(blocks)
    return values.reshape(out_features, -1)


def decoded(kind: StoredType, blocks: Octets, out_features: int) -> Decoded:
    codes, scales, offsets = _DECODERS[kind](blocks)
    rows = (out_features, -1)
    return Decoded(codes.reshape(rows), scales.reshape(rows), None if offsets is None else offsets.reshape(rows))


Parts = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32] | None]


def _halves(octets: Octets) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(octets).view(np.float16).astype(np.float32)


def _nibbles(octets: Octets) -> npt.NDArray[np.int64]:
    return np.concatenate([octets & 15, octets >> 4], axis=1).astype(np.int64)


def _q4_0(blocks: Octets) -> Parts:
    scales = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scales, np.float32(-8) * scales


def _q4_1(blocks: Octets) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q8_0(blocks: Octets) -> Parts:
    return blocks[:, 2:].view(np.int8).astype(np.int64), _halves(blocks[:, :2]), None


def _six_bits(octets: Octets) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """[B, 12] → scales and offsets of 8 groups."""
    first, second, mixed = octets[:, :4], octets[:, 4:8], octets[:, 8:]
    scales = np.concatenate([first & 63, (mixed & 15) | (first >> 6 << 4)], axis=1)
    offsets = np.concatenate([second & 63, (mixed >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _low_nibbles(octets: Octets) -> npt.NDArray[np.int64]:
    """[B, 128] → [B, 256]: of each 32 octets the low halves, then the high ones."""
    parts = octets.reshape(len(octets), 4, 32)
    return np.stack([parts & 15, parts >> 4], axis=2).reshape(len(octets), 256).astype(np.int64)


def _q4_k(blocks: Octets) -> Parts:
    scales, offsets = _six_bits(blocks[:, 4:16])
    halves = _halves(blocks[:, :4])
    return _low_nibbles(blocks[:, 16:]), halves[:, :1] * scales, -(halves[:, 1:] * offsets)


def _q5_k(blocks: Octets) -> Parts:
    scales, offsets = _six_bits(blocks[:, 4:16])
    halves = _halves(blocks[:, :4])
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _low_nibbles(blocks[:, 48:]) | high.reshape(len(blocks), 256).astype(np.int64) << 4
    return codes, halves[:, :1] * scales, -(halves[:, 1:] * offsets)


def _q6_k(blocks: Octets) -> Parts:
    low = blocks[:, :128].reshape(-1, 2, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)  # [B, 2, 128]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = nibbles.astype(np.int64) | high.reshape(-1, 2, 128).astype(np.int64) << 4
    scales = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes.reshape(-1, 256) - 32, scales, None


_DECODERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
