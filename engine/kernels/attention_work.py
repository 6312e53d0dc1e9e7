"""The work of one step's attention, whichever backend does it."""

from __future__ import annotations


class AttentionWork:
    """Made by a runner, handed to the kernels of the same backend by a model that does not look into it."""

    __slots__ = ()
