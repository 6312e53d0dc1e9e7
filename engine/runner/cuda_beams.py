"""The candidates of beam search on a device. Device thread only; results are read elsewhere.

A step with beams adds to its one copy each way a small one for its groups: those steps are few, and beams wait for
their results anyway. Nothing synchronises. Buffers have fixed places: to make tensors costs more than a launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bequest.engine.kernels import cuda_beams
from bequest.engine.kernels.beams import FOLLOWER_LEN, FOLLOWER_NUMBERS, GROUP_DTYPE, PackedGroups
from bequest.engine.kernels.streams import copy_bytes
from bequest.engine.runner.beams import Constraints, nodes_of, pack, scores_of, unpack
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.staging import Field, Staging, StagingLayout
from bequest.engine.types import BeamCandidates, BeamSpec, IntArray, StepPlan

_ALIGNMENT = 16
_USUAL_BYTES = 1 << 19  # of a step's candidates; more take memory of their own
_TURNS = 4  # as of other results: steps whose candidates may be on their way or unread at once


class CandidateBuffers:
    """One buffer on the device, pinned ones that take turns; each with its address and, of the host's, as an array."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = torch.empty(_USUAL_BYTES, dtype=torch.uint8, device=device)
        self._pinned = [torch.empty(_USUAL_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_TURNS)]
        self._arrays = [pinned.numpy() for pinned in self._pinned]
        self._turn = 0

    def take(self, num_bytes: int) -> tuple[Tensor, Tensor, npt.NDArray[np.uint8]]:
        """(device, host, host) of so many bytes, or more."""
        if num_bytes > _USUAL_BYTES:
            pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device), pinned, pinned.numpy()
        self._turn = (self._turn + 1) % _TURNS
        return self._on_device, self._pinned[self._turn], self._arrays[self._turn]


class PendingCandidates:
    """Candidates of G groups with R rows, on the device and, in one copy, on their way to the host.

    They are four tables [G, K], one after the other, and behind them [R] of what is bad.
    """

    __slots__ = ("_array", "_columns", "_end", "_host", "_specs", "_table", "_whole", "device")

    def __init__(self, specs: Sequence[BeamSpec], num_rows: int, columns: int, buffers: CandidateBuffers) -> None:
        self._specs = specs
        self._columns = columns
        self._table = -(-4 * len(specs) * columns // _ALIGNMENT) * _ALIGNMENT  # bytes
        self._end = 4 * self._table + num_rows
        self._whole, self._host, self._array = buffers.take(self._end)
        score, row, token, logprob, bad = range((at := self._whole.data_ptr()), at + 5 * self._table, self._table)
        self.device = cuda_beams.CandidateAddresses(score, row, token, logprob, bad, columns)

    def send(self) -> None:
        """Queues the copy, behind the kernels that write it."""
        copy_bytes(self._host.data_ptr(), self._whole.data_ptr(), self._end)

    def read(self) -> tuple[BeamCandidates, ...]:
        """When the step has run. Beams wait for this: few and large operations."""
        content = self._array[: self._end].copy()
        floats = content[: 4 * self._table].view(np.float32).reshape(4, -1)
        ints = floats.view(np.int32)
        return unpack(self._specs, self._columns, floats[0], ints[1], ints[2], floats[3], content[4 * self._table :])


class CudaBeams:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device, catalogues: PlacedCatalogues) -> None:
        """`max_rows`: beams of one step, which are at least as many as its groups."""
        self._device = device
        self._constraints = Constraints(vocab_size, device, catalogues)
        self._buffers = CandidateBuffers(device)
        layout = StagingLayout(
            [
                Field("group_start", (max_rows + 1,), torch.int32),
                Field("scores", (max_rows,), torch.float32),
                Field("nodes", (max_rows,), torch.int32),
                Field("records", (max_rows, GROUP_DTYPE.itemsize), torch.uint8),
                Field("followers", (max_rows, FOLLOWER_LEN), torch.int32),
            ]
        )
        self._staging, self._other = (_StagedBeams(layout, device) for _ in range(2))  # of the step, and before it
        self._step: _Step | None = None  # that was staged last
        self._before: PendingCandidates | None = None  # its candidates

    def follow(self, plan: StepPlan, input_ids: Tensor, copies: Tensor) -> None:
        """Chooses the beams that follow the step before: they complete the step's tokens and copies, which are on their
        way. What the step says of its beams is sent now if some follow, else behind its graph."""
        before, specs = self._step, plan.beams
        followers = [i for i, spec in enumerate(specs) if spec.following is not None]
        if not followers:
            return
        assert before is not None and self._before is not None, "beams follow a step"
        step = self._stage(specs, _followers(plan, followers, before))
        followed = cuda_beams.FollowedAddresses(
            self._staging.followers, len(followers), before.addresses.nodes, input_ids.data_ptr(), copies.data_ptr()
        )
        cuda_beams.follow_beams_at(self._before.device, step.addresses, followed)

    def launch(self, logits: Tensor, specs: Sequence[BeamSpec]) -> PendingCandidates:
        """From logits [N, V] of the step's samples, of which R from the first group's on are beams'."""
        step = self._step
        if step is None or step.specs is not specs:
            step = self._stage(specs, None)
        groups, first = step.groups, specs[0].first_sample
        num_rows = int(groups.group_start[-1])
        pending = self._before = PendingCandidates(specs, num_rows, groups.columns, self._buffers)
        memory = cuda_beams.workspace(num_rows, groups.num_slots, self._device)
        cuda_beams.beam_candidates_at(logits[first : first + num_rows], step.addresses, memory, pending.device)
        pending.send()
        return pending

    def _stage(self, specs: Sequence[BeamSpec], followers: IntArray | None) -> _Step:
        self._staging, self._other = self._other, self._staging
        groups = pack(specs, self._constraints)
        self._step = _Step(specs, groups, self._staging.send(specs, groups, followers))
        return self._step


class _Step(msgspec.Struct, frozen=True):
    specs: Sequence[BeamSpec]
    groups: PackedGroups
    addresses: cuda_beams.StepAddresses


class _StagedBeams:
    """What a step says of its beams, on its way to the device: there it stays until the step after the next."""

    def __init__(self, layout: StagingLayout, device: torch.device) -> None:
        self._staging = Staging(layout, device)
        self._addresses = {name: self._staging.on_device(name).data_ptr() for name in layout.places}
        self.followers = self._addresses["followers"]

    def send(
        self, specs: Sequence[BeamSpec], groups: PackedGroups, followers: IntArray | None
    ) -> cuda_beams.StepAddresses:
        """All that kernels read of the step, in one copy; followers in another one."""
        arrays, num_groups = self._staging.arrays(), len(specs)
        num_rows = int(groups.group_start[-1])
        arrays["group_start"][: num_groups + 1] = groups.group_start
        arrays["scores"][:num_rows] = scores_of(specs)
        nodes = nodes_of(specs)
        if nodes is not None:
            arrays["nodes"][:num_rows] = nodes
        arrays["records"][:num_groups] = groups.records.view(np.uint8).reshape(num_groups, -1)
        used = self._staging.used_bytes("records", num_groups)
        if followers is None:
            self._staging.send(used)
        else:
            arrays["followers"][: len(followers)] = followers
            self._staging.send(used, "followers", followers.nbytes)
        at = self._addresses
        return cuda_beams.StepAddresses(
            at["scores"], 0 if nodes is None else at["nodes"], at["group_start"], at["records"], num_groups
        )


def _followers(plan: StepPlan, numbers: list[int], before: _Step) -> IntArray:
    """[F, FOLLOWER_LEN] of the groups of these numbers."""
    first, starts = plan.beams[0].first_sample, before.groups.group_start
    tokens = plan.samples.tokens
    records, rows = np.zeros((len(numbers), FOLLOWER_LEN), np.int32), []
    for i, number in enumerate(numbers):
        spec = plan.beams[number]
        following, sample = spec.following, spec.first_sample
        assert following is not None
        group, ends = following.group, following.ends
        assert before.specs[group].request_id == spec.request_id, "beams follow their own"
        places = sample - first, len(spec.scores), starts[group], tokens[sample]
        rows.append((number, group, *places, following.first_copy, following.num_copies, len(ends)))
        if ends:
            records[i, FOLLOWER_NUMBERS : FOLLOWER_NUMBERS + len(ends)] = ends
    records[:, :FOLLOWER_NUMBERS] = rows
    return records
