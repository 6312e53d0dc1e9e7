"""Catalogues: sets of items, each a sequence of tokens, as prefix trees; what may follow the tokens chosen so far.

A `Catalogue` is built on the host, once; a `PlacedCatalogue` is the same in a device's memory; a `CatalogueRule` adds
the tokens that may end an item. Beams and sampler rows refer to a rule and to a node of its tree. All are immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine import _C
from engine.types import IntArray

ROOT = 0

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


def _address(array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> int:
    return int(array.__array_interface__["data"][0])


class Catalogue:
    """Items [N, D] int32, padded with -1; an item may be the beginning of another, and may come twice.

    Error on an empty item or set, on tokens outside [0, vocab_size) and on tokens behind padding. Releases the GIL.
    """

    __slots__ = ("_tree",)

    def __init__(self, items: IntArray, vocab_size: int, num_threads: int = 1) -> None:
        num_items, width = items.shape
        assert items.dtype == np.int32 and items.flags.c_contiguous, (items.dtype, items.strides)
        self._tree = _C.Catalogue(_address(items), 0, num_items, width, vocab_size, num_threads)

    @classmethod
    def from_ragged(
        cls, tokens: IntArray, offsets: npt.NDArray[np.int64], vocab_size: int, num_threads: int = 1
    ) -> Catalogue:
        """Item i is tokens[offsets[i] : offsets[i + 1]]; tokens [M] int32, offsets [N + 1] int64."""
        assert tokens.dtype == np.int32 and tokens.flags.c_contiguous and tokens.ndim == 1
        assert offsets.dtype == np.int64 and offsets.flags.c_contiguous and offsets.ndim == 1
        assert offsets[0] == 0 and offsets[-1] == tokens.size, (offsets[0], offsets[-1], tokens.size)
        catalogue = cls.__new__(cls)
        num_items = offsets.size - 1
        catalogue._tree = _C.Catalogue(_address(tokens), _address(offsets), num_items, 0, vocab_size, num_threads)
        return catalogue

    @property
    def num_items(self) -> int:
        """Distinct ones."""
        return self._tree.num_items

    @property
    def num_bytes(self) -> int:
        """Of its arrays, on the host and on every device it is placed on."""
        return self._tree.num_bytes

    @property
    def vocab_size(self) -> int:
        return self._tree.vocab_size

    @property
    def tree(self) -> _C.Catalogue:
        return self._tree

    def child(self, node: int, token: int) -> int:
        """-1: there is none."""
        return self._tree.child(node, token)

    def children(self, node: int) -> IntArray:
        """The tokens that may follow, ascending: a view."""
        return self._tree.children(node)

    def is_terminal(self, node: int) -> bool:
        """The tokens that lead to the node are an item."""
        return self._tree.is_terminal(node)

    def walk(self, tokens: Iterable[int], node: int = ROOT) -> int:
        """The node that the tokens lead to; -1: no item goes on like this."""
        for token in tokens:
            if node < 0:
                break
            node = self._tree.child(node, token)
        return node


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
