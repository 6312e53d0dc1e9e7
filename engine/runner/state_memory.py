"""Memory for the states of recurrent layers: how many there are, and how many sequences can run with them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.load import LoadedModel
from bequest.engine.runner.memory import GIB, CacheWish, gib
from bequest.engine.runner.untouched import untouched_zeros
from bequest.engine.types.recurrent import StateSizes

log = logging.getLogger("bequest.start")

_SHARE = 0.5  # of what the cache may take, at least
_LEFT_FOR_OTHERS = 8 * GIB  # where it takes more: for the cache, and what a step needs beside it
_SLOTS_PER_SEQUENCE = 4  # two while it runs, and as many for what finished ones leave and leases hold
_LEAST_SLOTS = 2 * _SLOTS_PER_SEQUENCE


@dataclass(frozen=True, slots=True)
class StateWish:
    """What the configuration and the model say."""

    shape: tuple[int, ...]  # of one state
    architecture: str
    max_num_seqs: int
    interval: int | None
    bytes_per_token: int  # of keys and values
    block_size: int
    longest: int | None  # bytes of keys and values of a longest request; None: the cache has the size that it was given
    num_ranks: int = 1  # that have a part of this shape each

    @property
    def num_bytes(self) -> int:
        """Of one state, on all ranks."""
        return 4 * math.prod(self.shape) * self.num_ranks

    def limit(self, most: int) -> int:
        """Bytes for states, of `most` for all that comes beside the weights: half, or more where the cache then still
        has room for as many sequences at their longest as there are states for."""
        half = int(most * _SHARE)
        if self.longest is None:
            return half
        states = _SLOTS_PER_SEQUENCE * self.num_bytes
        return max(half, min(most // (states + self.longest) * states, most - _LEFT_FOR_OTHERS))


@dataclass(frozen=True, slots=True)
class StateMemory:
    sizes: StateSizes | None  # None: the model has no recurrent layers
    max_num_seqs: int
    shape: tuple[int, ...] = ()
    state_bytes: int = 0  # of one, on all ranks

    @property
    def num_bytes(self) -> int:
        return 0 if self.sizes is None else self.sizes.num_slots * self.state_bytes

    def allocate(self, device: torch.device | None = None) -> torch.Tensor | None:
        """[NS, LR, E] float32; on a CPU with those that lie on the host else."""
        if self.sizes is None:
            return None
        if device is not None:
            return torch.zeros((self.sizes.num_slots, *self.shape), dtype=torch.float32, device=device)
        count = self.sizes.num_slots + self.sizes.num_host_slots
        return untouched_zeros((count, *self.shape), torch.float32)

    def with_host(self, num_bytes: int) -> StateMemory:
        """With as many more for leases as so many bytes of the host's memory hold."""
        if self.sizes is None or num_bytes < self.state_bytes:
            return self
        count = num_bytes // self.state_bytes
        log.info("recurrent states: %d more in host memory, for leases", count)
        return replace(self, sizes=replace(self.sizes, num_host_slots=count))

    @property
    def host_bytes(self) -> int:
        return 0 if self.sizes is None else self.sizes.num_host_slots * self.state_bytes


def state_wish(config: EngineConfig, loaded: LoadedModel, cache: CacheWish, num_ranks: int = 1) -> StateWish:
    of = loaded.config
    shape = (0, 0) if isinstance(of, EncoderDecoderConfig) else of.state_shape
    per_token = cache.block_bytes // cache.block_size
    limits = (config.max_num_seqs, config.state_interval)
    is_given = cache.num_blocks is not None or cache.cache_gb is not None
    longest = None if is_given else cache.blocks_per_sequence * cache.block_bytes
    return StateWish(shape, of.architecture, *limits, per_token, config.block_size, longest, num_ranks)


def plan_states(wish: StateWish, most: int) -> StateMemory:
    """Takes its share of `most` bytes. Where that is too little for as many sequences as were asked for, fewer run at
    once."""
    if not wish.num_bytes:
        return StateMemory(None, wish.max_num_seqs)
    wanted = max(_SLOTS_PER_SEQUENCE * wish.max_num_seqs, _LEAST_SLOTS)
    num_slots = min(wanted, wish.limit(most) // wish.num_bytes)
    if num_slots < _LEAST_SLOTS:
        raise ModelError(
            f"{wish.architecture}: recurrent layers keep {gib(wish.num_bytes)} for a sequence, and at least "
            f"{_LEAST_SLOTS} of these are needed, but {gib(wish.limit(most))} of memory are free for them"
        )
    num_seqs = min(wish.max_num_seqs, num_slots // _SLOTS_PER_SEQUENCE)
    if num_seqs < wish.max_num_seqs:
        log.warning("max_num_seqs lowered from %d to %d, what states have room for", wish.max_num_seqs, num_seqs)
    sizes = StateSizes(num_slots=num_slots, num_lease_slots=num_slots // 2, interval=_interval(wish))
    log.info(
        "recurrent states: %d of %.2f MiB, %d of them for leases; kept each %d tokens",
        num_slots,
        wish.num_bytes / (1 << 20),
        sizes.num_lease_slots,
        sizes.interval,
    )
    return StateMemory(sizes, num_seqs, wish.shape, wish.num_bytes)


def _interval(wish: StateWish) -> int:
    """Kept states should not take more memory than the keys and values between them."""
    if wish.interval is not None:
        return wish.interval
    return max(1, -(-wish.num_bytes // (wish.bytes_per_token * wish.block_size))) * wish.block_size
