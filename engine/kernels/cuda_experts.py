"""Products of experts on a GPU (csrc/ops/cuda/expert_*.h): which experts a token takes, and their matrices.

Dims: T tokens, E experts, K of them to a token, N outputs and D inputs of one expert. Pair t * K + k is token t with
the expert of its rank k. All of it can be captured in a CUDA graph: what experts get is data, in device memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.cpu_activations import ACTIVATION_CODES
from bequest.engine.kernels.cuda import address_of
from bequest.engine.kernels.streams import current_stream

MOST_EXPERTS, MOST_CHOSEN, MOST_GROUPS = 1024, 32, 32  # csrc/ops/cuda/expert_plan.h, a warp
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # csrc/core/dtype.h
_SCORING_CODES = {"softmax": 0, "sigmoid": 1}  # ExpertScoring


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How logits become a choice: ExpertRouting of csrc/ops/cuda/expert_route.h."""

    top_k: int
    scoring: str
    bias: Tensor | None  # [E] float32
    num_groups: int
    top_groups: int
    group_best: int
    renormalises: bool
    factor: float


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    ids: Tensor  # [T, K] int32
    weights: Tensor  # [T, K] float32
    plan: Tensor  # uint8: the pairs by expert (csrc/ops/cuda/expert_plan.h)
    num_experts: int

    def arguments(self) -> _C.ExpertChoice:
        num_tokens, top_k = self.ids.shape
        sizes = (num_tokens, top_k, self.num_experts)
        return (
            address_of(self.ids, torch.int32, num_tokens, top_k),
            address_of(self.weights, torch.float32, num_tokens, top_k),
            address_of(self.plan, torch.uint8, _C.cuda_expert_plan_bytes(sizes)),
            sizes,
        )


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    weight: Tensor  # [E, N, D]
    bias: Tensor | None = None  # [E, N] float32
    is_fresh: bool = False  # the kernel ahead makes the weight

    def arguments(self) -> _C.ExpertMatrices:
        weight = self.weight
        num_experts, outputs, depth = weight.shape
        bias = 0 if self.bias is None else address_of(self.bias, torch.float32, num_experts, outputs)
        address = address_of(weight, weight.dtype, num_experts, outputs, depth)
        return address, bias, outputs, depth, _DTYPE_CODES[weight.dtype], self.is_fresh


def has_tiles(outputs: int, depth: int) -> bool:
    """Whether tensor cores multiply bfloat16 of these sizes here; outputs: of a pair, gated or not"""
    return _C.cuda_has_expert_tiles(outputs, depth)


def route(logits: Tensor, rule: RoutingRule, num_read: Tensor | None = None) -> ExpertChoice:
    """The experts of each token, best first, by logits [T, E]. How many are taken is added to num_read [1] int64."""
    num_tokens, num_experts = logits.shape
    sizes = (num_tokens, rule.top_k, num_experts)
    choice = ExpertChoice(
        torch.empty(num_tokens, rule.top_k, dtype=torch.int32, device=logits.device),
        torch.empty(num_tokens, rule.top_k, dtype=torch.float32, device=logits.device),
        torch.empty(_C.cuda_expert_plan_bytes(sizes), dtype=torch.uint8, device=logits.device),
        num_experts,
    )
    _C.cuda_route_experts(
        address_of(logits, logits.dtype, num_tokens, num_experts),
        _DTYPE_CODES[logits.dtype],
        (
            _SCORING_CODES[rule.scoring],
            0 if rule.bias is None else address_of(rule.bias, torch.float32, num_experts),
            rule.num_groups,
            rule.top_groups,
            rule.group_best,
            rule.renormalises,
            rule.factor,
        ),
        choice.arguments(),
        0 if num_read is None else address_of(num_read, torch.int64, 1),
        current_stream(),
    )
    return choice


def gated(
    x: Tensor, matrices: ExpertMatrices, choice: ExpertChoice, activation: str, out: Tensor | None = None
) -> Tensor:
    """x [T, D] → [T K, N / 2]: of each pair f(gate) * up, where an expert's N rows are those of gate, then of up."""
    num_tokens, top_k = choice.ids.shape
    num_experts, outputs, depth = matrices.weight.shape
    assert num_experts == choice.num_experts, (num_experts, choice.num_experts)
    if out is None:
        out = torch.empty(num_tokens * top_k, outputs // 2, dtype=x.dtype, device=x.device)
    _C.cuda_expert_gated(
        address_of(x, matrices.weight.dtype, num_tokens, depth),
        matrices.arguments(),
        choice.arguments(),
        ACTIVATION_CODES[activation],
        address_of(out, x.dtype, num_tokens * top_k, outputs // 2),
        current_stream(),
    )
    return out


def products(x: Tensor, matrices: ExpertMatrices, choice: ExpertChoice, *, shares_rows: bool) -> Tensor:
    """x [T, D] if the pairs of a token share a row, else [T K, D] → the product of each pair, [T K, N]. REQUIRES: a
    kernel ahead has waited for the choice."""
    num_tokens, top_k = choice.ids.shape
    num_experts, outputs, depth = matrices.weight.shape
    assert num_experts == choice.num_experts, (num_experts, choice.num_experts)
    out = torch.empty(num_tokens * top_k, outputs, dtype=x.dtype, device=x.device)
    rows = num_tokens if shares_rows else num_tokens * top_k
    _C.cuda_expert_products(
        address_of(x, matrices.weight.dtype, rows, depth),
        matrices.arguments(),
        choice.arguments(),
        shares_rows,
        out.data_ptr(),
        current_stream(),
    )
    return out


def sum_products(products: Tensor, choice: ExpertChoice) -> Tensor:
    """[T K, N] → [T, N]: a token's products times what they count, added by rank."""
    num_tokens, top_k = choice.ids.shape
    _, columns = products.shape
    out = torch.empty(num_tokens, columns, dtype=products.dtype, device=products.device)
    _C.cuda_sum_expert_products(
        address_of(products, products.dtype, num_tokens * top_k, columns),
        columns,
        _DTYPE_CODES[products.dtype],
        choice.arguments(),
        out.data_ptr(),
        current_stream(),
    )
    return out


def summed(x: Tensor, matrices: ExpertMatrices, choice: ExpertChoice, out: Tensor | None = None) -> Tensor:
    """x [T K, D] → [T, N]: the products of a token's pairs times what they count, added by rank."""
    num_tokens, top_k = choice.ids.shape
    num_experts, outputs, depth = matrices.weight.shape
    assert num_experts == choice.num_experts, (num_experts, choice.num_experts)
    products = torch.empty(num_tokens * top_k, outputs, dtype=x.dtype, device=x.device)
    if out is None:
        out = torch.empty(num_tokens, outputs, dtype=x.dtype, device=x.device)
    _C.cuda_expert_summed(
        address_of(x, matrices.weight.dtype, num_tokens * top_k, depth),
        matrices.arguments(),
        choice.arguments(),
        products.data_ptr(),
        address_of(out, x.dtype, num_tokens, outputs),
        current_stream(),
    )
    return out
