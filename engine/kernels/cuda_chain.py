"""All products between two attentions as one kernel, for a few bfloat16 rows (csrc/model/cuda/skinny_chain.h).

Dims: T rows, A what attention gives, H hidden, I inner, Q queries, keys and values of the next layer; E experts,
each of inner size I.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels import cuda
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cuda_linear import RowNorm
from bequest.engine.kernels.cuda_lora import SiteSlots
from bequest.engine.kernels.hidden_tap import tap_arguments
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.kernels.streams import current_stream

MOST_CHAINED_ROWS = 4  # csrc/model/cuda/skinny_chain.h
_BF16 = torch.bfloat16
_MOST_DELTA_PARTS = 3  # csrc/model/cuda/skinny_chain_deltas.cuh
_BF16_CODE = 1  # csrc/core/dtype.h
_FORESIGHT_COLUMNS = 1024  # csrc/model/cuda/skinny_chain.h
_NO_PRODUCT = (0, 0, 0, 0, 0, 0)
_STORE, _ADD, _GATE = range(3)  # SkinnyResult


@dataclass(frozen=True, slots=True)
class Product:
    # [N, K] bfloat16, float8_e4m3fn with scales, or codes of 4 bits [N, K / 2] with groups; of experts [E, N, K]
    weight: Tensor
    bias: Tensor | None = None  # [N]
    scales: Tensor | None = None  # [N] float32
    site: int | None = None  # the number that adapters know it by
    groups: Tensor | None = None  # engine.kernels.cuda_int4
    fine_codec: int = 0  # of codes with fine scales (engine.kernels.cuda_fine), which have scales and groups

    @property
    def bits(self) -> int:
        """Of a weight."""
        if self.groups is not None:
            return 4 if self.fine_codec <= 1 else 8
        return 16 if self.scales is None else 8

    @property
    def in_features(self) -> int:
        return self.weight.shape[-1] * (2 if self.groups is not None and self.bits == 4 else 1)

    def arguments(self, outputs: int, depth: int, *num_experts: int) -> _C.Product:
        bias = 0 if self.bias is None else cuda.address_of(self.bias, _BF16, outputs)
        scales = 0 if self.scales is None else cuda.address_of(self.scales, torch.float32, outputs)
        if self.groups is not None:
            codes = cuda.address_of(self.weight, torch.uint8, outputs, depth * self.bits // 8)
            groups = cuda.address_of(self.groups, torch.int32, *self.groups.shape)
            return codes, bias, outputs, depth, scales, groups, self.fine_codec
        dtype = _BF16 if self.scales is None else FP8
        return (cuda.address_of(self.weight, dtype, *num_experts, outputs, depth), bias, outputs, depth, scales, 0, 0)


@dataclass(frozen=True, slots=True)
class Head:
    """What a layer does before its attention."""

    norm: RowNorm  # its tap sees the residual
    qkv: Product  # [Q, H]
    gate_up: Product | None = None  # that of its tail, which memory may be asked for; no result depends on it


@dataclass(frozen=True, slots=True)
class Choice:
    """Of experts by the softmax of a router's logits, for one row."""

    router: Product  # [E, H]; with a shared expert [E + 1, H], of which the last is its gate
    top_k: int
    renormalises: bool
    factor: float
    shared: tuple[Product, Product] | None = None  # [2 I, H] and [H, I] of an expert that every row takes
    beside_attention: bool = False  # kernels before and behind are `attend_token`, of heads of up to 128
    foresight: Tensor | None = None  # by which weights are asked for early; results do not depend on it

    def arguments(self, sizes: tuple[int, int, int], num_read: Tensor | None) -> _C.ChainExperts:
        """sizes: A, H and I"""
        attended, hidden, inner = sizes
        num_logits = self.router.weight.shape[0]
        router = self.router.arguments(num_logits, hidden)
        up: _C.Product = _NO_PRODUCT
        down: _C.Product = _NO_PRODUCT
        if self.shared is not None:
            up, down = self.shared[0].arguments(2 * inner, hidden), self.shared[1].arguments(hidden, inner)
        counter = 0 if num_read is None else cuda.address_of(num_read, torch.int64, 1)
        ahead = 0
        if self.foresight is not None:
            num_experts = num_logits - (self.shared is not None)
            ahead = cuda.address_of(self.foresight, _BF16, num_experts, _filled_up(attended) + hidden)
        return router, self.top_k, self.renormalises, self.factor, up, down, counter, ahead, self.beside_attention


@dataclass(frozen=True, slots=True)
class Tail:
    """What a layer does behind its attention."""

    output: Product  # [H, A]
    norm: RowNorm
    gate_up: Product  # [2 I, H]; of experts [E, 2 I, H]
    activation: str
    down: Product  # [H, I]; of experts [E, H, I]
    choice: Choice | None = None  # None: there are no experts

    @property
    def most_rows(self) -> int:
        return MOST_CHAINED_ROWS if self.choice is None else 1


@dataclass(frozen=True, slots=True)
class Deltas:
    """What the adapters of rows add to products."""

    slots: Tensor  # [T] int32 of each row, -1: none
    sites: Mapping[int, SiteSlots]

    def fits(self, product: Product) -> bool:
        found = None if product.site is None else self.sites.get(product.site)
        return found is None or (found.shape.is_even and len(found.shape.ends) <= _MOST_DELTA_PARTS)

    def arguments(self, num_tokens: int, tail: Tail, head: Head | None) -> _C.ChainDeltas:
        def at(product: Product) -> _C.CudaLoraSite | None:
            found = None if product.site is None else self.sites.get(product.site)
            return None if found is None else found.site

        slots = cuda.address_of(self.slots[:num_tokens], torch.int32, num_tokens)
        following = None if head is None else at(head.qkv)
        return slots, at(tail.output), at(tail.gate_up), at(tail.down), following


def make_foresight(router: Tensor, norm: RowNorm, output: Tensor) -> Tensor:
    """[E, A filled up + H] bfloat16: what [attended | residual] is multiplied with to know the logits of the router
    [E, H], up to a factor, before `output` [H, A] has been added to the residual."""
    hidden, attended = output.shape
    begin = _filled_up(attended)
    gained = router.float() * (norm.weight.float() + norm.offset)
    foresight = torch.zeros(len(router), begin + hidden, dtype=_BF16, device=router.device)
    foresight[:, :attended] = gained @ output.float()
    foresight[:, begin:] = gained
    return foresight


def _filled_up(attended: int) -> int:
    return -(-attended // _FORESIGHT_COLUMNS) * _FORESIGHT_COLUMNS


def make_scratch(device: torch.device) -> Tensor:
    """For chains of one stream."""
    return torch.zeros(_C.cuda_chain_scratch_bytes, dtype=torch.uint8, device=device)


def has_kernel(attended: int, hidden: int, inner: int, *, bits: int = 16, fine: bool = False) -> bool:
    """Whether there is a kernel for a few rows of a model of these sizes: A, H and I; bits: of a weight; fine: in codes
    with fine scales"""
    return _C.cuda_can_chain(attended, hidden, inner, bits, fine)


def has_delta_kernel(attended: int, hidden: int, inner: int, most_rank: int) -> bool:
    """The same of weights in numbers beside adapters in slots of this rank, rounded."""
    return _C.cuda_can_chain_deltas(attended, hidden, inner, most_rank)


def has_expert_kernel(sizes: tuple[int, int, int], num_experts: int, top_k: int, *, has_shared: bool) -> bool:
    """The same for one row of a model with experts, and perhaps one that every row takes."""
    return _C.cuda_can_chain_experts(*sizes, num_experts, top_k, has_shared)


def can_chain(attended: Tensor, down: Tensor) -> bool:
    """Whether there is a kernel for rows [T, A] of a model whose down is [H, I]."""
    if attended.dtype is not torch.bfloat16 or not 0 < attended.shape[0] <= MOST_CHAINED_ROWS:
        return False
    return has_kernel(attended.shape[1], down.shape[0], down.shape[1], bits=8 if down.dtype is FP8 else 16)


def run(
    attended: Tensor,
    residual: Tensor,
    tail: Tail,
    head: Head | None,
    scratch: Tensor,
    deltas: Deltas | None = None,
    num_read: Tensor | None = None,
) -> Tensor | None:
    """residual [T, H] += all that the tail makes of attended [T, A]; the projection [T, Q] of the next layer's head.
    The experts that the row takes are counted in num_read [1] int64."""
    num_tokens, depth = attended.shape
    hidden, inner = residual.shape[1], tail.down.in_features
    leading = tail.down.weight.shape[:-2]  # E, where there are experts
    qkv: Tensor | None = None
    following = None
    if head is not None:
        outputs = head.qkv.weight.shape[0]
        qkv = torch.empty(num_tokens, outputs, dtype=_BF16, device=residual.device)
        tap = tap_arguments(head.norm.tap, num_tokens, hidden, _BF16)
        weight, eps, offset = _norm_arguments(head.norm, hidden)
        up = None if head.gate_up is None else head.gate_up.arguments(head.gate_up.weight.shape[0], hidden)
        following = ((weight, eps, tap), offset, head.qkv.arguments(outputs, hidden), qkv.data_ptr(), up)
    _C.cuda_skinny_chain(
        (cuda.address_of(attended, _BF16, num_tokens, depth), num_tokens, depth, _BF16_CODE),
        cuda.address_of(residual, _BF16, num_tokens, hidden),
        (
            tail.output.arguments(hidden, depth),
            _norm_arguments(tail.norm, hidden),
            tail.gate_up.arguments(2 * inner, hidden, *leading),
            ACTIVATION_CODES[tail.activation],
            tail.down.arguments(hidden, inner, *leading),
            None if tail.choice is None else tail.choice.arguments((depth, hidden, inner), num_read),
            None if deltas is None else deltas.arguments(num_tokens, tail, head),
        ),
        following,
        cuda.address_of(scratch, torch.uint8, _C.cuda_chain_scratch_bytes),
        current_stream(),
    )
    return qkv


def _norm_arguments(norm: RowNorm, hidden: int) -> tuple[int, float, float]:
    return cuda.address_of(norm.weight, _BF16, hidden), norm.eps, norm.offset


# --- one product, by the same kernel ----------------------------------------------------------------------------------


def linear(x: Tensor, product: Product, scratch: Tensor) -> Tensor:
    """x [T, K] · Wᵀ + bias [N] → [T, N]. REQUIRES: T <= MOST_CHAINED_ROWS; the kernel has W's format and depth"""
    out = torch.empty(x.shape[0], product.weight.shape[0], dtype=_BF16, device=x.device)
    _multiply(x, product, out, (_STORE, 0), scratch)
    return out


def gated_linear(x: Tensor, product: Product, activation: str, scratch: Tensor) -> Tensor:
    """f(gate) * up → [T, N / 2] of gate and up in one weight. REQUIRES: as linear"""
    out = torch.empty(x.shape[0], product.weight.shape[0] // 2, dtype=_BF16, device=x.device)
    _multiply(x, product, out, (_GATE, ACTIVATION_CODES[activation]), scratch)
    return out


def linear_into(x: Tensor, product: Product, residual: Tensor, scratch: Tensor) -> None:
    """residual [T, N] += x [T, K] · Wᵀ + bias [N]. REQUIRES: as linear"""
    _multiply(x, product, residual, (_ADD, 0), scratch)


def _multiply(x: Tensor, product: Product, out: Tensor, finish: tuple[int, int], scratch: Tensor) -> None:
    num_tokens, depth = x.shape
    _C.cuda_chained_linear(
        (cuda.address_of(x, _BF16, num_tokens, depth), num_tokens, depth, _BF16_CODE),
        product.arguments(product.weight.shape[0], depth),
        cuda.address_of(out, _BF16, *out.shape),
        finish,
        cuda.address_of(scratch, torch.uint8, _C.cuda_chain_scratch_bytes),
        current_stream(),
    )
