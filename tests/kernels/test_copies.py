"""Copies by several threads."""

from __future__ import annotations

import numpy as np
import pytest

from bequest.engine.kernels.pixels import copy_bytes


@pytest.mark.parametrize("num_bytes", [0, 1, (1 << 18) - 1, (1 << 18) + 1, 3_219_888, 5 * (1 << 18)])
def test_every_byte_and_no_other(num_bytes: int) -> None:
    given = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    whole = np.full(num_bytes + 128, 7, np.uint8)
    copy_bytes(whole[64 : 64 + num_bytes], given)
    assert np.array_equal(whole[64 : 64 + num_bytes], given)
    assert (whole[:64] == 7).all() and (whole[64 + num_bytes :] == 7).all()
