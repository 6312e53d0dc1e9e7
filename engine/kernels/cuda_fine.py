"""Weights in codes of 4 or 8 bits with a scale for every 32 values of a row, or fewer, on a GPU.

The layouts are those of csrc/ops/cuda/fine_codes.h: kernels make float16 of the codes, times a power of two for each
row. Up to four rows of x are multiplied by the kernel of the chain, up to 64 by one with tensor cores, and for more
the weight becomes bfloat16 on its way. Dims: N outputs, K inputs, T rows of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cuda_chain import MOST_CHAINED_ROWS, Product
from bequest.engine.kernels.cuda_experts import ExpertChoice
from bequest.engine.kernels.streams import current_stream

GROUP = 32  # values of a row that share a word
_UNIT = 256  # rows are filled up to a multiple
_MOST_ROWS = 64  # csrc/ops/cuda/fine_linear.h
_LANES = 4  # that read a block of a row together, eight values of a group each
_BF16 = torch.bfloat16
_CODEC_NUMBERS = {"offset4": 0, "float4": 1, "scaled8": 2, "offset8": 3, "float8": 4}  # FineCodec

Codec = Literal["offset4", "float4", "scaled8", "offset8", "float8"]


@dataclass(frozen=True, slots=True)
class FineRows:
    """A matrix [N, K], or those of E experts, [E, N, K]."""

    codec: Codec
    codes: Tensor  # [.., N, bytes] uint8
    words: Tensor  # [.., N, W] int32
    scales: Tensor  # [.., N] float32
    depth: int  # K

    @property
    def bits(self) -> int:
        return 4 if self.codec in ("offset4", "float4") else 8

    @property
    def num_rows(self) -> int:
        return self.codes.shape[-2]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.words.nbytes + self.scales.nbytes

    def product(self, bias: Tensor | None = None, site: int | None = None) -> Product:
        """As the chain takes it. REQUIRES: most_chained_rows > 0"""
        return Product(self.codes, bias, self.scales, site, self.words, _CODEC_NUMBERS[self.codec] + 1)

    @property
    def is_chained(self) -> bool:
        """Whether the chain knows the codec."""
        return self.codec in ("offset4", "scaled8", "float8")

    @property
    def most_chained_rows(self) -> int:
        """That the kernel of the chain multiplies."""
        return MOST_CHAINED_ROWS if self.is_chained and _C.cuda_can_chain_linear(self.depth, self.bits, True) else 0

    def arguments(self) -> _C.FineMatrices:
        assert self.codes.is_contiguous() and self.words.is_contiguous() and self.scales.is_contiguous()
        assert self.codes.is_cuda and self.words.is_cuda and self.scales.is_cuda
        count = self.codes.shape[0] if self.codes.dim() == 3 else 1
        addresses = self.codes.data_ptr(), self.words.data_ptr(), self.scales.data_ptr()
        return *addresses, count, self.num_rows, self.depth, _CODEC_NUMBERS[self.codec]

    def numbers(self) -> Tensor:
        """[.., N, K] bfloat16"""
        out = torch.empty(*self.codes.shape[:-1], self.depth, dtype=_BF16, device=self.codes.device)
        _C.cuda_fine_rows(self.arguments(), out.data_ptr(), current_stream())
        return out


# --- packing, on any device -----------------------------------------------------------------------------------------


def pack_offset4(codes: Tensor, scales: Tensor, offsets: Tensor) -> FineRows:
    """value = scale · code + offset, of codes [N, K] uint8 up to 15, and scales and offsets [N, K / 32] float32."""
    words, factors = _with_offsets(scales, offsets, 15)
    return FineRows("offset4", _nibbles(_filled(codes, _UNIT)), words, factors, codes.shape[1])


def pack_offset8(codes: Tensor, scales: Tensor, offsets: Tensor) -> FineRows:
    """The same of codes up to 255."""
    words, factors = _with_offsets(scales, offsets, 255)
    return FineRows("offset8", _octets(codes), words, factors, codes.shape[1])


def pack_float4(codes: Tensor, exponents: Tensor) -> FineRows:
    """value = 2^exponent · code, of e2m1 [N, K] uint8, the sign in bit 3, and exponents [N, K / 32] int."""
    depth = codes.shape[1]
    most = exponents.amax(1, keepdim=True)
    # 2^14 for the largest one, because e2m1 as float16 is 2^14 too small; what is 2^28 times smaller is zero.
    biased = (exponents - most + 29).clamp_min(0).to(torch.uint8)
    words = _filled(biased, _UNIT // GROUP).view(torch.int32)
    scales = torch.ldexp(torch.ones(len(codes), device=codes.device), most[:, 0])
    return FineRows("float4", _nibbles(_filled(codes, _UNIT)), words, scales, depth)


def pack_scaled8(codes: Tensor, scales: Tensor) -> FineRows:
    """value = scale · (code - 128), of codes [N, K] uint8, and scales [N, K / 16] float32."""
    words, factors = _by_halves(scales)
    return FineRows("scaled8", _octets(codes), words, factors, codes.shape[1])


def pack_float8(codes: Tensor, scales: Tensor) -> FineRows:
    """value = scale · code, of e4m3 [N, K], and scales [N, K / 16] float32."""
    words, factors = _by_halves(scales)
    return FineRows("float8", _octets(codes.view(torch.uint8)), words, factors, codes.shape[1])


def stack(parts: list[FineRows]) -> FineRows:
    """One under the other, all of one codec."""
    first = parts[0]
    assert {part.codec for part in parts} == {first.codec} and {part.depth for part in parts} == {first.depth}
    if len(parts) == 1:
        return first
    codes, words = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "words"))
    return FineRows(first.codec, codes, words, torch.cat([part.scales for part in parts]), first.depth)


def _with_offsets(scales: Tensor, offsets: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Words of scales and offsets [N, K / 32], and the factor of each row; most: the largest code"""
    largest = torch.maximum(offsets.abs(), (most * scales + offsets).abs()).amax(1)
    factors = _powers(largest, 4)
    halves = [(part / factors[:, None]).half() for part in (scales, offsets)]
    return _filled(_joined(*halves), _UNIT // GROUP), factors


def _by_halves(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Words of scales [N, K / 16], and the factor of each row."""
    factors = _powers(scales.abs().amax(1), 1)
    halves = (scales / factors[:, None]).half()
    return _filled(_joined(halves[:, ::2], halves[:, 1::2]), _UNIT // GROUP), factors


def _powers(largest: Tensor, bits: int) -> Tensor:
    """For each row the power of two that its largest is below 2^bits times of."""
    exponents = torch.frexp(largest.float()).exponent
    exponents = torch.where(largest > 0, exponents - bits, 0)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponents)


def _joined(low: Tensor, high: Tensor) -> Tensor:
    """Two float16 in an int32."""
    both: Tensor = torch.stack([low, high], dim=2).contiguous().view(torch.int32)
    return both[..., 0]


def _filled(rows: Tensor, unit: int) -> Tensor:
    """With zeros, up to a multiple."""
    return F.pad(rows, (0, -rows.shape[1] % unit)).contiguous()


def _by_lanes(codes: Tensor, groups: int) -> Tensor:
    """[N, K] → [N, blocks, lanes, groups, 8]: what a lane reads of a block lies together."""
    return codes.view(len(codes), -1, groups, _LANES, 8).transpose(2, 3)


def _octets(codes: Tensor) -> Tensor:
    """[N, K] → [N, K], in the order that kernels widen them."""
    return _by_lanes(_filled(codes, _UNIT), 2).flatten(1).contiguous()


def _nibbles(codes: Tensor) -> Tensor:
    """[N, K] → [N, K / 2], in the order that kernels widen them."""
    eights = _by_lanes(codes, 4)
    low, high = eights[..., [0, 4, 1, 5]], eights[..., [2, 6, 3, 7]]
    return (low | high << 4).flatten(1).contiguous()


# --- products -------------------------------------------------------------------------------------------------------


def linear(x: Tensor, rows: FineRows, bias: Tensor | None) -> Tensor:
    """x [T, K] · Wᵀ + bias [N] → [T, N]"""
    num_tokens, outputs = x.shape[0], rows.num_rows
    if num_tokens > _MOST_ROWS:
        return F.linear(x, rows.numbers(), bias)
    out = torch.empty(num_tokens, outputs, dtype=_BF16, device=x.device)
    splits = _C.cuda_fine_splits(outputs, rows.depth)
    parts = torch.empty(splits if splits > 1 else 0, num_tokens, outputs, dtype=torch.float32, device=x.device)
    bias_address = 0 if bias is None else cuda.address_of(bias, _BF16, outputs)
    halves = torch.empty_like(x, dtype=torch.float16)  # which the kernel makes of x
    passed = _rows(x, halves, rows, out, parts)
    _C.cuda_fine_linear(passed, rows.arguments(), bias_address, current_stream())
    return out


def expert_linear(x: Tensor, rows: FineRows, bias: Tensor | None, choice: ExpertChoice, *, shared: bool) -> Tensor:
    """Of each pair the product with its expert's matrix, [T top_k, N]; `shared`: the pairs of a token read one row of
    x [T, K], else x is [T top_k, K]. The bias is [E, N] float32."""
    num_tokens, top_k = choice.ids.shape
    assert x.shape == (num_tokens if shared else num_tokens * top_k, rows.depth), x.shape
    out = torch.empty(num_tokens * top_k, rows.num_rows, dtype=_BF16, device=x.device)
    bias_address = 0 if bias is None else cuda.address_of(bias, torch.float32, *rows.codes.shape[:2])
    halves = torch.empty_like(x, dtype=torch.float16)
    passed = _rows(x, halves, rows, out, out[:0])
    _C.cuda_fine_expert_linear(passed, rows.arguments(), bias_address, choice.arguments(), shared, current_stream())
    return out


def has_expert_tiles(rows: FineRows, choice: ExpertChoice) -> bool:
    """Whether `expert_gated` takes so many rows."""
    num_tokens, top_k = choice.ids.shape
    return num_tokens > 0 and _C.cuda_has_fine_expert_tiles(rows.arguments(), (num_tokens, top_k, choice.num_experts))


def expert_gated(x: Tensor, rows: FineRows, bias: Tensor | None, choice: ExpertChoice, activation: str) -> Tensor:
    """x [T, K] → [T top_k, N / 2]: of each pair f(gate) * up of its expert's product. REQUIRES: has_expert_tiles"""
    num_tokens, top_k = choice.ids.shape
    out = torch.empty(num_tokens * top_k, rows.num_rows // 2, dtype=_BF16, device=x.device)
    bias_address = 0 if bias is None else cuda.address_of(bias, torch.float32, *rows.codes.shape[:2])
    halves = torch.empty_like(x, dtype=torch.float16)
    passed, code = _rows(x, halves, rows, out, out[:0]), ACTIVATION_CODES[activation]
    _C.cuda_fine_expert_gated(passed, rows.arguments(), bias_address, choice.arguments(), code, current_stream())
    return out


def _rows(x: Tensor, halves: Tensor, rows: FineRows, out: Tensor, parts: Tensor) -> _C.FineRows:
    """Addresses alone: the caller holds the tensors until the kernel is queued."""
    return cuda.address_of(x, _BF16, len(x), rows.depth), halves.data_ptr(), out.data_ptr(), parts.data_ptr(), len(out)
