"""Catalogues in the memory of a device. Device thread only.

One is placed when a step first needs it; then those that were deleted or replaced since leave, and the least recently
used ones if there are too many. Whoever still runs under one holds it himself.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from bequest.engine.kernels.catalogue import CatalogueRule, PlacedCatalogue
from bequest.engine.types.catalogue import Catalogue

_MOST_BYTES = 1 << 30
_MOST_RULES = 256


class PlacedCatalogues:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._placed: OrderedDict[Catalogue, PlacedCatalogue] = OrderedDict()
        self._rules: OrderedDict[tuple[Catalogue, tuple[int, ...]], CatalogueRule] = OrderedDict()

    def rule(self, catalogue: Catalogue, end_token_ids: tuple[int, ...]) -> CatalogueRule:
        key = (catalogue, end_token_ids)
        rule = self._rules.get(key)
        if rule is None:
            rule = self._rules[key] = CatalogueRule(self._place(catalogue), end_token_ids)
            if len(self._rules) > _MOST_RULES:
                self._rules.popitem(last=False)
        self._rules.move_to_end(key)
        return rule

    def _place(self, catalogue: Catalogue) -> PlacedCatalogue:
        placed = self._placed.get(catalogue)
        if placed is None:
            self._remove([other for other in self._placed if other.retired])
            while self._placed and catalogue.num_bytes + sum(c.num_bytes for c in self._placed) > _MOST_BYTES:
                self._remove([next(iter(self._placed))])
            placed = self._placed[catalogue] = PlacedCatalogue(catalogue, self._device)
        self._placed.move_to_end(catalogue)
        return placed

    def _remove(self, catalogues: list[Catalogue]) -> None:
        for catalogue in catalogues:
            del self._placed[catalogue]
            for key in [key for key in self._rules if key[0] is catalogue]:
                del self._rules[key]

    def __contains__(self, catalogue: Catalogue) -> bool:
        return catalogue in self._placed

    def __len__(self) -> int:
        return len(self._placed)
