"""Weights with adapters: rows of a product get what the adapter of their sequence adds to it."""

from __future__ import annotations

from torch import Tensor

from bequest.engine.layers.parts import Activation, Chosen
from bequest.engine.layers.spec import Experts
from bequest.engine.layers.step_adapters import Finish, StepAdapters
from bequest.engine.layers.weight import Table, Weight


def adapted(weight: Weight, adapters: StepAdapters | None, site: int | None = None) -> Weight:
    """The weight as it is in a step. `site`: where it has another number than its own."""
    at = weight.site if site is None else site
    if adapters is None or at is None or not adapters.rows.is_at(at):
        return weight
    return AdaptedWeight(weight, at, adapters)


def adapted_table(table: Table, site: int, adapters: StepAdapters | None) -> Table:
    """The same of rows that are looked up."""
    if adapters is None or not adapters.rows.is_at(site):
        return table
    return AdaptedTable(table, site, adapters)


def given_by_experts(mixer: Experts, x: Tensor, chosen: Chosen, adapters: StepAdapters | None) -> Tensor:
    """[T, H] → [T, H]: what each token's experts make of it, added up."""
    up, down, activation = mixer.up, mixer.down, mixer.activation
    if adapters is None or up.site is None or down.site is None or not adapters.rows.is_among(up.site, down.site):
        return down.summed(up.gated(x, chosen, activation), chosen)
    return up.with_adapters(down, x, chosen, activation, adapters.of(len(x)))


class AdaptedTable(Table):
    def __init__(self, table: Table, site: int, adapters: StepAdapters) -> None:
        self._table, self._site, self._adapters = table, site, adapters

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    @property
    def format(self) -> str:
        return self._table.format

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        found = self._table.rows(ids, last_tokens)
        self._adapters.rows.add_rows(self._site, ids, last_tokens, found)
        return found


class AdaptedWeight(Weight):
    """Nothing is fused with the products of rows that have an adapter. On the CPU the other rows are, to the bit, what
    the weight itself makes of them: what it fuses may round otherwise than the kernels do one by one."""

    def __init__(self, weight: Weight, site: int, adapters: StepAdapters) -> None:
        self._weight, self._site, self._adapters = weight, site, adapters
        self.ops = weight.ops

    @property
    def out_features(self) -> int:
        return self._weight.out_features

    @property
    def in_features(self) -> int:
        return self._weight.in_features

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    @property
    def format(self) -> str:
        return self._weight.format

    def with_bias(self, bias: Tensor) -> Weight:
        return AdaptedWeight(self._weight.with_bias(bias), self._site, self._adapters)

    def rows(self, ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        return self._weight.rows(ids, last_tokens)

    def __call__(self, x: Tensor) -> Tensor:
        rows, x = self._adapters.of(len(x)), x.contiguous()
        begun = rows.begun(self._site, x) if self._weight.can_add(x) else None
        if begun is not None:
            self._weight.add_product(x, begun)
            return begun
        result = self._weight(x)
        rows.add(self._site, x, result)
        return result

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        plain = super().gated
        return self._finished(x, lambda: self._weight.gated(x, activation), lambda: plain(x, activation))

    def activated(self, x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        plain = super().activated
        result = self._finished(x, lambda: self._weight.activated(x, activation), lambda: plain(x, activation))
        return result if out is None else out.copy_(result)

    def _finished(self, x: Tensor, fused: Finish, plain: Finish) -> Tensor:
        return self._adapters.of(len(x)).finished(self._site, fused, plain)
