"""Tables of the rotary position embedding. Rotation pairs dimension i with i + rot_dim / 2 (the "half" style)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.models.config import RopeConfig
from bequest.engine.types.image import MOST_TURNED


def pair_halves(rows: Tensor, num_heads: int, rotary_dim: int) -> Tensor:
    """Reorders rows of Q or K ([heads * D, H], or [heads * D] of a bias) from a rotation that pairs neighbours
    (0, 1), (2, 3), … to one that pairs halves (0, r/2), (1, r/2 + 1), …, r being `rotary_dim`."""
    head_dim = rows.shape[0] // num_heads
    heads = rows.view(num_heads, head_dim, *rows.shape[1:])
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
    return heads[:, order].flatten(0, 1)


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, num_positions: int = 0) -> Tensor:
    """[rotary_dim / 2] float32: the angle a pair of dimensions turns by from one position to the next, where
    `num_positions` are served."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    plain = 1.0 / rope.theta**exponents
    if rope.frequency_divisors:
        plain = plain / torch.tensor(rope.frequency_divisors)
    match rope.kind:
        case "default" | "dynamic":  # dynamic scaling starts beyond the positions we serve
            return plain
        case "linear":
            return plain / rope.factor
        case "proportional":  # the last pairs do not turn
            num_turned = int(rope.partial_factor * rotary_dim // 2)
            return torch.where(torch.arange(rotary_dim // 2) < num_turned, plain / rope.factor, 0.0)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain, rotary_dim)
        case "longrope":
            # Of two sets of divisors the whole cache has one: keys that were turned by the other would be lost.
            is_long = num_positions > rope.original_max_position
            return plain / torch.tensor(rope.long_divisors if is_long else rope.short_divisors)


def cos_sin_table(rope: RopeConfig, rotary_dim: int, num_positions: int) -> Tensor:
    """[P, rotary_dim] float32: the cosines of a position's angles, then their sines."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, rotary_dim, num_positions)  # [P, rotary_dim / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def query_scales(rope: RopeConfig, num_positions: int) -> Tensor | None:
    """[P] float32: what queries are multiplied by; None: nothing."""
    if not rope.query_growth:
        return None
    lengths = torch.arange(num_positions).div(rope.original_max_position, rounding_mode="floor")
    return 1 + rope.query_growth * torch.log(1 + lengths.float())


class Turns:
    """Rotation by three positions, of rows of images: in time, from above and from the left.

    Kernels look a token's angles up by one number. So angles of such tokens are put into rows behind the table's own,
    step by step, and their number is that of the row.
    """

    def __init__(self, table: Tensor, axes: Sequence[int]) -> None:
        """`axes`: which of the three turns each pair of dimensions."""
        self._num_positions, width = table.shape
        if 2 * len(axes) != width:
            raise ModelError(f"mrope_section divides {len(axes)} pairs of dimensions, a head turns {width // 2}")
        self.table = torch.cat([table, table.new_zeros(MOST_TURNED, width)])
        self._axes = torch.tensor([*axes, *axes], device=table.device)
        self._columns = torch.arange(width, device=table.device)

    def place(self, turns: Tensor) -> Tensor:
        """[M, 3] int32 → [M] int32: rows of the table that turn so, until the next call."""
        assert len(turns) <= MOST_TURNED, "steps are bounded"
        positions = turns.long()[:, self._axes]  # [M, R]
        self.table[self._num_positions : self._num_positions + len(turns)] = self.table[positions, self._columns]
        return torch.arange(
            self._num_positions, self._num_positions + len(turns), dtype=torch.int32, device=turns.device
        )


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Waves that fit into the training context many times stay, long ones are stretched, those between are blended."""
    wave_length = 2 * math.pi / plain
    turns = rope.original_max_position / wave_length  # in the training context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, blend.clamp(0.0, 1.0))


def _yarn(rope: RopeConfig, plain: Tensor, rotary_dim: int) -> Tensor:
    """As llama3's, but the blend is linear in the dimension's index rather than in the frequency."""

    def dimension_that_turns(times: float) -> float:
        return rotary_dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return torch.lerp(plain, plain / rope.factor, stretched)
