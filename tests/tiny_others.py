"""Tiny random checkpoints of architectures that Bequest has no family for: transformers computes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import (
    Exaone4Config,
    Exaone4ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    VaultGemmaConfig,
    VaultGemmaForCausalLM,
)

from tests.tiny_models import SHAPE, randomised, save_checkpoint, unset

_SHAPE: dict[str, Any] = SHAPE | {"num_hidden_layers": 2, "pad_token_id": 1}
# name → (model class, its configuration)
TINY_OTHERS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    # Biases everywhere, layer norms, a window in each layer.
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config(**_SHAPE, sliding_window=8)),
    # Attention beside feed-forward layers, a part of each head turns, one matrix for queries, keys and values.
    "gpt-neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**_SHAPE, rotary_pct=0.5)),
    # Norms behind sublayers, windows in some layers, which alone know positions.
    "exaone4": (
        Exaone4ForCausalLM,
        Exaone4Config(
            **_SHAPE | {"num_hidden_layers": 3},
            sliding_window=10,
            sliding_window_pattern=3,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
    ),
    # Soft caps of scores and of logits, and a window in every second layer.
    "vaultgemma": (
        VaultGemmaForCausalLM,
        VaultGemmaConfig(
            **_SHAPE, head_dim=16, sliding_window=9, attn_logit_softcapping=1.5, final_logit_softcapping=3.0
        ),
    ),
    # Attention sinks beside multipliers of embeddings, scores, sums and logits.
    "granite-swa": (GraniteSWAForCausalLM, GraniteSWAConfig(**_SHAPE, sliding_window=7, logits_scaling=2.0)),
    "phi": (PhiForCausalLM, PhiConfig(**_SHAPE, qk_layernorm=True)),
    # Norms of heads; heads of a size that tensor cores do not have.
    "stablelm": (StableLmForCausalLM, StableLmConfig(**_SHAPE | {"hidden_size": 96}, qk_layernorm=True)),
}


def make_other(name: str) -> PreTrainedModel:
    """The model in transformers, float32, the same weights on every call."""
    model_class, config = TINY_OTHERS[name]
    return randomised(unset(lambda: model_class(copy.deepcopy(config))), name)


def save_other(name: str, directory: Path) -> Path:
    return save_checkpoint(make_other(name), directory)
