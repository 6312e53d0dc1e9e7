"""Where the norms of a decoder's layer stand, by their names in a checkpoint, and of what kind they are. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LayerStyle:
    """Norms before and behind its attention and its MLP; None: there is none."""

    before_attention: str | None = "input_layernorm"
    behind_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None
    parallel: bool = False  # the MLP reads what the attention reads
    norm_offset: float = 0.0  # a norm multiplies by it plus its weight
    centred: bool = False  # norms subtract the mean and divide by the deviation, not by the root mean square
    qk_norm_over_rows: bool = False  # norms of queries and keys are over all heads of a token at once


LLAMA = LayerStyle()
GLM4 = LayerStyle(behind_attention="post_self_attn_layernorm", behind_mlp="post_mlp_layernorm")
OLMO2 = LayerStyle(
    before_attention=None,
    behind_attention="post_attention_layernorm",
    before_mlp=None,
    behind_mlp="post_feedforward_layernorm",
    qk_norm_over_rows=True,
)
OLMOE = LayerStyle(qk_norm_over_rows=True)
GEMMA = LayerStyle(norm_offset=1.0)
GEMMA2 = LayerStyle(
    behind_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind_mlp="post_feedforward_layernorm",
    norm_offset=1.0,
)
GEMMA4 = replace(GEMMA2, norm_offset=0.0)
COHERE = LayerStyle(before_mlp=None, parallel=True, centred=True)
