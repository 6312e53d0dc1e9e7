"""A process that does not outlive the one that started it, however that one ends: by `kill -9` or a closed terminal."""

from __future__ import annotations

import ctypes
from signal import Signals

_PR_SET_PDEATHSIG = 1  # of Linux


def end_with_parent(by: Signals) -> None:
    """The kernel sends this process `by` when the thread that started it ends. Holds through an exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
