"""The gated delta rule in float64, token by token: what kernels are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bequest.engine.kernels.delta_net import DeltaRule
from bequest.engine.types.recurrent import DeltaSizes


def make_rule(sizes: DeltaSizes, seed: int = 1, num_layers: int = 1, layer: int = 0) -> DeltaRule:
    assert layer < num_layers
    random = torch.Generator().manual_seed(seed)
    return DeltaRule(
        sizes=sizes,
        taps=torch.randn(sizes.conv_width, sizes.channels, generator=random),
        decay=-torch.rand(sizes.value_heads, generator=random) * 4.0,
        step_bias=torch.randn(sizes.value_heads, generator=random),
        norm=1.0 + 0.3 * torch.randn(sizes.value_dim, generator=random),
        eps=1e-6,
        state_layer=layer,
    )


def make_rows(sizes: DeltaSizes, num_tokens: int, seed: int = 2) -> Tensor:
    return torch.randn(num_tokens, sizes.row_size, generator=torch.Generator().manual_seed(seed))


@dataclass
class SlowSequence:
    """One sequence; `state` is what kernels keep of a layer, [E] float64."""

    rule: DeltaRule
    state: Tensor | None = None

    def step(self, rows: Tensor) -> Tensor:
        """[T, HV DV] float64"""
        return torch.stack([self._token(row) for row in rows.double()]) if len(rows) else rows.new_empty(0, 0).double()

    def _token(self, row: Tensor) -> Tensor:
        n, rule = self.rule.sizes, self.rule
        if self.state is None:
            self.state = torch.zeros(n.state_size, dtype=torch.float64)
        matrices, inputs = self.state.split([n.value_size * n.key_dim, (n.conv_width - 1) * n.channels])
        x, z, b, a = row.split([n.channels, n.value_size, n.value_heads, n.value_heads])
        window = torch.cat([inputs.view(-1, n.channels), x[None]])  # [CW, C]
        q, k, v = F.silu((window * rule.taps.double()).sum(0)).split([n.key_size, n.key_size, n.value_size])
        share = n.value_heads // n.key_heads
        q, k = (self._unit(part.view(n.key_heads, -1)).repeat_interleave(share, 0) for part in (q, k))
        decay = torch.exp(rule.decay.double() * F.softplus(a + rule.step_bias.double()))
        state = decay[:, None, None] * matrices.view(n.value_heads, n.key_dim, n.value_dim)
        change = torch.sigmoid(b)[:, None] * (v.view(n.value_heads, -1) - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * change[:, None, :]
        out = torch.einsum("hkv,hk->hv", state, q) * n.key_dim**-0.5
        self.state = torch.cat([state.flatten(), window[1:].flatten()])
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + rule.eps) * rule.norm.double()
        return (normed * F.silu(z.view(n.value_heads, -1))).flatten()

    @staticmethod
    def _unit(heads: Tensor) -> Tensor:
        return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
