"""Tensor parallel on a GPU: ranks that share one, and NCCL with a single rank inside a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from bequest.engine.ranks.group import NcclRanks, leave
from bequest.offline import LLM, SamplingParams
from tests.gpu.sharing_ranks import share_gpu

pytestmark = pytest.mark.gpu

PROMPTS = ["the quick brown fox", "a finished request leaves its cache", "The cat sat on the mat"]
EAGER = {"device": "cuda", "dtype": "float32", "enforce_eager": True, "num_blocks": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, n=2, max_tokens=12, ignore_eos=True)
WORDS = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"regex": "[a-c]{4,9}"})


def texts(path: Path, **flags: object) -> list[str]:
    with LLM(path, **EAGER, **flags) as llm:
        answers = [answer for params in (GREEDY, SEEDED, WORDS) for answer in llm.generate(PROMPTS, params)]
    return [choice.text for answer in answers for choice in answer.choices]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_two_ranks_on_one_gpu(name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model(name)
    expected = texts(path)
    share_gpu(monkeypatch)
    assert texts(path, tensor_parallel_size=2) == expected


def test_more_ranks_than_gpus_are_refused(tiny_model: Callable[[str], Path]) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(Exception, match=f"this machine has {count} GPUs"):
        texts(tiny_model("llama"), tensor_parallel_size=4 * count)


def test_sums_of_nccl_are_captured(tmp_path: Path) -> None:
    """Of one rank, whose sum is its part."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=FileStore(str(tmp_path / "m"), 1), rank=0, world_size=1)
    try:
        ranks = NcclRanks(0, 1)
        x = torch.randn(5, 64, device="cuda")
        static, stream = torch.zeros_like(x), torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(2):  # loads what a capture must not
                ranks.sum(static.clone()), ranks.joined(static)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            total, joined = ranks.sum(static * 2), ranks.joined(static + 1)
            graph.capture_end()
            static.copy_(x)
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(total, x * 2) and torch.equal(joined, x + 1)
        assert ranks.least(7) == 7
    finally:
        leave()
