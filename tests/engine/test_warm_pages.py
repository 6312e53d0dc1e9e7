"""The thread that populates the cache: it ends, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from engine.runner.warm_pages import populate_in_background


@pytest.mark.parametrize("most_bytes", [0, 1, 4096, 10 << 20, 1 << 30])
@pytest.mark.parametrize("size", [1, 1000, 3 << 20])
def test_the_content_stays(size: int, most_bytes: int) -> None:
    cache = torch.arange(size, dtype=torch.float32)
    thread = populate_in_background(cache, most_bytes)
    thread.join(30)
    assert not thread.is_alive()
    assert torch.equal(cache, torch.arange(size, dtype=torch.float32))
