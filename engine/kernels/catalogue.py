"""Catalogues where kernels read them: a PlacedCatalogue is one in a device's memory, a CatalogueRule adds the tokens
that may end an item. Beams and sampler rows refer to a rule and to a node of its tree. Both are immutable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bequest.engine import _C
from bequest.engine.types.catalogue import Catalogue

# csrc/ops/catalogue.h: CatalogueRule
RULE_DTYPE = np.dtype(
    [
        ("tokens", "u8"),
        ("first_child", "u8"),
        ("terminal", "u8"),
        ("num_nodes", "i4"),
        ("num_inner", "i4"),
        ("end_tokens", "u8"),
        ("num_ends", "i4"),
        ("reserved", "i4"),
    ]
)


class PlacedCatalogue:
    """A catalogue's arrays in the memory of a device; on the CPU they are the catalogue's own."""

    __slots__ = ("catalogue", "device", "first_child", "terminal", "tokens")

    def __init__(self, catalogue: Catalogue, device: torch.device) -> None:
        tree = catalogue.tree
        self.catalogue = catalogue
        self.device = device
        self.tokens = torch.from_numpy(tree.tokens).to(device)  # int32 [nodes]
        self.first_child = torch.from_numpy(tree.first_child).to(device)  # int32 [inner nodes + 1]
        self.terminal = torch.from_numpy(tree.terminal).to(device)  # int32, a bit per inner node, or empty


class CatalogueRule:
    """What may follow: items of a catalogue and, where one is complete, the end tokens. Cheap beside its catalogue."""

    __slots__ = ("_ends", "_on_device", "placed", "record")

    def __init__(self, placed: PlacedCatalogue, end_token_ids: Sequence[int]) -> None:
        ends = sorted(set(end_token_ids))
        if ends and not 0 <= ends[0] <= ends[-1] < placed.catalogue.vocab_size:
            raise _C.Error("catalogue: an end token is outside the vocabulary")
        self.placed = placed
        self._ends = torch.tensor(ends, dtype=torch.int32).to(placed.device)
        self.record = np.zeros((), RULE_DTYPE)
        self.record["tokens"] = placed.tokens.data_ptr()
        self.record["first_child"] = placed.first_child.data_ptr()
        self.record["terminal"] = placed.terminal.data_ptr() if placed.terminal.numel() else 0
        self.record["num_nodes"] = placed.tokens.numel()
        self.record["num_inner"] = placed.first_child.numel() - 1
        self.record["end_tokens"] = self._ends.data_ptr()
        self.record["num_ends"] = len(ends)
        self._on_device = torch.frombuffer(bytearray(self.record.tobytes()), dtype=torch.uint8).to(placed.device)

    @property
    def catalogue(self) -> Catalogue:
        return self.placed.catalogue

    @property
    def end_token_ids(self) -> list[int]:
        ends: list[int] = self._ends.tolist()
        return ends

    @property
    def address(self) -> int:
        """Of the record in the device's memory."""
        return self._on_device.data_ptr()
