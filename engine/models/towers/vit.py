"""A transformer over patches of squares: CLIP's, SigLIP's, and what was made of the latter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.models.reader import Reader
from bequest.engine.models.towers.config import TowerActivation, VitConfig


class Tensors:
    """Reads tensors by name, in the dtype that a tower computes in."""

    def __init__(self, read: Reader, dtype: torch.dtype) -> None:
        self._read = read
        self.dtype = dtype

    def under(self, prefix: str) -> Tensors:
        return Tensors(self._read.under(prefix), self.dtype)

    def get(self, name: str, *shape: int) -> Tensor:
        return self._read.placed(self._read.tensor(name, shape)).to(self.dtype)


class Affine:
    """A matrix and its bias."""

    def __init__(self, read: Tensors, name: str, rows: int, columns: int, *, has_bias: bool = True) -> None:
        self._matrix = read.get(f"{name}.weight", rows, columns)
        self._bias = read.get(f"{name}.bias", rows) if has_bias else None

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._matrix, self._bias)


class LayerNorm:
    def __init__(self, read: Tensors, name: str, size: int, eps: float) -> None:
        self._weight = read.get(f"{name}.weight", size)
        self._bias = read.get(f"{name}.bias", size)
        self._eps = eps

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.layer_norm(rows, self._weight.shape, self._weight, self._bias, self._eps)


def activated(rows: Tensor, kind: TowerActivation) -> Tensor:
    if kind == "quick_gelu":
        return rows * torch.sigmoid(1.702 * rows)
    if kind == "silu":
        return functional.silu(rows)
    if kind == "relu":
        return functional.relu(rows)
    return functional.gelu(rows, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none")


class Vit:
    def __init__(self, config: VitConfig, read: Tensors, last: int) -> None:
        """`last`: the number of the last layer whose output is wanted; those behind it are not read."""
        size, patch = config.hidden_size, config.patch_size
        self._config = config
        at = read.under("embeddings.")
        self._patches = at.get("patch_embedding.weight", size, 3, patch, patch)
        self._positions = at.get("position_embedding.weight", config.num_positions, size)
        self._class = at.get("class_embedding", size) if config.has_class else None
        self._bias = None if config.has_class else at.get("patch_embedding.bias", size)
        self._before = LayerNorm(read, "pre_layrnorm", size, config.norm_eps) if config.has_class else None
        norms = config.norms_last and last == config.num_layers
        self._after = LayerNorm(read, "post_layernorm", size, config.norm_eps) if norms else None
        self._layers = [_Layer(config, read.under(f"encoder.layers.{index}.")) for index in range(last)]

    def states(self, pixels: Tensor) -> list[Tensor]:
        """[F, 3, height, width] → what each layer reads, and what the last one gives: [F, positions, D] each."""
        rows = functional.conv2d(pixels, self._patches, self._bias, stride=self._config.patch_size)
        rows = rows.flatten(2).transpose(1, 2)
        if self._class is not None:
            rows = torch.cat([self._class.expand(len(rows), 1, -1), rows], dim=1)
        rows = rows + self._positions
        states = [rows if self._before is None else self._before(rows)]
        for layer in self._layers:
            states.append(layer(states[-1]))
        if self._after is not None:
            states[-1] = self._after(states[-1])
        return states


class _Layer:
    def __init__(self, config: VitConfig, read: Tensors) -> None:
        size, eps = config.hidden_size, config.norm_eps
        attention, mlp = read.under("self_attn."), read.under("mlp.")
        self._config = config
        self._norms = LayerNorm(read, "layer_norm1", size, eps), LayerNorm(read, "layer_norm2", size, eps)
        self._qkv = [Affine(attention, name, size, size) for name in ("q_proj", "k_proj", "v_proj")]
        self._out = Affine(attention, "out_proj", size, size)
        self._inner = Affine(mlp, "fc1", config.inner_size, size)
        self._outer = Affine(mlp, "fc2", size, config.inner_size)

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows + self._attend(self._norms[0](rows))
        return rows + self._outer(activated(self._inner(self._norms[1](rows)), self._config.activation))

    def _attend(self, rows: Tensor) -> Tensor:
        heads = [affine(rows).unflatten(-1, (self._config.num_heads, -1)).transpose(1, 2) for affine in self._qkv]
        gathered = functional.scaled_dot_product_attention(*heads)
        return self._out(gathered.transpose(1, 2).flatten(2))
