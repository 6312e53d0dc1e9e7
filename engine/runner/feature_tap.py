"""Hidden states of a step for two readers: a head that drafts reads the same layers of every token, and requests read
what they asked for. A step has one table of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.types.hidden import NOT_TAPPED, StepTaps

Places = npt.NDArray[np.int64]
_Masks = npt.NDArray[np.uint64]  # [T, 2] bit i: layer i is wanted


class FeatureRows:
    """Where the table of a step has which states."""

    def __init__(self, taps: StepTaps | None, layers: tuple[int, ...], num_tokens: int) -> None:
        """`taps`: of requests; `layers`: of the head, ascending."""
        self._taps = taps
        self._layers = layers
        self.masks: _Masks = np.zeros((num_tokens, 2), np.uint64)
        for layer in layers:
            self.masks[:, layer // 64] |= np.uint64(1 << layer % 64)
        if taps is not None:
            self.masks |= np.where(taps.rows[:, None] == NOT_TAPPED, np.uint64(0), taps.layers)
        counts = np.bitwise_count(self.masks).sum(axis=1)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.rows, self.num_rows = starts[:-1].copy(), int(starts[-1])  # [T] the first one of each token

    def of_head(self) -> Places:
        """[T, layers] of the head's layers."""
        rows = [self.rows + _below(self.masks, layer) for layer in self._layers]
        return np.stack(rows, axis=1).astype(np.int64)

    def of_requests(self) -> Places:
        """[num_rows] as their taps number them. REQUIRES: there are some"""
        taps = self._taps
        assert taps is not None
        places = np.zeros(taps.num_rows, np.int64)
        for layer in range(128):
            tokens = taps.tokens_of_layer(layer)
            wanted = taps.rows[tokens] + _below(taps.layers[tokens], layer)
            places[wanted] = self.rows[tokens] + _below(self.masks[tokens], layer)
        return places


class FeatureTap:
    """The table of a step on a CPU, which has memory of its own."""

    def __init__(self, taps: StepTaps | None, layers: tuple[int, ...], num_tokens: int, hidden_size: int) -> None:
        self._rows = FeatureRows(taps, layers, num_tokens)
        self._ring = torch.empty(self._rows.num_rows, hidden_size)

    @property
    def table(self) -> HiddenTap:
        masks = torch.from_numpy(self._rows.masks.view(np.int64))
        return HiddenTap(torch.from_numpy(self._rows.rows), masks, self._ring)

    def features(self) -> torch.Tensor:
        """[T, layers × H] of the head's layers."""
        return self._ring[torch.from_numpy(self._rows.of_head())].flatten(1)

    def of_requests(self) -> torch.Tensor:
        """[num_rows, H] as their taps number them. REQUIRES: there are some"""
        return self._ring[torch.from_numpy(self._rows.of_requests())]


def _below(masks: _Masks, layer: int) -> npt.NDArray[np.int64]:
    """How many of the layers before this one each mask [T, 2] has."""
    low = (1 << min(layer, 64)) - 1
    high = (1 << max(0, layer - 64)) - 1
    bits = masks & np.asarray([low, high], np.uint64)
    counts: npt.NDArray[np.int64] = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
    return counts
