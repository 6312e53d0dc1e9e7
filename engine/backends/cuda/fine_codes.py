"""Codes of checkpoints as fine rows of a GPU's kernels: integers in groups of 32 or more, float8 in groups of 16 or
more, and the types of GGUF files.

A scale is rounded to float16 beside a power of two of its row, an offset too, which moves a value by less than a
hundredth of the step between two codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bequest.engine.kernels import cuda_fine
from bequest.engine.kernels.cpu_weights import QuantisedRows, StoredType
from bequest.engine.kernels.cuda_fine import GROUP, FineRows
from bequest.engine.layers.codes import Float8Rows, IntegerRows

_HALF_GROUP = GROUP // 2
# Twice the magnitudes of e2m1.
_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)


def fine_integers(part: IntegerRows, device: torch.device) -> FineRows | None:
    """None where no kernel takes such codes. With act-order columns are taken by the order of their groups."""
    depth = part.codes.shape[1]
    if depth % GROUP or (part.group % GROUP and part.group < depth) or not part.scales.isfinite().all():
        return None
    codes, scales, zeros = (value.to(device) for value in (part.codes, part.scales, part.zeros))
    if part.order is not None:
        codes = codes[:, columns_of(part.order.to(device))]
    if part.bits <= 4:
        of_groups = _spread(scales, part.group, depth, GROUP), _spread(zeros.float(), part.group, depth, GROUP)
        return cuda_fine.pack_offset4(codes, of_groups[0], -of_groups[0] * of_groups[1])
    shifted = codes.short() - _spread(zeros, part.group, depth, 1) + 128
    if int(shifted.min()) < 0 or int(shifted.max()) > 255:
        return None
    shifted = shifted.to(torch.uint8)
    found = _as_float4(shifted, _spread(scales, part.group, depth, GROUP))
    return found or cuda_fine.pack_scaled8(shifted, _spread(scales, part.group, depth, _HALF_GROUP))


def fine_float8(part: Float8Rows, device: torch.device) -> FineRows | None:
    """None where no kernel takes such groups."""
    depth = part.codes.shape[1]
    if depth % GROUP or (part.group % _HALF_GROUP and part.group < depth) or not part.scales.isfinite().all():
        return None
    scales = _spread(part.scales.to(device), part.group, depth, _HALF_GROUP)
    return cuda_fine.pack_float8(part.codes.to(device), scales)


def columns_of(order: Tensor) -> Tensor:
    """Columns [K], those of one group side by side; order: the group of each column"""
    return order.argsort(stable=True)


def _spread(groups: Tensor, group: int, depth: int, width: int) -> Tensor:
    """[N, G] of groups of `group` values → [N, K / width]"""
    if groups.shape[1] == 1:
        return groups.expand(-1, depth // width)
    return groups.repeat_interleave(group // width, dim=1)[:, : depth // width]


def _as_float4(codes: Tensor, scales: Tensor) -> FineRows | None:
    """Where codes are twice the values of e2m1, and scales powers of two, as those of MXFP4 are."""
    mantissas, exponents = torch.frexp(scales)
    if not bool((mantissas == 0.5).all()):
        return None
    numbers = torch.full((256,), 255, dtype=torch.uint8)
    for number, magnitude in enumerate(_MAGNITUDES):
        numbers[128 - magnitude], numbers[128 + magnitude] = number | 8, number
    numbers = numbers.to(codes.device)[codes.int()]
    if bool((numbers == 255).any()):
        return None
    return cuda_fine.pack_float4(numbers, exponents)  # twice a half


# --- GGUF -----------------------------------------------------------------------------------------------------------


def fine_stored(part: QuantisedRows, device: torch.device) -> FineRows | None:
    """Rows of a GGUF file; None: of a type that no kernel takes."""
    unpack = _STORED.get(part.type)
    if unpack is None:
        return None
    blocks = part.rows.to(device).unflatten(1, (-1, part.stored.block_bytes))
    return unpack(blocks)


def _q4_0(blocks: Tensor) -> FineRows:
    scales = _halves(blocks[..., :2])[..., 0]
    return cuda_fine.pack_offset4(_nibbles(blocks[..., 2:]).flatten(1), scales, -8 * scales)


def _q4_1(blocks: Tensor) -> FineRows:
    scales, offsets = _halves(blocks[..., :4]).unbind(-1)
    return cuda_fine.pack_offset4(_nibbles(blocks[..., 4:]).flatten(1), scales, offsets)


def _q8_0(blocks: Tensor) -> FineRows:
    scales = _halves(blocks[..., :2]).expand(-1, -1, 2).flatten(1)
    return cuda_fine.pack_scaled8((blocks[..., 2:] ^ 128).flatten(1), scales)


def _q4_k(blocks: Tensor) -> FineRows:
    factors = _halves(blocks[..., :4])  # [N, B, 2]
    scales, offsets = _six_bits(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 16:].unflatten(2, (4, 32)))  # [N, B, 4, 64]
    scales, offsets = scales * factors[..., :1], -offsets * factors[..., 1:]
    return cuda_fine.pack_offset4(codes.flatten(1), scales.flatten(1), offsets.flatten(1))


def _q5_k(blocks: Tensor) -> FineRows:
    factors = _halves(blocks[..., :4])
    scales, offsets = _six_bits(blocks[..., 4:16])
    low = _nibbles(blocks[..., 48:].unflatten(2, (4, 32))).flatten(2)  # [N, B, 256]
    high = torch.cat([blocks[..., 16:48] >> bit & 1 for bit in range(8)], dim=2)
    scales, offsets = scales * factors[..., :1], -offsets * factors[..., 1:]
    return cuda_fine.pack_offset8((low | high << 4).flatten(1), scales.flatten(1), offsets.flatten(1))


def _q6_k(blocks: Tensor) -> FineRows:
    low = _nibbles(blocks[..., :128].unflatten(2, (2, 64)))  # [N, B, 2, 128]
    high = blocks[..., 128:192].unflatten(2, (2, 32))
    high = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=3).flatten(3)
    scales = blocks[..., 192:208].view(torch.int8).float() * _halves(blocks[..., 208:210])
    return cuda_fine.pack_scaled8(((low | high << 4) + 96).flatten(1), scales.flatten(1))


def _halves(octets: Tensor) -> Tensor:
    """[.., 2 n] uint8 → [.., n] float32 of float16"""
    found: Tensor = octets.contiguous().view(torch.float16)
    return found.float()


def _nibbles(octets: Tensor) -> Tensor:
    """[.., n] → [.., 2 n]: the lower four bits of all, then the upper ones."""
    return torch.cat([octets & 15, octets >> 4], dim=-1)


def _six_bits(octets: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima in 12 bytes, [.., 12] → two of [.., 8] float32."""
    first, second, third = octets.split(4, dim=-1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return scales.float(), minima.float()


_STORED: dict[StoredType, Callable[[Tensor], FineRows]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
