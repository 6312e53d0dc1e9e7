"""Gives the first part of the cache its memory before steps write to it, on time that nobody else wants."""

from __future__ import annotations

import os
import threading

import torch

from bequest.engine.kernels import cpu as kernels

# At a time: one call holds up whoever changes the process's mappings.
_STEP_BYTES = 8 << 20


def populate_in_background(cache: torch.Tensor, most_bytes: int) -> threading.Thread:
    """Starts a thread of the lowest priority that ends when the first `most_bytes` of the cache have their pages.

    It changes no content, so steps may run meanwhile.
    """
    # Not a daemon, as it would be by default where the caller is one: the end of the interpreter would stop it inside a
    # kernel, which aborts the process. It looks itself whether the end has come.
    thread = threading.Thread(target=_populate, args=(cache, most_bytes), name="bequest-pages", daemon=False)
    thread.start()
    return thread


def _populate(cache: torch.Tensor, most_bytes: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # Linux: of this thread alone
    end = min(cache.nbytes, most_bytes)
    for begin in range(0, end, _STEP_BYTES):
        if not threading.main_thread().is_alive():
            return
        if not kernels.populate_pages(cache, begin, min(begin + _STEP_BYTES, end)):
            return
