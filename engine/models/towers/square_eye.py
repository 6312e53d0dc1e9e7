"""A transformer over patches of squares, and its projector: CLIP's, SigLIP's, and what was made of the latter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.layers.ops import Ops
from bequest.engine.models.towers.config import TowerActivation, VitConfig
from bequest.engine.models.towers.tensors import Affine, Tensors, TowerNorm, activated


class SquareEye:
    """An Eye."""

    def __init__(self, config: VitConfig, out_size: int, read: Tensors) -> None:
        self._config = config
        self._vit = Vit(config, read.under("vision."), max(config.projector.layers))
        self._projector = _projector(config, out_size, read.under("projector."))

    def rows(self, values: Tensor, ops: Ops) -> Tensor:
        states, wanted = self._vit.states(values), self._config.projector
        first = int(self._config.has_class and not wanted.keeps_class)
        rows = torch.cat([states[layer][:, first:] for layer in wanted.layers], dim=-1)  # [F, patches, D]
        if wanted.pool:
            rows = _pooled(rows, wanted.pool)
        elif wanted.shuffle > 1:
            rows = _shuffled(rows, wanted.shuffle)
        return self._projector(rows).flatten(0, 1)

    def held(self, height: int, width: int) -> None:
        return None

    def largest(self, max_patches: int) -> tuple[int, int, int]:
        side = self._config.image_size
        return max(1, max_patches // self._config.num_positions), side, side


def _pooled(rows: Tensor, factor: int) -> Tensor:
    """[F, S · S, D] → [F, S · S / factor², D]: the mean of neighbours in a square of patches."""
    frames, patches, size = rows.shape
    side = int(patches**0.5) // factor
    return rows.view(frames, side, factor, side, factor, size).mean((2, 4)).view(frames, side * side, size)


def _shuffled(rows: Tensor, factor: int) -> Tensor:
    """[F, S · S, D] → [F, S · S / factor², D · factor²]: neighbours in a square of patches become one row."""
    frames, patches, size = rows.shape
    side = int(patches**0.5) // factor
    rows = rows.view(frames, side, factor, side, factor, size).permute(0, 1, 3, 2, 4, 5)
    return rows.reshape(frames, side * side, factor * factor * size)


Projector = Callable[[Tensor], Tensor]


def _projector(config: VitConfig, out_size: int, read: Tensors) -> Projector:
    wanted = config.projector
    columns = config.hidden_size * len(wanted.layers) * wanted.shuffle**2
    if wanted.pool:
        return _NormedMatrix(config, out_size, read)
    if wanted.activation is None:
        return Affine(read, "proj", out_size, columns, has_bias=wanted.has_bias)
    return _TwoMatrices(read, out_size, columns, wanted.activation, has_bias=wanted.has_bias)


class _TwoMatrices:
    def __init__(self, read: Tensors, out_size: int, columns: int, kind: TowerActivation, *, has_bias: bool) -> None:
        self._first = Affine(read, "linear_1", out_size, columns, has_bias=has_bias)
        self._second = Affine(read, "linear_2", out_size, out_size, has_bias=has_bias)
        self._kind: TowerActivation = kind

    def __call__(self, rows: Tensor) -> Tensor:
        return self._second(activated(self._first(rows), self._kind))


class _NormedMatrix:
    """Gemma's: the norm's weights are apart from 1, and the matrix is stored the other way round."""

    def __init__(self, config: VitConfig, out_size: int, read: Tensors) -> None:
        size = config.hidden_size
        self._weight = read.get("mm_soft_emb_norm.weight", size).clone().add_(1)  # in place: as `_stacked` says
        self._matrix = read.get("mm_input_projection_weight", size, out_size)
        self._eps = config.norm_eps

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.rms_norm(rows, self._weight.shape, self._weight, self._eps) @ self._matrix


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
        self._before = TowerNorm(read, "pre_layrnorm", size, config.norm_eps) if config.has_class else None
        norms = config.norms_last and last == config.num_layers
        self._after = TowerNorm(read, "post_layernorm", size, config.norm_eps) if norms else None
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
        self._norms = TowerNorm(read, "layer_norm1", size, eps), TowerNorm(read, "layer_norm2", size, eps)
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
