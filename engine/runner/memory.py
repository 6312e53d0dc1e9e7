"""Divides the memory: how many cache blocks there will be, and what to tell the user when there are too few."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ModelError

GIB = 1 << 30
# On a CPU the cache shares its memory with everything else on the machine: by default it takes at most this much.
_DEFAULT_SHARE = 0.4
_DEFAULT_MOST = 4 * GIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How memory was divided. `num_blocks` counts the null block too."""

    num_blocks: int
    block_bytes: int
    max_model_len: int
    available: int
    weights: int

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def table(self, block_size: int) -> str:
        tokens = (self.num_blocks - 1) * block_size
        return (
            f"weights {_gib(self.weights)}, cache {_gib(self.cache_bytes)} "
            f"({self.num_blocks:,} blocks of {block_size} tokens, {tokens:,} tokens), "
            f"free before the cache {_gib(self.available)}"
        )


def plan_memory(
    *,
    block_bytes: int,
    block_size: int,
    weights: int,
    num_blocks: int | None,
    cache_gb: float | None,
    max_model_len: int,
    max_model_len_asked: bool,
    max_num_seqs: int,
) -> MemoryPlan:
    """Sizes the pool, so that at least one request of max_model_len fits.

    A pool that is too small for the model's own length lowers max_model_len; for a length that was asked for it is an
    error that says which flag to set to what.
    """
    available = available_memory()
    blocks_per_sequence = -(-max_model_len // block_size)
    if num_blocks is None:
        limit = int(cache_gb * GIB) if cache_gb is not None else min(int(available * _DEFAULT_SHARE), _DEFAULT_MOST)
        most_useful = blocks_per_sequence * max_num_seqs + 1
        num_blocks = min(limit // block_bytes, most_useful)
    usable = max(0, num_blocks - 1)
    if usable < blocks_per_sequence:
        if max_model_len_asked or usable == 0:
            needed = (blocks_per_sequence + 1) * block_bytes
            held = usable * block_size
            raise ModelError(
                f"The cache of {num_blocks} blocks ({_gib(num_blocks * block_bytes)}) holds {held} tokens, but one "
                f"request may take --max-model-len {max_model_len}. Set --max-model-len {max(1, held)}, "
                f"or --num-blocks {blocks_per_sequence + 1}, or --kv-cache-gb {needed / GIB:.2f}."
            )
        max_model_len = usable * block_size
    if num_blocks * block_bytes > available:
        raise ModelError(
            f"The cache of {num_blocks} blocks needs {_gib(num_blocks * block_bytes)}, but only {_gib(available)} of "
            f"memory are free. Set --num-blocks {int(available * 0.9) // block_bytes} or fewer."
        )
    return MemoryPlan(num_blocks, block_bytes, max_model_len, available, weights)


def available_memory() -> int:
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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
