"""The thread that populates the cache: it ends, and changes nothing."""

from __future__ import annotations

import threading

import pytest
import torch

from bequest.engine.runner.warm_pages import populate_in_background


@pytest.mark.parametrize("most_bytes", [0, 1, 4096, 10 << 20, 1 << 30])
@pytest.mark.parametrize("size", [1, 1000, 3 << 20])
def test_the_content_stays(size: int, most_bytes: int) -> None:
    cache = torch.arange(size, dtype=torch.float32)
    thread = populate_in_background(cache, most_bytes)
    thread.join(30)
    assert not thread.is_alive()
    assert torch.equal(cache, torch.arange(size, dtype=torch.float32))


def test_a_daemon_starts_no_daemon() -> None:
    """The end of the interpreter would stop it inside a kernel, and abort the process."""
    started: list[threading.Thread] = []
    caller = threading.Thread(target=lambda: started.append(populate_in_background(torch.zeros(1), 1)), daemon=True)
    caller.start()
    caller.join()
    assert not started[0].daemon
    started[0].join(30)
