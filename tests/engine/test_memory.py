"""How many blocks the pool gets, and what is said when they are too few."""

from __future__ import annotations

import pytest

from bequest.engine.errors import ModelError
from bequest.engine.runner.memory import GIB, CacheWish, Share, plan_cache

MIB = 1 << 20


def wish(**changed: object) -> CacheWish:
    values: dict[str, object] = {
        "block_bytes": MIB,
        "block_size": 16,
        "max_model_len": 1600,
        "max_model_len_asked": False,
        "max_num_seqs": 8,
        "num_blocks": None,
        "cache_gb": None,
        "retain_fraction": None,
        "host_cache_gb": 0.0,
    }
    return CacheWish(**{**values, **changed})  # type: ignore[arg-type]


SHARES = [Share("weights", GIB)]


def blocks(asked: CacheWish, available: int = 64 * GIB, default_limit: int = 64 * GIB) -> int:
    return plan_cache(asked, available, default_limit, SHARES).num_blocks


def test_finished_requests_get_room_beside_running_ones() -> None:
    assert blocks(wish(max_num_seqs=16)) == 4 * 100 * 16 + 1


def test_a_small_server_has_room_for_wide_beams() -> None:
    assert blocks(wish(max_num_seqs=1, max_model_len=64)) == 4096 + 1


def test_the_default_limit_holds() -> None:
    assert blocks(wish(), default_limit=2 * GIB) == 2048


def test_a_size_that_was_asked_for_is_taken_whole() -> None:
    assert blocks(wish(cache_gb=32.0, max_num_seqs=1), default_limit=GIB) == 32 * 1024
    assert blocks(wish(num_blocks=123), default_limit=GIB) == 123


def test_more_than_there_is_names_what_would_fit() -> None:
    with pytest.raises(ModelError, match=r"Set num_blocks=1024 or fewer"):
        blocks(wish(num_blocks=2000), available=GIB)
    with pytest.raises(ModelError, match=r"Set kv_cache_gb=1\.29 or less"):
        blocks(wish(cache_gb=2.0), available=int(1.299 * GIB))


def test_too_little_for_one_request() -> None:
    lowered = plan_cache(wish(num_blocks=51), GIB, GIB, SHARES)
    assert (lowered.max_model_len, lowered.num_lease_blocks) == (800, 0)
    with pytest.raises(ModelError, match=r"max_model_len=800, or num_blocks=101"):
        blocks(wish(num_blocks=51, max_model_len_asked=True))


def test_an_encoder_takes_blocks_too() -> None:
    lowered = plan_cache(wish(num_blocks=51, max_encoder_len=160), GIB, GIB, SHARES)
    assert lowered.max_model_len == 640


def test_what_is_said_to_fit_does() -> None:
    """Not a length where none would."""
    with pytest.raises(ModelError, match=r"\. Set num_blocks=101, or kv_cache_gb=0\.10\.$"):
        blocks(wish(num_blocks=1))
    long_input = {"max_model_len": 160, "max_encoder_len": 1600}
    with pytest.raises(ModelError, match=r"holds 0 tokens .*\. Set max_encoder_len=640, or num_blocks=111, or kv"):
        blocks(wish(num_blocks=51, **long_input))
    assert blocks(wish(num_blocks=51, max_model_len=160, max_encoder_len=640)) == 51
    assert blocks(wish(cache_gb=0.11, **long_input)) >= 111
