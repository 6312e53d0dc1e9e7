"""Divides the memory: how many cache blocks there will be, and what to tell the user when there are too few."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bequest.engine.errors import ModelError

GIB = 1 << 30
_LEAST_USEFUL_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class CacheWish:
    """What the configuration and the model say about the cache."""

    block_bytes: int
    block_size: int
    max_model_len: int
    max_model_len_asked: bool  # by the user; else it is the model's own
    max_num_seqs: int
    num_blocks: int | None  # as the user counts them, each with tokens of all layers
    cache_gb: float | None
    retain_fraction: float | None  # of the pool; None: half, or what a longest request leaves
    host_cache_gb: float
    max_encoder_len: int = 0  # of an encoder-decoder model
    num_strips: int = 1  # blocks that hold the same tokens (engine/models/strips.py)

    @property
    def self_blocks(self) -> int:
        """Of one strip."""
        return -(-self.max_model_len // self.block_size)

    @property
    def cross_blocks(self) -> int:
        return -(-self.max_encoder_len // self.block_size)

    @property
    def blocks_per_sequence(self) -> int:
        """Of a longest request that runs alone, even if it keeps all that slid out of its windows."""
        return self.num_strips * self.self_blocks + self.cross_blocks

    @property
    def useful_blocks(self) -> int:
        """More than anybody is likely to miss: all that can run at once at its longest, and three times as much for
        what finished requests leave; for small models room for wide beams at least."""
        return max(4 * self.blocks_per_sequence * self.max_num_seqs, _LEAST_USEFUL_BLOCKS) + 1


@dataclass(frozen=True, slots=True)
class Share:
    """A line of the table of memory."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CachePlan:
    """`num_blocks` counts the null block too."""

    num_blocks: int
    max_model_len: int
    num_lease_blocks: int  # of the pool, that leases may hold


_RETAIN_FRACTION = 0.5


def plan_cache(wish: CacheWish, available: int, default_limit: int, shares: list[Share]) -> CachePlan:
    """Sizes the pool within `available` bytes, so that at least one request of max_model_len fits.

    Unless the user says otherwise it takes up to `default_limit`. A pool that is too small for the model's own length
    lowers max_model_len; for a length that was asked for, or without enough memory, it is an error with the table of
    `shares` and the flags that would fit.
    """
    if wish.num_blocks is not None:
        num_blocks = wish.num_blocks * wish.num_strips
    elif wish.cache_gb is not None:
        num_blocks = int(wish.cache_gb * GIB) // wish.block_bytes
    else:
        num_blocks = max(0, min(default_limit // wish.block_bytes, wish.useful_blocks))
    told = num_blocks // wish.num_strips
    if num_blocks * wish.block_bytes > available:
        raise ModelError(
            f"The cache of {told} blocks needs {gib(num_blocks * wish.block_bytes)}, but only {gib(available)} "
            f"of memory are free for it ({table(shares)}). {_smaller(wish, available)}"
        )
    usable = max(0, num_blocks - 1)
    held = max(0, usable - wish.cross_blocks) // wish.num_strips * wish.block_size  # beside a longest encoder input
    if usable >= wish.blocks_per_sequence:
        return CachePlan(num_blocks, wish.max_model_len, _lease_blocks(wish, usable))
    if wish.max_model_len_asked or held == 0:
        raise ModelError(
            f"The cache of {told} blocks ({gib(num_blocks * wish.block_bytes)}) holds {held} tokens"
            f"{_beside(wish)}, but one request may take max_model_len={wish.max_model_len} ({table(shares)}). "
            f"{_shorter_or_larger(wish, held, usable)}"
        )
    if wish.retain_fraction:
        _lease_blocks(wish, usable)
    return CachePlan(num_blocks, held, 0)


def _smaller(wish: CacheWish, available: int) -> str:
    """In the setting that asked for too much."""
    if wish.num_blocks is None and wish.cache_gb is not None:
        return f"Set kv_cache_gb={math.floor(100 * available / GIB) / 100:g} or less."
    return f"Set num_blocks={max(0, available // wish.block_bytes // wish.num_strips)} or fewer."


def _shorter_or_larger(wish: CacheWish, held: int, usable: int) -> str:
    """What to set where one request does not fit; a length only where one would."""
    settings = [f"max_model_len={held}"] if held else []
    beside = usable - wish.num_strips * wish.self_blocks
    if wish.cross_blocks and beside > 0:
        settings.append(f"max_encoder_len={beside * wish.block_size}")
    needed = wish.blocks_per_sequence + 1
    settings.append(f"num_blocks={-(-needed // wish.num_strips)}")
    settings.append(f"kv_cache_gb={math.ceil(100 * needed * wish.block_bytes / GIB) / 100:.2f}")
    return f"Set {', or '.join(settings)}."


def _beside(wish: CacheWish) -> str:
    return f" beside max_encoder_len={wish.max_encoder_len}" if wish.max_encoder_len else ""


def _lease_blocks(wish: CacheWish, usable: int) -> int:
    """A request of the longest kind must fit beside the leases, or nobody could run when they fill their share."""
    left = usable - wish.blocks_per_sequence
    if wish.retain_fraction is None:
        return min(int(usable * _RETAIN_FRACTION), left)
    wanted = int(usable * wish.retain_fraction)
    if wanted > left:
        most = max(0, int(100 * left / usable)) / 100
        raise ModelError(
            f"retain_fraction={wish.retain_fraction:g} lets leases hold {wanted} of the {usable} cache blocks, but "
            f"beside them a request of {wish.max_model_len} tokens needs {wish.blocks_per_sequence}. Set "
            f"retain_fraction={most:g} or less, a smaller max_model_len=, or a larger num_blocks=."
        )
    return wanted


def host_bytes(wish: CacheWish, available: int) -> int:
    """Of the host's memory, for blocks and states: as many as asked for, and not more than `available`."""
    return min(int(wish.host_cache_gb * GIB), max(0, available))


def table(shares: list[Share]) -> str:
    return ", ".join(f"{share.name} {gib(share.num_bytes)}" for share in shares)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def host_memory() -> int:
    """Bytes this process may still take: what the machine has free, and what its cgroup allows if that is less."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            allowed = limit.read().strip()
            if allowed != "max":
                available = min(available, int(allowed) - int(current.read()))
    except OSError:
        pass  # no cgroup v2 here
    return max(0, available)
