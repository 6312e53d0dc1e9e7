"""Beam candidates on a device: the contract and the results of engine.kernels.cpu_beams.

Everything a step says is data in device memory, and nothing synchronises or allocates: the call can be captured in a
CUDA graph of a padded size. Groups of k = 0 and rows behind the last group are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.beams import FOLLOWER_LEN, GROUP_DTYPE, PackedGroups
from bequest.engine.kernels.cuda import logit_rows
from bequest.engine.kernels.streams import current_stream


@dataclass(frozen=True, slots=True)
class DeviceCandidates:
    """cpu_beams.BeamCandidates on a device."""

    score: Tensor  # float32 [G, K]
    row: Tensor  # int32 [G, K]
    token: Tensor  # int32 [G, K]
    logprob: Tensor  # float32 [G, K]
    bad: Tensor  # bool [R]

    @staticmethod
    def empty(num_rows: int, num_groups: int, columns: int, device: torch.device) -> DeviceCandidates:
        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return DeviceCandidates(
            make(torch.float32, num_groups, columns),
            make(torch.int32, num_groups, columns),
            make(torch.int32, num_groups, columns),
            make(torch.float32, num_groups, columns),
            make(torch.bool, num_rows),
        )


@dataclass(frozen=True, slots=True)
class DeviceGroups:
    """beams.PackedGroups on a device; a runner may have copied them with its own staging."""

    group_start: Tensor  # int32 [G + 1]
    records: Tensor  # uint8 [G * bytes of a record], aligned to 8

    @staticmethod
    def copy(groups: PackedGroups, device: torch.device) -> DeviceGroups:
        assert all(n <= _C.cuda_max_beam_rows for n in (groups.group_start[1:] - groups.group_start[:-1]).tolist())
        records = torch.frombuffer(bytearray(groups.records.tobytes()), dtype=torch.uint8)
        return DeviceGroups(torch.from_numpy(groups.group_start).to(device), records.to(device))


class StepAddresses(msgspec.Struct, frozen=True):
    """Where the beams of a step lie in the memory of the device."""

    cumulative: int  # float32 [R]
    nodes: int  # int32 [R]; 0: no group has a catalogue
    group_start: int  # int32 [G + 1]
    records: int  # [G] of GROUP_DTYPE, aligned to 8
    num_groups: int


class CandidateAddresses(msgspec.Struct, frozen=True):
    """DeviceCandidates by their addresses."""

    score: int
    row: int
    token: int
    logprob: int
    bad: int
    columns: int  # K


def workspace(num_rows: int, num_slots: int, device: torch.device) -> Tensor:
    """Memory for steps of at most so many rows and slots (PackedGroups.num_slots), of one stream."""
    size = _C.cuda_beam_workspace_bytes(num_rows, num_slots)
    return torch.empty(size, dtype=torch.uint8, device=device)


def beam_candidates(
    logits: Tensor,
    cumulative: Tensor,
    groups: DeviceGroups,
    memory: Tensor,
    out: DeviceCandidates,
    nodes: Tensor | None = None,
) -> DeviceCandidates:
    """The k best continuations of each group for logits [R, V], float32 or bfloat16, and cumulative f32 [R].

    `memory` is a workspace for at least R rows and the groups' slots; K is that of `out`. nodes int32 [R]: the rows'
    nodes in their group's catalogue. REQUIRES: no group of more than 1,024 rows, no k above K.
    """
    num_rows, _ = logits.shape
    num_groups, columns = out.score.shape
    assert cumulative.is_cuda and cumulative.dtype is torch.float32 and cumulative.shape == (num_rows,)
    assert groups.group_start.is_cuda and groups.group_start.shape == (num_groups + 1,)
    assert groups.records.numel() == num_groups * GROUP_DTYPE.itemsize and groups.records.data_ptr() % 8 == 0
    assert nodes is None or (nodes.is_cuda and nodes.dtype is torch.int32 and nodes.shape == (num_rows,))
    step = StepAddresses(
        cumulative.data_ptr(),
        0 if nodes is None else nodes.data_ptr(),
        groups.group_start.data_ptr(),
        groups.records.data_ptr(),
        num_groups,
    )
    places = CandidateAddresses(
        out.score.data_ptr(),
        out.row.data_ptr(),
        out.token.data_ptr(),
        out.logprob.data_ptr(),
        out.bad.data_ptr(),
        columns,
    )
    beam_candidates_at(logits, step, memory, places)
    return out


def beam_candidates_at(logits: Tensor, step: StepAddresses, memory: Tensor, out: CandidateAddresses) -> None:
    """The same for whoever knows where everything lies."""
    rows = logit_rows(logits)
    assert memory.numel() >= _C.cuda_beam_workspace_bytes(rows[1], 0)
    _C.cuda_beam_candidates(
        rows,
        (step.cumulative, step.nodes, step.group_start, step.records, step.num_groups),
        memory.data_ptr(),
        (out.score, out.row, out.token, out.logprob, out.bad, out.columns),
        current_stream(),
    )


class FollowedAddresses(msgspec.Struct, frozen=True):
    """What beams that follow the step before read and write."""

    followers: int  # int32 [F, FOLLOWER_LEN]
    num_followers: int
    nodes_before: int  # int32 [R of the step before]; 0: no group had a catalogue
    input_ids: int  # int32 [T]
    copies: int  # int32 [C, 2]


def follow_beams_at(before: CandidateAddresses, step: StepAddresses, followed: FollowedAddresses) -> None:
    """Completes tokens, copies, scores and nodes of a step by the candidates of the one before
    (csrc/ops/cuda/follow_beams.h)."""
    assert _C.cuda_beam_follower_bytes == 4 * FOLLOWER_LEN
    _C.cuda_follow_beams(
        (before.score, before.row, before.token, before.logprob, before.bad, before.columns),
        step.records,
        (
            followed.followers,
            followed.num_followers,
            followed.nodes_before,
            step.cumulative,
            step.nodes,
            followed.input_ids,
            followed.copies,
        ),
        current_stream(),
    )
