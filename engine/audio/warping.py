"""When tokens were spoken: the way through their weights over time that gathers the most, by dynamic time warping.

The way begins at the first token and position and ends at the last of both. Each step of it goes on by a token, by a
position, or by both. On a GPU or not, this is NumPy: a way is found one diagonal after another.

Dims: T tokens, E positions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BOTH, _TOKEN, _POSITION = 0, 1, 2


def first_positions(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """[T]: the position at which the way through weights [T, E] comes to each token; never falling.

    REQUIRES: there is a token and a position
    """
    num_tokens, num_positions = weights.shape
    steps = _steps(-weights.astype(np.float64))
    firsts = np.zeros(num_tokens, np.int64)
    token, position = num_tokens, num_positions
    while token > 0 and position > 0:
        firsts[token - 1] = position - 1
        step = steps[token, position]
        token -= step != _POSITION
        position -= step != _TOKEN
    return firsts


def _steps(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int8]:
    """[T + 1, E + 1]: by which step the cheapest way comes to each place; row and column 0 lie outside."""
    num_tokens, num_positions = costs.shape
    width = num_positions + 1
    # Along a diagonal, from a place to the one a token later and a position earlier, addresses differ by width - 1.
    total = np.full((num_tokens + 1) * width, np.inf, np.float32)
    steps = np.full((num_tokens + 1) * width, _POSITION, np.int8)
    total[0] = 0
    flat = np.zeros((num_tokens + 1, width))
    flat[1:, 1:] = costs
    added = flat.reshape(-1)
    for diagonal in range(2, num_tokens + num_positions + 1):
        first, last = max(1, diagonal - num_positions), min(num_tokens, diagonal - 1)
        places = slice(first * width + diagonal - first, last * width + diagonal - last + 1, width - 1)
        both, token, position = (total[_before(places, by)] for by in (width + 1, width, 1))
        by_both, by_token = (both < token) & (both < position), (token < both) & (token < position)
        steps[places] = np.where(by_both, _BOTH, np.where(by_token, _TOKEN, _POSITION))
        total[places] = added[places] + np.where(by_both, both, np.where(by_token, token, position))
    return steps.reshape(num_tokens + 1, width)


def _before(places: slice, by: int) -> slice:
    return slice(places.start - by, places.stop - by, places.step)
