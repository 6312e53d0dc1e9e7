"""Catalogues: sets of items, each a sequence of tokens, as prefix trees: what may follow the tokens chosen so far.

Built on the host, once, and immutable but for the note that it is `retired`; any thread may read one. No torch: the
server makes them from uploads.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from bequest.engine import _C

IntArray = npt.NDArray[np.int32]

ROOT = 0


def _address(array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> int:
    return int(array.__array_interface__["data"][0])


def _depth(first_child: IntArray) -> int:
    """Levels below the root. They stand one after the other: the children of a level's last inner node end the next."""
    depth, end = 0, 1
    while (next_end := int(first_child[min(end, first_child.size - 1)])) > end:
        depth, end = depth + 1, next_end
    return depth


class Catalogue:
    """Items [N, D] int32, padded with -1; an item may be the beginning of another, and may come twice.

    Error on an empty item or set, on tokens outside [0, vocab_size) and on tokens behind padding. Releases the GIL.
    """

    __slots__ = ("_tree", "depth", "retired")

    def __init__(self, items: IntArray, vocab_size: int, num_threads: int = 1) -> None:
        num_items, width = items.shape
        assert items.dtype == np.int32 and items.flags.c_contiguous, (items.dtype, items.strides)
        self._tree = _C.Catalogue(_address(items), 0, num_items, width, vocab_size, num_threads)
        self.depth = _depth(self._tree.first_child)  # tokens of the longest item
        self.retired = False  # no request will name it any more

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
        catalogue.depth = _depth(catalogue._tree.first_child)
        catalogue.retired = False
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

    def child_of_each(self, nodes: IntArray, tokens: IntArray) -> IntArray:
        """[N] child of each node for its token, of nodes and tokens [N]."""
        return self._tree.child_of_each(nodes, tokens)

    def children(self, node: int) -> IntArray:
        """The tokens that may follow, ascending: a view."""
        return self._tree.children(node)

    def is_terminal(self, node: int) -> bool:
        """The tokens that lead to the node are an item."""
        return self._tree.is_terminal(node)

    def items(self) -> tuple[IntArray, npt.NDArray[np.int64]]:
        """What from_ragged makes the same catalogue of: tokens [M] and offsets [N + 1] of the distinct items."""
        leads_to = self._tree.tokens
        num_children = np.diff(self._tree.first_child)  # [inner nodes]
        parents = np.concatenate([[ROOT], np.repeat(np.arange(len(num_children)), num_children)])  # [nodes]
        ends = np.ones(len(leads_to), np.bool_)
        ends[: len(num_children)] = num_children == 0
        if self._tree.terminal.size:
            bits = np.unpackbits(self._tree.terminal.view(np.uint8), bitorder="little")
            ends[: len(num_children)] |= bits[: len(num_children)].astype(np.bool_)
        columns = []  # the last tokens first
        nodes = np.flatnonzero(ends)
        while (nodes != ROOT).any():
            columns.append(leads_to[nodes])  # the root's is -1
            nodes = parents[nodes]
        padded = np.stack(columns[::-1], axis=1)  # [N, D], padding in front
        there = padded >= 0
        return padded[there], np.concatenate([[0], np.cumsum(there.sum(axis=1))])

    def walk(self, tokens: Iterable[int], node: int = ROOT) -> int:
        """The node that the tokens lead to; -1: no item goes on like this."""
        for token in tokens:
            if node < 0:
                break
            node = self._tree.child(node, token)
        return node
