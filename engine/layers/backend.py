"""What a model asks of a device: memory for its weights, and its layers compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from bequest.engine.layers.codes import Codes
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.program import Stack
from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.weight import Table, Weight

MatMul = Literal["exact", "fast"]


class Backend(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def ops(self) -> Ops: ...

    @property
    def matmul(self) -> MatMul | None:
        """How it multiplies codes, where there is a choice."""
        ...

    def head_sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
        """The head dims that attention serves in this dtype; empty: any."""
        ...

    def weight(self, matrices: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Weight:
        """Matrices [N_i, K] stacked along N, and a bias [N] that `vector` made."""
        ...

    def code_types(self, dtype: torch.dtype) -> tuple[type[Codes], ...]:
        """The codes of checkpoints that it may keep, where weights are else in this dtype."""
        ...

    @property
    def joins_codes(self) -> bool:
        """Whether matrices in codes of several kinds can be one weight."""
        ...

    @property
    def tables_in_codes(self) -> bool:
        """Whether embeddings, and heads that may be the same matrix, can stay in codes."""
        ...

    def quantised_weight(self, matrices: Sequence[Codes], bias: Tensor | None) -> Weight | None:
        """The same of matrices in codes, of one kind unless it joins them; None where it does not multiply these."""
        ...

    def expert_weights(
        self, matrices: Iterable[Sequence[Tensor]], num_experts: int, bias: Tensor | None, dtype: torch.dtype
    ) -> ExpertWeights:
        """One expert after another: its matrices [N_i, K], stacked along N. All experts together need not fit into
        memory a second time. The bias is [E, N] float32 on the host."""
        ...

    def quantised_expert_weights(
        self, matrices: Iterable[Sequence[Codes]], num_experts: int, bias: Tensor | None
    ) -> ExpertWeights | None:
        """The same of matrices in codes of one kind; None where it does not multiply these."""
        ...

    def table(self, rows: Tensor, dtype: torch.dtype) -> Table:
        """Rows [N, K] that nothing is multiplied with."""
        ...

    def vector(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A bias, or the weight of a norm."""
        ...

    def offset_vector(self, values: Tensor, offset: float, dtype: torch.dtype) -> tuple[Tensor, float]:
        """The weight of a norm that is offset + values in float32, whatever the dtype: as it is kept, and what kernels
        are still to add to it."""
        ...

    def compile(self, layers: Sequence[LayerSpec]) -> Stack: ...
