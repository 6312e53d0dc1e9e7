"""A transformer over the patches of one image of any size: those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

Rotation tells a patch's row and column; in the later two a table of positions does, too. Patches that become one row of
the result are neighbours in the order that the layers have them in. In Qwen2.5-VL most layers see a window of the
image, so patches of a window are neighbours too. In Qwen3-VL rows are made of some layers in the middle as well, for
the first layers of the text model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.layers.ops import Ops
from bequest.engine.layers.stream import Stream
from bequest.engine.models.towers.config import GridConfig
from bequest.engine.models.towers.grid_places import Parts, Places, PlacesBySize
from bequest.engine.models.towers.tensors import Affine, Tensors, TowerNorm, activated

_EPS = 1e-6
_WHOLE = 64  # what inner sizes are filled up to a multiple of


class GridEye:
    """An Eye."""

    def __init__(self, config: GridConfig, out_size: int, read: Tensors) -> None:
        at = read.under("vision.")
        size, patch = config.hidden_size, config.patch_size
        kernel = at.get("patch_embed.proj.weight", size, 3, config.num_frames, patch, patch)
        self._config = config
        self._patches = kernel.sum(2).flatten(1)  # an image is the same in every frame
        self._layers = [_Layer(config, at.under(f"blocks.{index}.")) for index in range(config.num_layers)]
        self._bias = at.get("patch_embed.proj.bias", size) if config.table_side else None
        self._table = at.get("pos_embed.weight", config.table_side**2, size) if config.table_side else None
        self._merger = _Merger(config, out_size, at.under("merger."))
        self._deep = {
            layer: _Merger(config, out_size, at.under(f"deep.{index}."), norms_merged=True)
            for index, layer in enumerate(config.deep_layers)
        }
        self._places = PlacesBySize(config, self._patches.device)

    def rows(self, values: Tensor, ops: Ops) -> Tensor:
        """With those of deep layers beside each other: [rows, (1 + deep layers) · H]."""
        config = self._config
        places = self.held(values.shape[2], values.shape[3])
        rows = functional.linear(self._cut(values[0]), self._patches, self._bias)
        if self._table is not None and places.stretched is not None:
            rows = rows + places.stretched.rows(self._table)
        stream = Stream(ops, rows if places.order is None else rows[places.order])
        deep = []
        for index, layer in enumerate(self._layers):
            sees_all = not config.window or index in config.full_layers
            layer(stream, places, places.whole if sees_all else places.windows)
            if index in self._deep:
                deep.append(self._deep[index](stream))
        merged = self._merger(stream)
        merged = torch.cat([merged, *deep], dim=1) if deep else merged
        return merged if places.back is None else merged[places.back]

    def held(self, height: int, width: int) -> Places:
        return self._places.of(height // self._config.patch_size, width // self._config.patch_size)

    def largest(self, max_patches: int) -> tuple[int, int, int]:
        side = self._config.patch_size * self._config.merge
        most = max(1, int((max_patches // self._config.merge**2) ** 0.5))
        return 1, side * most, side * most

    def _cut(self, values: Tensor) -> Tensor:
        """[3, height, width] → patches [N, 3 · P · P], in the order of `cut_places`."""
        patch, merge = self._config.patch_size, self._config.merge
        rows, columns = values.shape[1] // patch, values.shape[2] // patch
        cut = values.view(3, rows // merge, merge, patch, columns // merge, merge, patch)
        return cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3 * patch * patch)


class _Merger:
    """Patches of a square, side by side, become one row of the text model."""

    def __init__(self, config: GridConfig, out_size: int, read: Tensors, *, norms_merged: bool = False) -> None:
        """`norms_merged`: patches of a square are normed as one."""
        self._width = merged = config.hidden_size * config.merge**2
        self._norms_merged = norms_merged
        size = merged if norms_merged else config.hidden_size
        self._norm = TowerNorm(read, "ln_q", size, _EPS, centred=not config.gated)
        self._first, self._second = Affine(read, "mlp.0", merged, merged), Affine(read, "mlp.2", out_size, merged)

    def __call__(self, stream: Stream) -> Tensor:
        """Of N patches → [N / merge², H]; the stream stays as it is."""
        if self._norms_merged:
            rows = self._norm(stream.state().view(-1, self._width))
        else:
            rows = stream.normed(self._norm.norm).view(-1, self._width)
        return self._second(activated(self._first(rows), "gelu"))


class _Layer:
    def __init__(self, config: GridConfig, read: Tensors) -> None:
        size, inner = config.hidden_size, config.inner_size
        attention, mlp = read.under("attn."), read.under("mlp.")
        centred = not config.gated
        self._config = config
        self._norms = [TowerNorm(read, name, size, _EPS, centred=centred) for name in ("norm1", "norm2")]
        self._qkv = Affine(attention, "qkv", 3 * size, size)
        self._out = Affine(attention, "proj", size, size)
        names = ("gate_proj", "up_proj") if config.gated else ("fc1",)
        self._inner = Affine(mlp, names, inner, size, whole_rows=_WHOLE)
        self._outer = Affine(mlp, "down_proj" if config.gated else "fc2", size, inner, whole_columns=_WHOLE)

    def __call__(self, stream: Stream, places: Places, parts: Parts) -> None:
        ops = stream.ops
        stream.add(self._attend(stream.normed(self._norms[0].norm), places, parts, ops))
        inner = self._inner(stream.normed(self._norms[1].norm))
        gated = self._config.gated
        stream.add(self._outer(self._gated(inner, ops) if gated else activated(inner, self._config.activation)))

    def _gated(self, inner: Tensor, ops: Ops) -> Tensor:
        """[N, 2 I] → [N, I]"""
        if self._config.activation == "silu":
            return ops.gated_activation(inner, "silu")
        gate, up = inner.chunk(2, dim=-1)
        return activated(gate, self._config.activation).mul_(up)

    def _attend(self, rows: Tensor, places: Places, parts: Parts, ops: Ops) -> Tensor:
        """Patches of a part see each other."""
        qkv = self._qkv(rows).view(len(rows), 3, self._config.num_heads, -1)
        gathered = ops.attend_windows(qkv, parts.starts, parts.longest, places.angles)
        if gathered is None:
            query, key, value = qkv.unbind(1)  # [N, heads, D]
            ops.rotate(query, key, places.numbers, places.angles)
            gathered = ops.attend_image(qkv) if parts.is_one else None
            gathered = parts.attend(query, key, value) if gathered is None else gathered
        return self._out(gathered.flatten(1))
