"""A transformer over the patches of one image of any size: Qwen2-VL's and Qwen2.5-VL's.

Rotation tells a patch's row and column. Patches that become one row of the result are neighbours in the order that the
layers have them in. In Qwen2.5-VL most layers see a window of the image, so patches of a window are neighbours too.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from bequest.engine.layers.ops import Ops
from bequest.engine.models.towers.config import GridConfig
from bequest.engine.models.towers.grid_places import Parts, Places, PlacesBySize
from bequest.engine.models.towers.tensors import Affine, Tensors, TowerNorm, activated

_EPS = 1e-6
_WHOLE = 64  # what inner sizes are filled up to a multiple of


class GridEye:
    """An Eye."""

    def __init__(self, config: GridConfig, out_size: int, read: Tensors) -> None:
        at = read.under("vision.")
        size, patch, merged = config.hidden_size, config.patch_size, config.hidden_size * config.merge**2
        kernel = at.get("patch_embed.proj.weight", size, 3, config.num_frames, patch, patch)
        self._config = config
        self._patches = kernel.sum(2).flatten(1)  # an image is the same in every frame
        self._layers = [_Layer(config, at.under(f"blocks.{index}.")) for index in range(config.num_layers)]
        self._norm = TowerNorm(at, "merger.ln_q", size, _EPS, centred=not config.gated)
        self._merger = Affine(at, "merger.mlp.0", merged, merged), Affine(at, "merger.mlp.2", out_size, merged)
        self._places = PlacesBySize(config, self._patches.device)

    def rows(self, values: Tensor, ops: Ops) -> Tensor:
        config, patch = self._config, self._config.patch_size
        places = self._places.of(values.shape[2] // patch, values.shape[3] // patch)
        rows = functional.linear(self._cut(values[0]), self._patches)
        rows = rows if places.order is None else rows[places.order]
        for index, layer in enumerate(self._layers):
            sees_all = not config.window or index in config.full_layers
            rows = layer(rows, places, places.whole if sees_all else places.windows, ops)
        first, second = self._merger
        merged = second(activated(first(self._norm(rows).view(len(rows) // config.merge**2, -1)), "gelu"))
        return merged if places.back is None else merged[places.back]

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

    def __call__(self, rows: Tensor, places: Places, parts: Parts, ops: Ops) -> Tensor:
        rows = rows + self._attend(self._norms[0](rows), places, parts, ops)
        inner = self._inner(self._norms[1](rows))
        if not self._config.gated:
            return rows + self._outer(activated(inner, self._config.activation))
        gate, up = inner.chunk(2, dim=-1)
        return rows + self._outer(activated(gate, self._config.activation).mul_(up))

    def _attend(self, rows: Tensor, places: Places, parts: Parts, ops: Ops) -> Tensor:
        """Patches of a part see each other."""
        qkv = self._qkv(rows).view(len(rows), 3, self._config.num_heads, -1)
        query, key, value = qkv.unbind(1)  # [N, heads, D]
        ops.rotate(query, key, places.numbers, places.angles)
        return self._out(parts.attend(query, key, value).flatten(1))
