"""A transformer over the patches of one image of any size: Qwen2-VL's and Qwen2.5-VL's.

Rotation tells a patch's row and column. Patches that become one row of the result are neighbours in the order that the
layers have them in. In Qwen2.5-VL most layers see a window of the image, so patches of a window are neighbours too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.models.towers.config import GridConfig
from bequest.engine.models.towers.tensors import Affine, Tensors, TowerNorm, activated

_EPS = 1e-6
_THETA = 10000.0


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
        quarter = size // config.num_heads // 4
        self._frequencies = read.placed(_THETA ** (-torch.arange(quarter, dtype=torch.float32) / quarter))

    def rows(self, values: Tensor) -> Tensor:
        config = self._config
        patches, places = self._cut(values[0])
        order, windows = self._windows(places)
        rows = functional.linear(patches, self._patches)[order]
        turns = self._turns(places[order])
        whole = [torch.arange(len(rows), device=rows.device)[None]]
        for index, layer in enumerate(self._layers):
            rows = layer(rows, turns, whole if not config.window or index in config.full_layers else windows)
        first, second = self._merger
        merged = second(activated(first(self._norm(rows).view(len(rows) // config.merge**2, -1)), "gelu"))
        back = torch.empty_like(merged)
        back[order[:: config.merge**2] // config.merge**2] = merged
        return back

    def largest(self, max_patches: int) -> tuple[int, int, int]:
        side = self._config.patch_size * self._config.merge
        most = max(1, int((max_patches // self._config.merge**2) ** 0.5))
        return 1, side * most, side * most

    def _cut(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """[3, height, width] → patches [N, 3 · P · P], and their rows and columns [N, 2]: those of a square of `merge`
        are neighbours."""
        patch, merge = self._config.patch_size, self._config.merge
        rows, columns = values.shape[1] // patch, values.shape[2] // patch
        cut = values.view(3, rows // merge, merge, patch, columns // merge, merge, patch)
        patches = cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3 * patch * patch)
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(rows, columns, 2)
        grid = grid.view(rows // merge, merge, columns // merge, merge, 2).permute(0, 2, 1, 3, 4)
        return patches, grid.reshape(-1, 2).to(values.device)

    def _windows(self, places: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The order of patches [N] in which each window's are together, and of each size of windows their patches,
        [windows, patches of one], in that order."""
        window = self._config.window
        if not window:
            return torch.arange(len(places), device=places.device), []
        numbers = places // window
        number = numbers[:, 0] * (int(numbers[:, 1].max()) + 1) + numbers[:, 1]
        order = torch.argsort(number, stable=True)
        _, counts = torch.unique_consecutive(number[order], return_counts=True)
        begins = counts.cumsum(0) - counts
        sizes = [int(size) for size in counts.unique()]
        steps = {size: torch.arange(size, device=places.device) for size in sizes}
        return order, [begins[counts == size][:, None] + steps[size] for size in sizes]

    def _turns(self, places: Tensor) -> Tensor:
        """[N, D / 2]: angles of rows, then of columns."""
        return (places[:, :, None].float() * self._frequencies).flatten(1)


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
        self._inner = [Affine(mlp, name, inner, size) for name in names]
        self._outer = Affine(mlp, "down_proj" if config.gated else "fc2", size, inner)

    def __call__(self, rows: Tensor, turns: Tensor, parts: list[Tensor]) -> Tensor:
        rows = rows + self._attend(self._norms[0](rows), turns, parts)
        given = self._norms[1](rows)
        inner = activated(self._inner[0](given), self._config.activation)
        for other in self._inner[1:]:
            inner = inner * other(given)
        return rows + self._outer(inner)

    def _attend(self, rows: Tensor, turns: Tensor, parts: list[Tensor]) -> Tensor:
        """Patches of a part see each other; `parts`: [parts, patches of one] each."""
        query, key, value = self._qkv(rows).view(len(rows), 3, self._config.num_heads, -1).unbind(1)  # [N, heads, D]
        query, key = _turned(query, turns), _turned(key, turns)
        gathered = torch.empty_like(value)
        for part in parts:
            asked, found, told = (given[part].transpose(1, 2) for given in (query, key, value))
            # [parts, heads, patches, D]
            gathered[part] = functional.scaled_dot_product_attention(asked, found, told).transpose(1, 2)
        return self._out(gathered.flatten(1))


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    """Pairs of halves."""
    one, other = heads.float().chunk(2, dim=-1)
    cos, sin = turns.cos()[:, None], turns.sin()[:, None]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1).to(heads.dtype)
