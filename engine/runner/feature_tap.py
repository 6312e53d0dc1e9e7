"""Hidden states of a step for two readers: a head that drafts reads the same layers of every token, and requests read
what they asked for. A step has one table of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.types.hidden import NOT_TAPPED, StepTaps

_Masks = npt.NDArray[np.uint64]  # [T, 2] bit i: layer i is wanted


class FeatureTap:
    def __init__(self, taps: StepTaps | None, layers: tuple[int, ...], num_tokens: int, hidden_size: int) -> None:
        """`taps`: of requests; `layers`: of the head, ascending."""
        self._taps = taps
        self._layers = layers
        self._masks: _Masks = np.zeros((num_tokens, 2), np.uint64)
        for layer in layers:
            self._masks[:, layer // 64] |= np.uint64(1 << layer % 64)
        if taps is not None:
            self._masks |= np.where(taps.rows[:, None] == NOT_TAPPED, np.uint64(0), taps.layers)
        counts = np.bitwise_count(self._masks).sum(axis=1)
        self._rows = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)  # [T + 1]
        self._ring = torch.empty(int(self._rows[-1]), hidden_size)

    @property
    def table(self) -> HiddenTap:
        masks = torch.from_numpy(self._masks.view(np.int64))
        return HiddenTap(torch.from_numpy(self._rows[:-1].copy()), masks, self._ring)

    def features(self) -> torch.Tensor:
        """[T, layers × H] of the head's layers."""
        rows = [self._rows[:-1] + _below(self._masks, layer) for layer in self._layers]
        places = torch.from_numpy(np.stack(rows, axis=1).astype(np.int64))  # [T, layers]
        return self._ring[places].flatten(1)

    def of_requests(self) -> torch.Tensor:
        """[num_rows, H] as their taps number them. REQUIRES: there are some"""
        taps = self._taps
        assert taps is not None
        places = np.zeros(taps.num_rows, np.int64)
        for layer in range(128):
            tokens = taps.tokens_of_layer(layer)
            wanted = taps.rows[tokens] + _below(taps.layers[tokens], layer)
            places[wanted] = self._rows[tokens] + _below(self._masks[tokens], layer)
        return self._ring[torch.from_numpy(places)]


def _below(masks: _Masks, layer: int) -> npt.NDArray[np.int64]:
    """How many of the layers before this one each mask [T, 2] has."""
    low = (1 << min(layer, 64)) - 1
    high = (1 << max(0, layer - 64)) - 1
    bits = masks & np.asarray([low, high], np.uint64)
    counts: npt.NDArray[np.int64] = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
    return counts
