"""The decoder family: Llama, Mistral, Qwen2, Qwen3 and what shares their shape.

Owned by the device thread. No row of a result depends on the other rows of the batch: only attention looks at other
tokens, and it looks at the cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

from torch import Tensor
from tqdm import tqdm

from bequest.engine.models.backend import HeadNorm, LayerHead, LayerTail, Matrix, Projected, StreamNorm
from bequest.engine.models.batch import ModelInput, ReadRows
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.layers import Embedding, Linear, Loader, RMSNorm
from bequest.engine.models.rope import cos_sin_table
from bequest.engine.models.weights import layer_prefix


class Attention:
    def __init__(self, config: DecoderConfig, layer: int, loader: Loader) -> None:
        prefix = layer_prefix(layer) + "self_attn."
        self.config = config
        self.layer = layer
        self.backend = loader.backend
        self.window = config.sliding_windows[layer]
        self.scales = loader.kv_scales(prefix)
        self.qkv = Linear.load(
            loader, [prefix + name for name in ("q_proj", "k_proj", "v_proj")], config.attention_bias
        )
        self.output = Linear.load(loader, [prefix + "o_proj"], config.attention_output_bias)
        self.norm: HeadNorm | None = None
        if config.qk_norm:
            q_weight, k_weight = (loader.vector([f"{prefix}{name}_norm.weight"]) for name in ("q", "k"))
            self.norm = HeadNorm(q_weight, k_weight, config.head_norm_eps)

    def __call__(self, qkv: Tensor, batch: ModelInput, cos_sin: Tensor, read: ReadRows | None = None) -> Tensor:
        """[T, (NQ + 2 NKV) D] → what `output` projects: [T, NQ D]; with `read` the rows that it names.

        K and V of all are stored.
        """
        config = self.config
        projected = Projected(qkv, batch.positions, batch.slot_mapping, batch.kv_cache, self.layer, self.scales)
        work, scale = batch.attention[self.window], config.attention_scale
        if read is None:
            attended = self.backend.self_attention(projected, config.num_heads, cos_sin, self.norm, work, scale)
        else:
            q = self.backend.prepare_qkv(projected, config.num_heads, cos_sin, self.norm)[read.rows]  # [R, NQ, D]
            attended = self.backend.attention(q, batch.kv_cache, self.layer, read.attention, scale, scales=self.scales)
        return attended.flatten(1)


class MLP:
    def __init__(self, config: DecoderConfig, layer: int, loader: Loader) -> None:
        prefix = layer_prefix(layer) + "mlp."
        self.backend = loader.backend
        self.activation = config.activation
        self.gate_up = Linear.load(loader, [prefix + "gate_proj", prefix + "up_proj"], config.mlp_bias)
        self.down = Linear.load(loader, [prefix + "down_proj"], config.mlp_bias)

    def __call__(self, added: Tensor | None, residual: Tensor, norm: StreamNorm) -> Tensor | None:
        """[T, H] → what is still to be added to the residual, [T, H]."""
        gate_up = self.gate_up
        inner = self.backend.normed_gated_linear(
            added, residual, norm, gate_up.weight, gate_up.bias, self.activation
        )  # [T, I]
        return self.down.into(inner, residual)


class DecoderLayer:
    def __init__(self, config: DecoderConfig, layer: int, loader: Loader) -> None:
        prefix, eps = layer_prefix(layer), config.rms_norm_eps
        self.layer = layer
        self.attention_norm = RMSNorm.load(loader, prefix + "input_layernorm", eps)
        self.attention = Attention(config, layer, loader)
        self.mlp_norm = RMSNorm.load(loader, prefix + "post_attention_layernorm", eps)
        self.mlp = MLP(config, layer, loader)
        self.backend = loader.backend
        self.tail = LayerTail(
            self.attention.output.product,
            self.mlp_norm.tapped(None),
            self.mlp.gate_up.product,
            config.activation,
            self.mlp.down.product,
        )

    def project(self, added: Tensor | None, residual: Tensor, batch: ModelInput) -> Tensor:
        """[T, H] → queries, keys and values, [T, N]. added: what the layer before still adds to the residual."""
        head = self.head(batch)
        return self.backend.normed_linear(added, residual, head.norm, head.qkv.weight, head.qkv.bias)

    def to_next(self, attended: Tensor, residual: Tensor, following: DecoderLayer, batch: ModelInput) -> Tensor:
        """From what attention gives, [T, NQ D], to what the layer that follows projects, [T, N]."""
        if self.backend.can_chain(attended, self.tail):
            qkv = self.backend.chain(attended, residual, self.tail, following.head(batch))
            assert qkv is not None
            return qkv
        return following.project(self.finish(attended, residual), residual, batch)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor | None:
        """[T, NQ D] → what this layer still adds to the residual, [T, H]."""
        if self.backend.can_chain(attended, self.tail):
            return self.backend.chain(attended, residual, self.tail, None)
        added = self.attention.output.into(attended, residual)
        return self.mlp(added, residual, self.mlp_norm.tapped(None))

    def head(self, batch: ModelInput) -> LayerHead:
        return LayerHead(self.attention_norm.tapped(batch.tap_before(self.layer)), self.attention.qkv.product)


class Decoder:
    def __init__(self, config: DecoderConfig, loader: Loader, num_positions: int) -> None:
        """The loader's source has passed check_tensors."""
        self.config = config
        # Reading, dequantising and packing leave the interpreter, so threads help; each holds a layer's plain weights.
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            embedding = pool.submit(Embedding.load, loader, "model.embed_tokens")
            layers = pool.map(partial(DecoderLayer, config, loader=loader), range(config.num_layers))
            self.layers = list(_with_progress(layers, config.num_layers))
            self.embedding = embedding.result()
        self.norm = RMSNorm.load(loader, "model.norm", config.rms_norm_eps)
        self.output = (
            self.embedding.as_linear()
            if config.tie_word_embeddings
            else Linear.load(loader, ["lm_head"], has_bias=False)
        )
        # [P, rotary_dim]
        self.cos_sin = cos_sin_table(config.rope, config.rotary_dim, num_positions).to(loader.backend.device)

    def forward(self, batch: ModelInput) -> Tensor:
        """The hidden states after the final norm: [T, H], or [R, H] of the rows in `batch.read`.

        Writes K and V of every token to the cache, and hidden states to where `batch.tap` says.
        """
        residual = self.embedding(batch.input_ids, batch.last_tokens)
        qkv = self.layers[0].project(None, residual, batch)
        for layer, following in pairwise(self.layers):
            attended = layer.attention(qkv, batch, self.cos_sin)
            qkv = layer.to_next(attended, residual, following, batch)
        last = self.layers[-1]
        attended = last.attention(qkv, batch, self.cos_sin, batch.read)
        if batch.read is not None:
            residual = residual[batch.read.rows]
        added = last.finish(attended, residual)
        return self.norm(added, residual, batch.tap_after(self.config.num_layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, V]"""
        return self.output(hidden)

    @property
    def matrices(self) -> list[Matrix]:
        """Each once; norms and biases are too small to count."""
        matrices = [self.embedding.weight]
        if not self.config.tie_word_embeddings:
            matrices.append(self.output.weight)
        for layer in self.layers:
            matrices += [layer.attention.qkv.weight, layer.attention.output.weight]
            matrices += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
        return matrices


def _with_progress(layers: Iterable[DecoderLayer], num_layers: int) -> Iterator[DecoderLayer]:
    # disable=None: silent where stderr is not a terminal.
    yield from tqdm(layers, "loading weights", num_layers, unit=" layers", leave=False, disable=None)
