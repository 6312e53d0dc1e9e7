"""The matrices of a layer's experts: the same one of each, in some format, with the biases."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from bequest.engine.layers.parts import Activation, Chosen
from bequest.engine.layers.step_adapters import AdapterRows
from bequest.engine.layers.weight import Stored


class ExpertWeights(Stored):
    """y = x Wᵀ + b with one W [N, K] of E by row of x. A backend has a subclass for each format that it multiplies.

    No row of a result depends on the other tokens by one bit, so the order of every sum is fixed.
    """

    site: int | None = None  # the number that adapters know expert 0's by, expert e's is e more; None: none can add

    @property
    @abstractmethod
    def num_experts(self) -> int:
        """E"""

    @property
    @abstractmethod
    def out_features(self) -> int:
        """N, of one expert."""

    @property
    @abstractmethod
    def in_features(self) -> int:
        """K, of one expert."""

    @abstractmethod
    def gated(self, x: Tensor, chosen: Chosen, activation: Activation) -> Tensor:
        """x [T, K] → [T top_k, N / 2]: of each token and each of its experts, by rank, the activation of the product's
        first half times its second one."""

    @abstractmethod
    def summed(self, x: Tensor, chosen: Chosen) -> Tensor:
        """x [T top_k, K], as `gated` gives it → [T, N]: the products times what the experts count, added by rank."""

    @abstractmethod
    def with_adapters(
        self, down: ExpertWeights, x: Tensor, chosen: Chosen, activation: Activation, rows: AdapterRows
    ) -> Tensor:
        """x [T, K] → [T, H]: `gated` and then the `summed` of `down`, with what adapters add to both products."""
