"""The decoder family: Llama, Mistral, Qwen2, Qwen3 and what shares their shape.

Owned by the device thread. No row of a result depends on the other rows of the batch: only attention looks at other
tokens, and it looks at the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from engine import kernels
from engine.models.batch import ModelInput
from engine.models.config import DecoderConfig
from engine.models.layers import Embedding, Linear, RMSNorm
from engine.models.rope import cos_sin_table
from engine.models.weights import WeightSource, layer_prefix


class Attention:
    def __init__(self, config: DecoderConfig, layer: int, source: WeightSource, dtype: torch.dtype) -> None:
        prefix = layer_prefix(layer) + "self_attn."
        self.config = config
        self.layer = layer
        self.window = config.sliding_windows[layer]
        self.qkv = Linear.load(
            source, [prefix + name for name in ("q_proj", "k_proj", "v_proj")], dtype, config.attention_bias
        )
        self.output = Linear.load(source, [prefix + "o_proj"], dtype, config.attention_output_bias)
        self.q_norm = RMSNorm.load(source, prefix + "q_norm", config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm.load(source, prefix + "k_norm", config.rms_norm_eps) if config.qk_norm else None

    def __call__(self, x: Tensor, batch: ModelInput, cos_sin: Tensor) -> Tensor:
        """[T, H] → [T, H]"""
        config = self.config
        num_heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        heads = self.qkv(x).view(x.shape[0], sum(num_heads), config.head_dim)
        q, k, v = torch.split(heads, num_heads, dim=1)  # [T, NQ, D], [T, NKV, D], [T, NKV, D]
        if self.q_norm and self.k_norm:
            self.q_norm.per_head(q)
            self.k_norm.per_head(k)
        kernels.rotary(q, k, batch.positions, cos_sin)
        kernels.write_kv(k, v, batch.kv_cache, self.layer, batch.slot_mapping)
        attended = kernels.paged_attention(
            q, batch.kv_cache, self.layer, batch.attention[self.window], config.head_dim**-0.5
        )  # [T, NQ, D]
        return self.output(attended.flatten(1))


class MLP:
    def __init__(self, config: DecoderConfig, layer: int, source: WeightSource, dtype: torch.dtype) -> None:
        prefix = layer_prefix(layer) + "mlp."
        self.gate_up = Linear.load(source, [prefix + "gate_proj", prefix + "up_proj"], dtype, config.mlp_bias)
        self.down = Linear.load(source, [prefix + "down_proj"], dtype, config.mlp_bias)
        self.activate = _activation(config)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H]"""
        return self.down(self.activate(self.gate_up(x)))


class DecoderLayer:
    def __init__(self, config: DecoderConfig, layer: int, source: WeightSource, dtype: torch.dtype) -> None:
        prefix, eps = layer_prefix(layer), config.rms_norm_eps
        self.attention_norm = RMSNorm.load(source, prefix + "input_layernorm", eps)
        self.attention = Attention(config, layer, source, dtype)
        self.mlp_norm = RMSNorm.load(source, prefix + "post_attention_layernorm", eps)
        self.mlp = MLP(config, layer, source, dtype)

    def __call__(self, x: Tensor, residual: Tensor, batch: ModelInput, cos_sin: Tensor) -> Tensor:
        """x: [T, H], what the layer before adds to the residual; returns what this one adds."""
        x = self.attention(self.attention_norm(x, residual), batch, cos_sin)
        return self.mlp(self.mlp_norm(x, residual))


class Decoder:
    def __init__(self, config: DecoderConfig, source: WeightSource, dtype: torch.dtype, num_positions: int) -> None:
        """Weights are stored in `dtype`; `source` has passed check_tensors."""
        self.config = config
        # Dequantising and packing leave the interpreter, so threads help; each holds a layer's plain weights meanwhile.
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            embedding = pool.submit(Embedding.load, source, "model.embed_tokens", dtype)
            layers = pool.map(partial(DecoderLayer, config, source=source, dtype=dtype), range(config.num_layers))
            self.layers = list(_with_progress(layers, config.num_layers))
            self.embedding = embedding.result()
        self.norm = RMSNorm.load(source, "model.norm", config.rms_norm_eps)
        self.output = (
            self.embedding.as_linear()
            if config.tie_word_embeddings
            else Linear.load(source, ["lm_head"], dtype, has_bias=False)
        )
        self.cos_sin = cos_sin_table(config.rope, config.rotary_dim, num_positions)  # [P, rotary_dim]

    def forward(self, batch: ModelInput) -> Tensor:
        """[T, H] float32: the hidden states after the final norm. Writes K and V of every token to the cache."""
        x = self.embedding(batch.input_ids)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, residual, batch, self.cos_sin)
        return self.norm(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, V] float32"""
        return self.output(hidden)

    @property
    def weight_bytes(self) -> int:
        """Memory of the matrices; norms and biases are too small to count."""
        matrices = [self.embedding.weight]
        if not self.config.tie_word_embeddings:
            matrices.append(self.output.weight)
        for layer in self.layers:
            matrices += [layer.attention.qkv.weight, layer.attention.output.weight]
            matrices += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
        return sum(matrix.nbytes for matrix in matrices)


def _with_progress(layers: Iterable[DecoderLayer], num_layers: int) -> Iterator[DecoderLayer]:
    # disable=None: silent where stderr is not a terminal.
    yield from tqdm(layers, "loading weights", num_layers, unit=" layers", leave=False, disable=None)


def _activation(config: DecoderConfig) -> Callable[[Tensor], Tensor]:
    """[T, 2 I], the gate beside the input → [T, I]"""
    if config.activation == "silu":
        return kernels.silu_mul
    return partial(kernels.gelu_mul, tanh=config.activation == "gelu_tanh")
