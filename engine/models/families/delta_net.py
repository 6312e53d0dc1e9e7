"""Recurrent layers by the gated delta rule: Qwen3-Next, Qwen3.5."""

from __future__ import annotations

from bequest.engine.layers.parts import DeltaRule
from bequest.engine.layers.spec import DeltaNet
from bequest.engine.models.reader import Reader
from bequest.engine.types.recurrent import DeltaSizes


def describe_delta_net(sizes: DeltaSizes, at: Reader, hidden: int, eps: float, state_layer: int) -> DeltaNet:
    heads, channels, width = sizes.value_heads, sizes.channels, sizes.conv_width
    names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
    taps = at.tensor("conv1d.weight", (channels, 1, width))
    rule = DeltaRule(
        sizes=sizes,
        taps=at.placed(taps[:, 0].float().T.contiguous()),
        decay=at.placed(-at.tensor("A_log", (heads,)).float().exp()),
        step_bias=at.placed(at.tensor("dt_bias", (heads,)).float()),
        norm=at.placed(at.tensor("norm.weight", (sizes.value_dim,)).float()),
        eps=eps,
        state_layer=state_layer,
    )
    return DeltaNet(
        at.stacked(names, [channels, sizes.value_size, heads, heads], hidden, [False] * 4),
        rule,
        at.weight("out_proj", hidden, sizes.value_size),
    )
