"""Tests of a GPU in parts: several processes share the card, which one of them alone leaves idle."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

KEPT_BYTES = 4 << 30  # of the card, by a process between two tests
NEIGHBOURS = 6  # tests that stay together: what they share is made once


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part", None)
    if part is None:
        return
    k, n = (int(number) for number in str(part).split("/"))
    if not 1 <= k <= n:
        raise pytest.UsageError(f"--part {part}: K must be 1 to N")
    items[:] = [item for place, item in enumerate(items) if place // NEIGHBOURS % n == k - 1]


@pytest.fixture(autouse=True)
def room_for_other_processes() -> Iterator[None]:
    """A large case gives its memory back, or processes beside this one would find the card taken."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        gc.collect()
        torch.cuda.empty_cache()
