"""How many states of recurrent layers there is memory for."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.models.load import load_model
from bequest.engine.runner.memory import GIB, CacheWish
from bequest.engine.runner.state_memory import StateWish, plan_states, state_wish
from tests.engine.test_encoder_decoder_models import save_model


def cache_wish() -> CacheWish:
    return CacheWish(
        block_bytes=1600,
        block_size=16,
        max_model_len=64,
        max_model_len_asked=False,
        max_num_seqs=8,
        num_blocks=None,
        cache_gb=None,
        retain_fraction=None,
        host_cache_gb=1.0,
    )


def wish(**changes: object) -> StateWish:
    fields: dict[str, object] = {
        "shape": (2, 50),
        "architecture": "Tiny",
        "max_num_seqs": 8,
        "interval": None,
        "bytes_per_token": 100,
        "block_size": 16,
        "longest": 6400,
    }
    return StateWish(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_decoder_models_have_none(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    memory = plan_states(state_wish(EngineConfig(), load_model(tmp_path), cache_wish()), 1 << 30)
    assert memory.sizes is None and memory.num_bytes == 0 and memory.allocate() is None
    assert memory.max_num_seqs == EngineConfig().max_num_seqs


def test_a_decoder_without_recurrent_layers_has_none(tiny_model: Callable[[str], Path]) -> None:
    memory = plan_states(state_wish(EngineConfig(), load_model(tiny_model("llama")), cache_wish()), 1 << 30)
    assert memory.sizes is None


def test_enough_memory() -> None:
    memory = plan_states(wish(), 1 << 30)
    assert memory.sizes is not None and memory.max_num_seqs == 8
    assert memory.sizes.num_slots == 32 and memory.sizes.num_lease_slots == 16
    assert memory.sizes.interval == 16  # 400 bytes are four tokens' keys and values: a whole block
    states = memory.allocate()
    assert states is not None and states.shape == (32, 2, 50) and states.nbytes == memory.num_bytes


def test_fewer_sequences_where_memory_is_short() -> None:
    memory = plan_states(wish(interval=5), 2 * 400 * 17)
    assert memory.sizes is not None and memory.sizes.num_slots == 17
    assert memory.max_num_seqs == 4 and memory.sizes.interval == 5


def large(**changes: object) -> StateWish:
    """A GiB of states for each sequence."""
    return wish(shape=(1 << 20, 64), max_num_seqs=64, **changes)


@pytest.mark.parametrize(
    ("longest", "most", "sequences"),
    [
        (GIB // 4, 50 * GIB, 40),  # and 10 GiB for keys and values of 40
        (4 * GIB, 50 * GIB, 25),  # ten at their longest: half
        (GIB // 64, 50 * GIB, 42),  # others keep 8 GiB
        (GIB // 64, 12 * GIB, 6),
        (GIB // 64, 100 * GIB, 64),
        (None, 50 * GIB, 25),
    ],
)
def test_short_sequences_leave_states_more_than_half(longest: int | None, most: int, sequences: int) -> None:
    memory = plan_states(large(longest=longest), most)
    assert memory.max_num_seqs == sequences and memory.num_bytes == sequences * GIB


def test_a_cache_of_a_given_size_keeps_its_half(tiny_model: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_model("llama"))
    assert state_wish(EngineConfig(), loaded, cache_wish()).longest == 4 * 1600
    assert state_wish(EngineConfig(), loaded, replace(cache_wish(), cache_gb=1.0)).longest is None
    assert state_wish(EngineConfig(), loaded, replace(cache_wish(), num_blocks=9)).longest is None


def test_too_little_memory() -> None:
    with pytest.raises(ModelError, match="at least 8 of these are needed"):
        plan_states(wish(), 2 * 400 * 7)


def test_states_take_memory_when_they_are_written() -> None:
    memory = plan_states(wish(), 1 << 30).with_host(2 << 30)
    assert memory.host_bytes > 1 << 30
    before = pages_of_this_process()
    states = memory.allocate()
    assert states is not None and states.data_ptr() % 64 == 0
    assert not states[::100_000].any(), "they are zeros"
    assert pages_of_this_process() - before < (64 << 20) // resource.getpagesize()


def pages_of_this_process() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
