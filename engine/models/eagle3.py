"""EAGLE-3: one layer that drafts for a model whose hidden states it reads.

The head pairs what the target knew at a token, the states that enter three of its layers, with the token that came
next. It says what comes behind that. Its own state takes the place of the target's where it drafts further. The layout
is that of published checkpoints: `fc`, `midlayer`, `norm`, `lm_head`, and `d2t`, how much the target's number of each
of its fewer tokens is larger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.layers.backend import Backend
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Heads, Norm
from bequest.engine.layers.spec import Attention, FeedForward
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.weight import Weight
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.hf_config import parse_hf_config
from bequest.engine.models.rope import cos_sin_table
from bequest.engine.models.safetensors_files import find_safetensors

# Fields of config.json that change what a head computes, and what they must be.
_USUAL = {"num_hidden_layers": 1, "norm_before_residual": False, "norm_before_fc": False, "attention_bias": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """A Head (engine/runner/head_drafts.py)."""

    config: DecoderConfig  # of its one layer
    layers: tuple[int, ...]  # of the target, whose states it reads: what enters the layers of these numbers
    ops: Ops
    table: Weight  # [V, H]
    fuse: Weight  # [H, 3 HT]
    token_norm: Norm
    state_norm: Norm
    attention: Attention  # of both, side by side: its weight reads 2 H
    mlp_norm: Norm
    mlp: FeedForward
    norm: Norm
    logits: Weight  # [DV, H]
    targets: Tensor  # [DV] int64: the target's number of each of its tokens
    num_parameters: int

    def enter(self, features: Tensor) -> Tensor:
        return self.fuse(features)

    def forward(self, ids: Tensor, states: Tensor, step: LayerStep) -> Tensor:
        ops, attention, mlp = self.ops, self.attention, self.mlp
        tokens = ops.norm(self.table.rows(ids), self.token_norm, None, None)
        pairs = torch.cat([tokens, ops.norm(states, self.state_norm, None, None)], dim=1)
        states = states + attention.output(ops.attend(attention.qkv(pairs), attention.heads, step))
        inner = mlp.up.gated(ops.norm(states, self.mlp_norm, None, None), mlp.activation)
        return states + mlp.down(inner)

    def logits_of(self, states: Tensor, vocab_size: int) -> Tensor:
        """It knows some of the target's tokens."""
        own = self.logits(self.ops.norm(states, self.norm, None, None))
        return own.new_full((len(states), vocab_size), -torch.inf).index_copy_(1, self.targets, own)


def load_eagle3(path: Path, target: Decoder, backend: Backend, dtype: torch.dtype, num_positions: int) -> EagleHead:
    """Raises ModelError."""
    values = json.loads((path / "config.json").read_text())
    for name, usual in _USUAL.items():
        if values.get(name) not in (None, usual):
            said = f"{name} must be {json.dumps(usual)}, not {values[name]!r}"
            raise ModelError(f"{path / 'config.json'}: {said}: such heads of EAGLE-3 are not read")
    plain = {**values, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    config = parse_hf_config(plain, str(path / "config.json"))
    return _Reading(path, backend, dtype).head(config, target, _layers(values, target.config, path), num_positions)


def _layers(values: Mapping[str, object], target: DecoderConfig, path: Path) -> tuple[int, ...]:
    """As the head was trained: the third layer, the middle one and the last but two, unless its config says others."""
    given = values.get("eagle_config")
    named = given.get("eagle_aux_hidden_state_layer_ids") if isinstance(given, dict) else None
    num = target.num_layers
    layers = tuple(sorted(set(named or (2, num // 2, num - 3))))
    if len(layers) != 3 or not 0 <= layers[0] <= layers[-1] < num:
        raise ModelError(f"{path}: the head reads layers {layers} of a model that has {num}; take its own model")
    return layers


class _Reading:
    """The tensors of a head, on their way to a backend."""

    def __init__(self, path: Path, backend: Backend, dtype: torch.dtype) -> None:
        self._path = path
        self._backend = backend
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        for file in find_safetensors(path):
            with safe_open(file, framework="pt") as opened:
                self._tensors |= {_plain_name(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    def head(self, config: DecoderConfig, target: Decoder, layers: tuple[int, ...], num_positions: int) -> EagleHead:
        sizes = self._backend.head_sizes(self._dtype)
        if sizes and config.head_dim not in sizes:
            raise ModelError(
                f"{self._path}: the head has head_dim={config.head_dim}, and a GPU takes {sizes} in bfloat16"
            )
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        table = target.table
        if "embed_tokens.weight" in self._tensors:
            table = self._weight(["embed_tokens"], [target.config.vocab_size], hidden)
        elif hidden != target.config.hidden_size:
            raise ModelError(f"{self._path}: the head has no tokens of its own, and states of another size")
        num_tokens = self._tensor("lm_head.weight").shape[0]
        return EagleHead(
            config=config,
            layers=layers,
            ops=self._backend.ops,
            table=table,
            fuse=self._weight(["fc"], [hidden], 3 * target.config.hidden_size),
            token_norm=self._norm("layer.input_layernorm", hidden, eps),
            state_norm=self._norm("layer.hidden_norm", hidden, eps),
            attention=self._attention(config, num_positions),
            mlp_norm=self._norm("layer.post_attention_layernorm", hidden, eps),
            mlp=FeedForward(
                self._weight(["layer.mlp.gate_proj", "layer.mlp.up_proj"], [inner, inner], hidden),
                config.activation,
                self._weight(["layer.mlp.down_proj"], [hidden], inner),
                gated=True,
            ),
            norm=self._norm("norm", hidden, eps),
            logits=self._weight(["lm_head"], [num_tokens], hidden),
            targets=self._targets(num_tokens, target.config.vocab_size),
            num_parameters=sum(tensor.numel() for tensor in self._tensors.values() if tensor.is_floating_point()),
        )

    def _attention(self, config: DecoderConfig, num_positions: int) -> Attention:
        names = [f"layer.self_attn.{name}_proj" for name in "qkv"]
        rows = [config.q_size, config.kv_size, config.kv_size]
        rope = self._backend.vector(cos_sin_table(config.rope, config.rotary_dim, num_positions), torch.float32)
        return Attention(
            self._weight(names, rows, 2 * config.hidden_size),
            Heads(num_heads=config.num_heads, scale=config.attention_scale, cache_layer=0, rope=rope),
            self._weight(["layer.self_attn.o_proj"], [config.hidden_size], config.q_size),
        )

    def _targets(self, num_tokens: int, vocab_size: int) -> Tensor:
        targets = torch.arange(num_tokens)
        if "d2t" in self._tensors or num_tokens != vocab_size:
            targets += self._tensor("d2t", (num_tokens,))
        if targets.min() < 0 or targets.max() >= vocab_size:
            raise ModelError(f"{self._path}: the head has tokens that the model has not")
        return targets.to(self._backend.device)

    def _tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None or (shape is not None and tuple(tensor.shape) != shape):
            found = "is missing" if tensor is None else f"is {tuple(tensor.shape)}, not {shape}"
            raise ModelError(f"{self._path}: {name} of the head {found}")
        return tensor

    def _weight(self, names: list[str], rows: list[int], columns: int) -> Weight:
        matrices = [self._tensor(f"{name}.weight", (num, columns)) for name, num in zip(names, rows, strict=True)]
        return self._backend.weight(matrices, None, self._dtype)

    def _norm(self, name: str, size: int, eps: float) -> Norm:
        return Norm(self._backend.vector(self._tensor(f"{name}.weight", (size,)), self._dtype), eps)


def _plain_name(name: str) -> str:
    """Checkpoints call the one layer `midlayer` or `layers.0`."""
    for prefix in ("midlayer.", "layers.0."):
        if (name := name.removeprefix("model.")).startswith(prefix):
            return "layer." + name.removeprefix(prefix)
    return name
