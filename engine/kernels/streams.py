"""The current stream, and copies on it. Device thread.

Torch's own ways there are a dozen Python calls each: with a few copies and events per step they took as long as all
else that a step's launch does.
"""

from __future__ import annotations

from functools import cache
from types import TracebackType

import torch

from bequest.engine import _C


def current_stream() -> int:
    """The handle of torch's current stream."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def record(event: torch.cuda.Event) -> None:
    """On the current stream."""
    event.record(_stream(*torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())))


@cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    """Its object: to make one takes longer than to record an event."""
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def copy_bytes(destination: int, source: int, num_bytes: int) -> None:
    """Queues a copy between addresses of pinned host memory and the device's on the current stream."""
    _C.cuda_copy_bytes(destination, source, num_bytes, current_stream())


class StreamScope:
    """`with` it, its stream is torch's current one. Not to be entered twice at once."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream.stream_id, stream.device_index, stream.device_type
        self._before = self._stream

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._stream[1])
        _set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set_stream(self._before)


def _set_stream(stream: tuple[int, int, int]) -> None:
    stream_id, device_index, device_type = stream
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)
