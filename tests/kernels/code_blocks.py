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
_HALVES = {"Q4_0": slice(0, 2), "Q4_1": slice(0, 4), "Q8_0": slice(0, 2)}


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


_DECODERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
