"""Ranks as processes: what they add up and lay side by side passes torch.distributed.

On a CPU by gloo. Sums are made here, in the order of ranks, from everybody's parts: gloo's own would add an element in
an order that depends on its place in the tensor, and a row's bits would depend on the rows beside it.
On GPUs by NCCL, on the stream of the step, so that graphs can have them captured.
"""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from bequest.engine.errors import ModelError
from bequest.engine.types.blocks import BlockBytes

# Ranks read their weights at different speeds, and wait here for the last. Steps have a watchdog of their own.
_PATIENCE = timedelta(hours=1)


def check_devices(size: int, *, on_gpu: bool) -> None:
    """Raises ModelError."""
    if not dist.is_available():
        raise ModelError(f"tensor_parallel_size={size}: this build of torch has no torch.distributed")
    if on_gpu and torch.cuda.device_count() < size:
        raise ModelError(
            f"tensor_parallel_size={size}, but this machine has {torch.cuda.device_count()} GPUs, and ranks are on one "
            "machine; take fewer, or device=cpu"
        )


def join(meeting: str, rank: int, size: int, *, on_gpu: bool) -> GlooRanks:
    """Returns when all ranks have come to the file `meeting`. Once in a process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are on one machine, whatever its name resolves to
    if on_gpu:
        torch.cuda.set_device(rank)
    kinds = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(kinds, store=FileStore(meeting, size), rank=rank, world_size=size, timeout=_PATIENCE)
    return NcclRanks(rank, size) if on_gpu else GlooRanks(rank, size)


def leave() -> None:
    """The process may join another time."""
    if dist.is_initialized():
        dist.destroy_process_group()


class GlooRanks:
    """Ranks on a CPU."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, part: Tensor) -> Tensor:
        first, *others = self._all(part)
        for other in others:
            first.add_(other)
        return first

    def joined(self, part: Tensor) -> Tensor:
        return torch.cat(self._all(part), dim=1)

    def least(self, value: int) -> int:
        return min(int(other) for other in self._all(torch.tensor([value])))

    def bytes_of_all(self, content: BlockBytes) -> list[BlockBytes] | None:
        own = torch.from_numpy(np.ascontiguousarray(content))
        found = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own, found, dst=0)
        return None if found is None else [part.numpy() for part in found]

    def _all(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        found = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(found, part)
        return found


class NcclRanks(GlooRanks):
    """Ranks with a GPU each. Numbers and bytes of the host still pass gloo."""

    def sum(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        dist.all_reduce(part)
        return part

    def joined(self, part: Tensor) -> Tensor:
        num_rows, width = part.shape
        found = part.new_empty(self.size * num_rows, width)
        dist.all_gather_into_tensor(found, part.contiguous())
        return found.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, -1)
