"""The entries of a block table (BlockTable.blocks): a block of the device pool is its number, one of the host pool the
negative of it. Whoever wants to know which of the two an entry is asks here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Entries = npt.NDArray[np.int64]


def is_on_host(entry: int) -> bool:
    return entry < 0


def host_block(entry: int) -> int:
    """REQUIRES: is_on_host(entry)"""
    return -entry


def device_blocks(entries: Entries) -> Entries:
    """Those of the entries that are on the device."""
    return entries[entries > 0]


def host_blocks(entries: Entries) -> Entries:
    """The host blocks of those that are on the host."""
    return -entries[entries < 0]
