"""Experts on a GPU: their choice with the plan of its products, and their matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine.backends.cuda.uploads import Uploads
from bequest.engine.errors import ModelError
from bequest.engine.kernels import cuda, cuda_experts
from bequest.engine.kernels.cuda_lora import LoraRows
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.parts import Activation, Chosen, Routing
from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.step_adapters import AdapterRows


@dataclass(frozen=True, slots=True)
class PlannedChoice(Chosen):
    """With the rows of each expert, which all products of a layer go by."""

    choice: cuda_experts.ExpertChoice


def route(logits: Tensor, routing: Routing, num_read: Tensor | None) -> PlannedChoice:
    rule = cuda_experts.RoutingRule(
        top_k=routing.top_k,
        scoring=routing.scoring,
        bias=routing.bias,
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        group_best=routing.group_best,
        renormalises=routing.renormalises,
        factor=routing.factor,
    )
    choice = cuda_experts.route(logits, rule, num_read)
    return PlannedChoice(choice.ids, choice.weights, choice)


class PlannedExperts(ExpertWeights):
    """Whose products go by the plan of a choice, each on its own where adapters add to them."""

    @abstractmethod
    def products(self, x: Tensor, choice: cuda_experts.ExpertChoice, *, shares_rows: bool) -> Tensor:
        """x [T, K] if the pairs of a token share a row, else [T top_k, K] → [T top_k, N]"""

    def with_adapters(
        self, down: ExpertWeights, x: Tensor, chosen: Chosen, activation: Activation, rows: AdapterRows
    ) -> Tensor:
        assert isinstance(down, PlannedExperts) and isinstance(rows, LoraRows), "of this backend"
        choice = choice_of(chosen)
        tiles = rows.tiles_of_experts(choice.ids, choice.num_experts)  # which waits for the choice
        both = self.products(x, choice, shares_rows=True)
        rows.add_to_experts(self.site, x, both, tiles.sharing(choice.ids.shape[1]))
        inner = cuda.gated_activation(both, activation)
        products = down.products(inner, choice, shares_rows=False)
        rows.add_to_experts(down.site, inner, products, tiles)
        return cuda_experts.sum_products(products, choice)


class DenseExperts(PlannedExperts):
    """Float32 or bfloat16, as states are; one tensor of all experts."""

    def __init__(self, matrices: Tensor, bias: Tensor | None) -> None:
        """[E, N, K], and the bias [E, N] float32"""
        self._matrices = cuda_experts.ExpertMatrices(matrices, bias)

    @property
    def matrices(self) -> cuda_experts.ExpertMatrices:
        return self._matrices

    @property
    def num_experts(self) -> int:
        return self._matrices.weight.shape[0]

    @property
    def out_features(self) -> int:
        return self._matrices.weight.shape[1]

    @property
    def in_features(self) -> int:
        return self._matrices.weight.shape[2]

    @property
    def nbytes(self) -> int:
        return self._matrices.weight.nbytes

    @property
    def format(self) -> str:
        return str(self._matrices.weight.dtype).removeprefix("torch.")

    def gated(self, x: Tensor, chosen: Chosen, activation: Activation) -> Tensor:
        return cuda_experts.gated(x, self._matrices, choice_of(chosen), activation)

    def summed(self, x: Tensor, chosen: Chosen) -> Tensor:
        return cuda_experts.summed(x, self._matrices, choice_of(chosen))

    def products(self, x: Tensor, choice: cuda_experts.ExpertChoice, *, shares_rows: bool) -> Tensor:
        return cuda_experts.products(x, self._matrices, choice, shares_rows=shares_rows)


def choice_of(chosen: Chosen) -> cuda_experts.ExpertChoice:
    """The ops of this backend have made it."""
    assert isinstance(chosen, PlannedChoice)
    return chosen.choice


def place_experts(
    matrices: Iterable[Sequence[Tensor]],
    num_experts: int,
    dtype: torch.dtype,
    device: torch.device,
    uploads: Uploads,
) -> Tensor:
    """[E, N, K] of each expert's matrices [N_i, K], each copied straight to its place on the device."""
    placed: Tensor | None = None
    count = 0
    for of_expert in matrices:
        if placed is None:
            rows = sum(matrix.shape[0] for matrix in of_expert)
            placed = torch.empty(num_experts, rows, of_expert[0].shape[1], dtype=dtype, device=device)
        begin = 0
        for matrix in of_expert:
            uploads.copy(placed[count, begin : begin + matrix.shape[0]], matrix)
            begin += matrix.shape[0]
        count += 1
    assert placed is not None and count == num_experts, (count, num_experts)
    return placed


def check_experts(layers: Sequence[LayerSpec]) -> None:
    """Raises on what no kernel serves."""
    for mixer in (mixer for layer in layers for mixer in layer.experts):
        for number, most, what in (
            (mixer.up.num_experts, cuda_experts.MOST_EXPERTS, "experts in a layer"),
            (mixer.routing.top_k, cuda_experts.MOST_CHOSEN, "experts to a token"),
            (mixer.routing.num_groups, cuda_experts.MOST_GROUPS, "groups of experts"),
        ):
            if number > most:
                raise ModelError(f"a GPU serves up to {most} {what}, and this model has {number}; use device=cpu")
