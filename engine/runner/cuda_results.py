"""A step's results on their way back: one buffer on the device, pinned ones that take turns. Where a step is its graph
alone, the sampler writes what it has sampled to both; else one copy brings all results."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels.cuda import DeviceLogprobs
from bequest.engine.kernels.streams import copy_bytes, record
from bequest.engine.models.any_model import Model
from bequest.engine.models.decoder import Decoder
from bequest.engine.runner.cuda_beams import PendingCandidates
from bequest.engine.runner.cuda_states import PendingStates
from bequest.engine.runner.staging import Field, StagingLayout
from bequest.engine.types import LogprobArrays, StepResult

MOST_LOGPROBS = 20
_TURNS = 5  # steps whose results may be on their way or unread at once, and the one that the first began behind


class ExpertsRead:
    """How many experts steps have read, of the running total that comes back with each of them."""

    __slots__ = ("_before", "num_experts")

    def __init__(self) -> None:
        self.num_experts = 0  # of all layers
        self._before = 0

    def of_step(self, total: int) -> tuple[int, int]:
        """One that is read late has been counted with the step behind it."""
        read = max(total - self._before, 0)
        self._before += read
        return read, self.num_experts


class PendingResults:
    """A launched step. `wait` may be called from another thread, once."""

    __slots__ = (
        "_arrays",
        "_beams",
        "_began",
        "_copied",
        "_drafted",
        "_experts",
        "_num_logprobs",
        "_num_samples",
        "_prompt",
        "_step",
        "states",
    )

    def __init__(
        self,
        step: int,
        began: torch.cuda.Event,
        copied: torch.cuda.Event,
        arrays: dict[str, np.ndarray],
        num_samples: int,
        num_logprobs: int | None,
        prompt: tuple[LogprobArrays, ...],
        beams: PendingCandidates | None,
        drafted: bool,
        experts: ExpertsRead,
    ) -> None:
        self._step = step
        self._experts = experts
        self.states: PendingStates | None = None  # which may be queued behind the results
        self._drafted = drafted
        self._beams = beams
        self._began = began
        self._copied = copied
        self._arrays = arrays
        self._num_samples = num_samples
        self._num_logprobs = num_logprobs
        self._prompt = prompt

    def timed_by(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> PendingResults:
        """The same with events of its own: it is read so late that the turn of the others may have come again."""
        self._began, self._copied = began, ended
        return self

    @property
    def slow_to_read(self) -> bool:
        return self.states is not None

    @property
    def done(self) -> bool:
        return bool(self._copied.query())

    def wait_computed(self) -> None:
        self._copied.synchronize()

    def wait(self) -> StepResult:
        self._copied.synchronize()
        num, top = self._num_samples, self._num_logprobs
        logprobs = None
        if top is not None and num:
            logprobs = LogprobArrays(
                chosen=self._arrays["chosen"][:num].copy(),
                rank=self._arrays["rank"][:num].copy(),
                top_ids=self._arrays["top_ids"][: num * top].reshape(num, top).copy(),
                top=self._arrays["top"][: num * top].reshape(num, top).copy(),
            )
        tokens, bad = self._arrays["tokens"][:num].copy(), self._arrays["bad"][:num].copy()
        # Between two events of one stream: waiting for the step before it does not count.
        seconds = self._began.elapsed_time(self._copied) / 1e3
        beams = () if self._beams is None else self._beams.read()
        states = () if self.states is None else self.states.read()
        return StepResult(
            step=self._step,
            tokens=tokens,
            bad_rows=bad,
            logprobs=logprobs,
            prompt_logprobs=self._prompt,
            beams=beams,
            device_seconds=seconds,
            states=states,
            drafts=self._arrays["drafts"][:num].copy() if self._drafted else None,
            experts=self._experts.of_step(int(self._arrays["experts"][0])),
        )


class ResultBuffers:
    """Buffers and events that take turns: a step's are its own until `begin` of the fourth one behind it."""

    def __init__(self, max_samples: int, device: torch.device) -> None:
        self._layout = StagingLayout(
            [
                Field("experts", (1,), torch.int64),
                Field("tokens", (max_samples,), torch.int32),
                Field("bad", (max_samples,), torch.bool),
                Field("drafts", (max_samples,), torch.int32),
                Field("chosen", (max_samples,), torch.float32),
                Field("rank", (max_samples,), torch.int32),
                Field("top_ids", (max_samples * MOST_LOGPROBS,), torch.int32),
                Field("top", (max_samples * MOST_LOGPROBS,), torch.float32),
            ]
        )
        self._device_buffer = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(self._layout.num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_TURNS)]
        self._arrays = [
            {name: self._layout.view(buffer, name).numpy() for name in self._layout.places} for buffer in self._pinned
        ]
        self._views = {name: self._layout.view(self._device_buffer, name) for name in self._layout.places}
        self._addresses = [buffer.data_ptr() for buffer in self._pinned]
        self._device_address = self._device_buffer.data_ptr()
        self._began = [torch.cuda.Event(enable_timing=True) for _ in range(_TURNS)]
        self._copied = [torch.cuda.Event(enable_timing=True) for _ in range(_TURNS)]
        self._turn = 0
        self._start = self._began[0]  # of the step that is being launched
        self._before: torch.cuda.Event | None = None  # of the step before, if nothing was queued behind it
        self._experts = ExpertsRead()
        self._told = self._host_places()
        self._is_first = True

    def count_experts(self, model: Model) -> None:
        """Those that a model reads come back with its steps."""
        if isinstance(model, Decoder):
            self._experts.num_experts = model.count_experts(self._view("experts"))
            self._told = self._host_places()

    def _host_places(self) -> list[tuple[int, int, int, int]]:
        counts, places = self._experts.num_experts > 0, self._layout.places
        tokens, bad, experts = (places[name][0] for name in ("tokens", "bad", "experts"))
        read = counts * (self._device_address + experts)
        return [(host + tokens, host + bad, counts * (host + experts), read) for host in self._addresses]

    @property
    def tokens(self) -> Tensor:
        return self._view("tokens")

    @property
    def bad(self) -> Tensor:
        return self._view("bad")

    @property
    def drafts(self) -> Tensor:
        """Those that the device made."""
        return self._view("drafts")

    def logprobs(self, num: int, top: int) -> DeviceLogprobs:
        return DeviceLogprobs(
            self._view("chosen")[:num],
            self._view("rank")[:num],
            self._view("top_ids")[: num * top].view(num, top),
            self._view("top")[: num * top].view(num, top),
        )

    @property
    def host_tokens(self) -> tuple[int, int, int, int]:
        """Where the sampler tells the host what the step that is being launched has sampled (`CudaSampler.sample`)."""
        return self._told[self._turn]

    def begin(self) -> None:
        """A step begins on the current stream: when the one before ends, if that still runs. An event takes the device
        two microseconds."""
        if self._is_first:  # what was captured and timed before has read experts, too
            self._is_first = False
            self._view("experts").zero_()
        if self._before is not None and not self._before.query():
            self._start = self._before
        else:
            self._start = self._began[self._turn]
            record(self._start)

    def interrupt(self) -> None:
        """Something else is queued behind the last step."""
        self._before = None

    def send(
        self,
        step: int,
        num_samples: int,
        num_logprobs: int | None,
        prompt: tuple[LogprobArrays, ...],
        beams: PendingCandidates | None,
        *,
        drafted: bool = False,
        is_told: bool = False,
    ) -> PendingResults:
        """Queues the copy back on the current stream; `is_told`: the sampler has told the host."""
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        last = "top" if num_logprobs is not None else "drafts" if drafted else "bad"
        offset, field = self._layout.places[last]
        used = offset + field.shape[0] * field.dtype.itemsize
        if not is_told:
            copy_bytes(self._addresses[turn], self._device_address, used)
        copied = self._before = self._copied[turn]
        record(copied)
        return PendingResults(
            step,
            self._start,
            copied,
            self._arrays[turn],
            num_samples,
            num_logprobs,
            prompt,
            beams,
            drafted,
            self._experts,
        )

    def _view(self, name: str) -> Tensor:
        return self._views[name]
