"""Experts on the CPU: typed functions over the extension, with checks of shapes and no logic.

Dims: T tokens, E experts, K experts of a token, H hidden, I intermediate, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cpu_weights import (
    CodeLayout,
    PackedWeight,
    QuantisedRows,
    advise_large_pages,
    multiplies_tiles,
    pack_into,
    pack_quantised_into,
    storage_of,
)
from bequest.engine.types.scoring import Scoring

SCORING_CODES: dict[Scoring, int] = {"softmax": 0, "sigmoid": 1}
_NO_SITE = -1
RoutingRule = tuple[int, int, int, int, int, int, bool, float]


class PackedExperts:
    """The same weight [N, K] of each expert, in the layout of PackedWeight, one behind the other."""

    __slots__ = ("_bias", "_matrices", "_storage", "each")

    def __init__(self, storage: Tensor, each: Sequence[PackedWeight], bias: Tensor | None) -> None:
        """storage [E, …]; bias [E, N] float32."""
        first = each[0]
        if bias is not None:
            assert bias.dtype is torch.float32 and bias.is_contiguous() and bias.is_cpu, bias.dtype
            assert bias.shape == (len(each), first.out_features), bias.shape
        self.each = tuple(each)
        self._storage = storage
        self._bias = bias
        bias_address = 0 if bias is None else bias.data_ptr()
        self._matrices = _C.PackedExperts(first._matrix, storage[0].nbytes, len(each), bias_address)

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    @property
    def site(self) -> int | None:
        """The number that adapters know expert 0's by."""
        return None if self._matrices.site == _NO_SITE else self._matrices.site

    @site.setter
    def site(self, site: int | None) -> None:
        self._matrices.site = _NO_SITE if site is None else site


def _made(
    num_experts: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    codes: CodeLayout | None = None,
    *,
    tiles: bool = False,
    fast: bool = False,
) -> tuple[Tensor, list[PackedWeight]]:
    storage = storage_of(*sizes, dtype, codes, tiles=tiles, count=num_experts)
    advise_large_pages(storage)
    return storage, [PackedWeight(*sizes, dtype, codes, tiles, one, fast=fast) for one in storage]


def pack_experts(
    weights: Iterable[Sequence[Tensor]], num_experts: int, bias: Tensor | None, dtype: torch.dtype
) -> PackedExperts:
    """Of each expert weights [Ni, K] as pack_weights takes them. One expert's are held at a time."""
    made: tuple[Tensor, list[PackedWeight]] | None = None
    number = 0
    for number, matrices in enumerate(weights, 1):
        if made is None:
            sizes = (sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1])
            tiles = dtype is torch.bfloat16 and multiplies_tiles()
            made = _made(num_experts, sizes, dtype, tiles=tiles)
        pack_into(made[1][number - 1], matrices)
    assert made is not None and number == num_experts, (number, num_experts)
    return PackedExperts(*made, bias)


def pack_quantised_experts(
    weights: Iterable[Sequence[QuantisedRows]], num_experts: int, bias: Tensor | None, *, fast: bool = False
) -> PackedExperts:
    """Of each expert weights [Ni, K] as pack_quantised takes them, all of the same codes."""
    made: tuple[Tensor, list[PackedWeight]] | None = None
    number = 0
    for number, codes in enumerate(weights, 1):
        if made is None:
            sizes = (sum(part.rows.shape[0] for part in codes), codes[0].in_features)
            made = _made(num_experts, sizes, torch.float32, codes[0].stored.layout, fast=fast)
        pack_quantised_into(made[1][number - 1], codes)
    assert made is not None and number == num_experts, (number, num_experts)
    return PackedExperts(*made, bias)


def routing_rule(
    top_k: int, scoring: Scoring, bias: Tensor | None, groups: tuple[int, int, int], renormalises: bool, factor: float
) -> RoutingRule:
    """bias [E] float32, whose memory is the caller's; groups: how many, how many of them count, how many of the best
    scores make one's."""
    if bias is not None:
        assert bias.dtype is torch.float32 and bias.is_contiguous() and bias.is_cpu, bias.dtype
    bias_address = 0 if bias is None else bias.data_ptr()
    return (top_k, SCORING_CODES[scoring], bias_address, *groups, renormalises, factor)


def route(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32 → ids [T, K] int32 and weights [T, K] float32, best first."""
    num_tokens, num_experts = logits.shape
    assert logits.dtype is torch.float32 and logits.is_contiguous() and logits.is_cpu, logits.dtype
    ids = torch.empty(num_tokens, rule[0], dtype=torch.int32)
    weights = torch.empty(num_tokens, rule[0])
    _C.route_experts((logits.data_ptr(), num_tokens, num_experts), rule, ids.data_ptr(), weights.data_ptr())
    return ids, weights


def expert_gated(x: Tensor, experts: PackedExperts, ids: Tensor, weights: Tensor, activation: str) -> Tensor:
    """x [T, H] → f(gate) * up of each token and each of its experts ids [T, K]: [T K, I]."""
    first = experts.each[0]
    _check_rows(x, ids.shape[0], first.in_features)
    out = torch.empty(ids.numel(), first.out_features // 2)
    chosen = chosen_experts(ids, weights)
    _C.expert_gated(experts._matrices, chosen, x.data_ptr(), ACTIVATION_CODES[activation], out.data_ptr())
    return out


def expert_summed(x: Tensor, experts: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """x [T K, I] → the products of each token's experts, times weights [T, K], added by rank: [T, H]."""
    first = experts.each[0]
    _check_rows(x, ids.numel(), first.in_features)
    out = torch.empty(ids.shape[0], first.out_features)
    _C.expert_summed(experts._matrices, chosen_experts(ids, weights), x.data_ptr(), out.data_ptr())
    return out


def add_gated_rows(out: Tensor, rows: Tensor, gates: Tensor) -> Tensor:
    """out += sigmoid(gates) * rows: [T, H] with gates [T, 1]; returns out."""
    _check_rows(out, *rows.shape)
    _check_rows(rows, *rows.shape)
    _check_rows(gates, rows.shape[0], 1)
    weights = torch.empty_like(gates)
    _C.add_gated_rows((rows.data_ptr(), *rows.shape), gates.data_ptr(), weights.data_ptr(), out.data_ptr())
    return out


def _check_rows(rows: Tensor, count: int, width: int) -> None:
    assert rows.dtype is torch.float32 and rows.is_cpu and rows.is_contiguous(), (rows.dtype, rows.stride())
    assert rows.shape == (count, width), (tuple(rows.shape), count, width)


def chosen_experts(ids: Tensor, weights: Tensor) -> _C.ChosenExperts:
    num_tokens, top_k = ids.shape
    assert ids.dtype is torch.int32 and ids.is_contiguous() and ids.is_cpu, ids.dtype
    assert weights.dtype is torch.float32 and weights.is_contiguous() and weights.shape == ids.shape, weights.shape
    return (ids.data_ptr(), weights.data_ptr(), num_tokens, top_k)
