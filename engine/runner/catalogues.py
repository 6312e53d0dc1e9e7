"""Catalogues in the memory of a device, by the handles that they were registered under. Device thread only.

One is placed when a step first needs it: then the runner has seen to it that the device may be asked for memory. Who
runs under one that was released meanwhile holds it himself.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from bequest.engine.kernels.catalogue import CatalogueRule, PlacedCatalogue
from bequest.engine.types import CatalogueSpec, IntArray
from bequest.engine.types.catalogue import Catalogue

_MOST_RULES = 256


class PlacedCatalogues:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: dict[int, Catalogue] = {}
        self._placed: dict[int, PlacedCatalogue] = {}
        self._rules: OrderedDict[tuple[int, tuple[int, ...]], CatalogueRule] = OrderedDict()

    def register(self, handle: int, catalogue: Catalogue) -> None:
        assert handle not in self._registered, "a handle stands for one catalogue"
        self._registered[handle] = catalogue

    def release(self, handle: int) -> None:
        del self._registered[handle]
        self._placed.pop(handle, None)
        for key in [key for key in self._rules if key[0] == handle]:
            del self._rules[key]

    def rule(self, spec: CatalogueSpec) -> CatalogueRule:
        key = (spec.handle, spec.end_token_ids)
        rule = self._rules.get(key)
        if rule is None:
            rule = self._rules[key] = CatalogueRule(self._place(spec.handle), spec.end_token_ids)
            if len(self._rules) > _MOST_RULES:
                self._rules.popitem(last=False)
        self._rules.move_to_end(key)
        return rule

    def child_of_each(self, spec: CatalogueSpec, nodes: IntArray, tokens: IntArray) -> IntArray:
        return self._registered[spec.handle].child_of_each(nodes, tokens)

    def is_placed(self, handle: int) -> bool:
        return handle in self._placed

    def _place(self, handle: int) -> PlacedCatalogue:
        placed = self._placed.get(handle)
        if placed is None:
            placed = self._placed[handle] = PlacedCatalogue(self._registered[handle], self._device)
        return placed

    def __len__(self) -> int:
        return len(self._registered)
