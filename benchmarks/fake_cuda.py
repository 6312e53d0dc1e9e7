"""A CUDA device that is not there: what the CUDA runner does on the host runs as it is, kernels do nothing.

Device memory is host memory, copies are made at once, a graph takes the time it is told to, and beams get candidates
that make most tables fork. `install` puts it in torch's and the extension's place, for the whole process, which has to
run with `python -O`: the kernels' wrappers insist on device tensors.
"""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bequest.engine import _C

_clock = {"busy_until": 0.0}


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._at = max(time.perf_counter(), _clock["busy_until"])

    def query(self) -> bool:
        return time.perf_counter() >= self._at

    def synchronize(self) -> None:
        if (left := self._at - time.perf_counter()) > 0:
            time.sleep(left)

    def wait(self, stream: object = None) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._at - self._at)


class Stream:
    stream_id = device_index = device_type = 0
    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


class Graph:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def replay(self) -> None:
        _clock["busy_until"] = max(time.perf_counter(), _clock["busy_until"]) + self._seconds


def _copy_bytes(destination: int, source: int, num_bytes: int, stream: int) -> None:
    ctypes.memmove(destination, source, num_bytes)


def _beam_candidates(
    logits: object,
    step: tuple[int, int, int, int, int],
    workspace: int,
    out: tuple[int, int, int, int, int, int],
    stream: int,
) -> None:
    """Beams take turns; tokens are ordinary ones."""
    _, _, group_start, _, num_groups = step
    score, row, token, logprob, bad, columns = out
    starts = np.ctypeslib.as_array((ctypes.c_int32 * (num_groups + 1)).from_address(group_start))
    shape = num_groups, columns

    def at(address: int, kind: Any) -> np.ndarray:
        return np.ctypeslib.as_array((kind * (num_groups * columns)).from_address(address)).reshape(shape)

    numbers = np.arange(columns, dtype=np.int32)
    at(score, ctypes.c_float)[:] = at(logprob, ctypes.c_float)[:] = -0.01 * (1 + numbers)
    at(row, ctypes.c_int32)[:] = numbers * 7 % (starts[1:] - starts[:-1])[:, None]
    at(token, ctypes.c_int32)[:] = 1000 + numbers
    ctypes.memset(bad, 0, int(starts[-1]))


def _nothing(*args: object) -> None:
    pass


class _Idle:
    """Whatever is bound to addresses of a device: its calls do nothing."""

    def __init__(self, *args: object) -> None:
        pass

    queue = wait = update = sample = guess = _nothing


def install() -> None:
    """REQUIRES: the extension was built without CUDA."""
    if __debug__:
        raise SystemExit("run this with python -O")
    assert not _C.with_cuda
    vars(_C).update(
        cuda_copy_bytes=_copy_bytes,
        cuda_beam_candidates=_beam_candidates,
        cuda_beam_workspace_bytes=lambda rows, slots: 64 * (rows + slots),
        cuda_beam_follower_bytes=100,
        cuda_max_beam_rows=1024,
        cuda_prefill_blocks_per_sm=lambda head_dim, kv_dtype: 1,
        cuda_has_wide_tiles=lambda: False,
        cuda_can_attend_token=lambda work: False,
        cuda_row_update_bytes=144,
        cuda_sampler_row_bytes=128,
        **dict.fromkeys(("CudaLateCopy", "CudaSamplerRows", "CudaStep"), _Idle),
        **dict.fromkeys(("cuda_copy_blocks", "cuda_follow_beams", "cuda_logprobs", "cuda_publish"), _nothing),
    )
    vars(torch._C).update(
        _cuda_getCurrentRawStream=lambda device: 0,
        _cuda_getDevice=lambda: 0,
        _cuda_getCurrentStream=lambda device: (0, 0, 0),
        _cuda_setStream=_nothing_named,
    )
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "synchronize": _nothing,
        "current_stream": Stream,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
    }.items():
        setattr(torch.cuda, name, value)
    for name in ("zeros", "empty"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[assignment, method-assign]


def _nothing_named(**kwargs: object) -> None:
    pass


def _unpinned(make: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made
