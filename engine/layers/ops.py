"""The kernels around products that layers are made of; each backend has its own."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.layers.parts import Activation, Chosen, DeltaRule, Heads, Norm, Routing
from bequest.engine.layers.step import LayerStep


class Ops(Protocol):
    # [1] int64 on the device, to which layers add the experts that they read; None: nobody counts
    experts_read: Tensor | None

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None, tap: LayerTap | None) -> Tensor:
        """residual += x in place, if there is one; the normed sum, [T, H]. A tap stores hidden states on the way."""
        ...

    def tap(self, x: Tensor, tap: LayerTap) -> None:
        """Stores rows x [T, H] of hidden states that no norm sees."""
        ...

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """f(x) in place; returns x."""
        ...

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[T, 2 I] → f(gate) * up, [T, I]"""
        ...

    def attend(self, qkv: Tensor, heads: Heads, step: LayerStep) -> Tensor:
        """Queries, keys and values [T, (NQ + 2 NKV) D] → what queries gather, [T, NQ D].

        Queries and keys are normed and rotated as `heads` says, queries in place; keys and values are stored."""
        ...

    def attend_read(self, qkv: Tensor, heads: Heads, step: LayerStep) -> Tensor:
        """The same of the queries in `step.read` alone, [R, NQ D]; keys and values of all tokens are stored."""
        ...

    def attend_cross(self, q: Tensor, heads: Heads, step: LayerStep) -> Tensor:
        """Queries [T, NQ D] over the cross tables → [T, NQ D]"""
        ...

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Heads [T, heads, D] of queries and keys (slices of a fused row are fine) in place, by rows `positions` [T]
        int32 of cos_sin [P, R] float32."""
        ...

    def attend_windows(self, qkv: Tensor, begin: Tensor, longest: int, cos_sin: Tensor) -> Tensor | None:
        """Heads [N, 3, NH, D] of queries, keys and values, dense → what queries gather, [N, NH, D]. Those from begin[i]
        to begin[i + 1], at most `longest`, see each other; queries and keys turn by rows of cos_sin [N, D] float32.
        None: there is no kernel for these sizes."""
        ...

    def attend_image(self, qkv: Tensor) -> Tensor | None:
        """The same where all see each other, and queries and keys are turned."""
        ...

    def delta_net(self, rows: Tensor, rule: DeltaRule, step: LayerStep) -> Tensor:
        """Rows [T, C + HV DV + 2 HV] as DeltaNet has them → [T, HV DV]. States move on as `step.recurrent` says."""
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x times the logistic function of the gate, [T, N] both, in place; returns x."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
        """Stores k, v [T, NKV, D] (views of a fused row are fine) at slots [T] int64; -1 is nowhere."""
        ...

    def route(self, logits: Tensor, routing: Routing) -> Chosen:
        """The experts of each token by its logits [T, E]."""
        ...

    def add_weighed(self, total: Tensor, added: Tensor, gates: Tensor) -> Tensor:
        """total + sigmoid(gates) * added, [T, H] with gates [T, 1], in place of total; returns it."""
        ...
