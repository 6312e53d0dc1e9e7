"""Ranks that share one GPU: what they add up passes the host's memory, by gloo, so no step is captured.

NCCL refuses two ranks on one device. All else is what ranks with a GPU each do. `python -m tests.gpu.sharing_ranks` is
a rank that follows.
"""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from bequest.engine.ranks import following, leading, processes
from bequest.engine.ranks.group import GlooRanks


class SharingRanks(GlooRanks):
    def _all(self, part: Tensor) -> list[Tensor]:
        return [other.to(part.device) for other in super()._all(part.cpu())]


def join(meeting: str, rank: int, size: int, *, on_gpu: bool) -> GlooRanks:
    dist.init_process_group("gloo", store=FileStore(meeting, size), rank=rank, world_size=size)
    return SharingRanks(rank, size)


def share_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(leading, "join", join)
    monkeypatch.setattr(leading, "check_devices", lambda size, on_gpu: None)
    monkeypatch.setattr(processes, "_MODULE", __name__)


if __name__ == "__main__":
    following.join = join  # type: ignore[assignment]
    sys.exit(following.main())
