"""Where a step's arrays lie on the device, and the attention workspaces whose work lists are among them.

A step is one copy of everything up to the last row of its block tables, so small steps have buffers of their own
(cuda_buffer_sizes.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels.cuda_attention import CudaAttentionPlan, CudaAttentionWorkspace, WorkCounts
from bequest.engine.kernels.cuda_sampler import HOST_TOKENS
from bequest.engine.kernels.delta_net import RecurrentStep
from bequest.engine.runner.cuda_sizes import StepSize
from bequest.engine.runner.staging import Field, Staging, StagingLayout
from bequest.engine.types import NO_STATE, StepBatch

CROSS = -1  # among the strips: cross attention, which is not causal
MOST_UPDATE_BYTES = 1 << 20  # of sampler row updates that travel with a step; larger ones take a copy of their own


# Of a step without tokens.
_NO_STARTS, _NO_LENS, _NO_TABLES = np.zeros(1, np.int32), np.empty(0, np.int32), np.empty((0, 0), np.int32)


def _list_of(strip: int) -> str:
    return f"work_list_{strip}"


class StepBuffers:
    """The arrays of steps of up to `max_tokens` tokens (and sequences) and `max_samples` samples."""

    def __init__(
        self,
        workspaces: dict[int, CudaAttentionWorkspace],
        max_tokens: int,
        max_samples: int,
        table_widths: tuple[int, int],
        device: torch.device,
        states: Tensor | None,
        others: Sequence[Field] = (),
    ) -> None:
        """workspaces: by strip, and CROSS; table_widths: blocks of a sequence in a strip, and of its encoder input;
        states: [NS, LR, E] of recurrent layers, if there are any; others: fields that others write and read."""
        self.workspaces = workspaces
        self.max_tokens = max_tokens
        self.strips = [strip for strip in workspaces if strip != CROSS]
        self._self_blocks, cross_blocks = table_widths
        self._states = states
        recurrent = [
            Field("query_start", (max_tokens + 1,), torch.int32),
            Field("state_starts", (max_tokens,), torch.int32),
            Field("state_slots", (max_tokens,), torch.int32),
        ]
        lists = [Field(_list_of(strip), (workspace.list_len,), torch.int32) for strip, workspace in workspaces.items()]
        width = len(self.strips) * self._self_blocks + cross_blocks
        self.staging = Staging(
            StagingLayout(
                [
                    Field("input_ids", (max_tokens,), torch.int32),
                    Field("positions", (max_tokens,), torch.int32),
                    Field("slot_mapping", (len(self.strips), max_tokens), torch.int64),
                    Field("tap_rows", (max_tokens,), torch.int32),
                    Field("tap_layers", (max_tokens, 2), torch.int64),
                    Field("sample_tokens", (max_samples,), torch.int32),
                    Field("sample_rows", (max_samples,), torch.int32),
                    Field("masked_rows", (max_samples,), torch.int32),
                    Field("sample_positions", (max_samples,), torch.int32),
                    Field("sample_drafts", (max_samples,), torch.int32),
                    Field("told", (HOST_TOKENS,), torch.int64),
                    Field("copies", (len(self.strips) * max_tokens, 2), torch.int32),
                    *([] if states is None else recurrent),
                    *others,
                    *lists,
                    # Self tables strip by strip, then cross tables.
                    Field("block_tables", (max_tokens, width), torch.int32),
                    Field("updates", (MOST_UPDATE_BYTES,), torch.uint8),
                ]
            ),
            device,
        )

    def on_device(self, name: str) -> Tensor:
        return self.staging.on_device(name)

    def list_of(self, strip: int) -> str:
        """The field of its attention's work."""
        return _list_of(strip)

    def write_lists(self, batch: StepBatch | None) -> WorkCounts:
        """Writes the attention work of the next step, or of one without tokens; what all the lists hold."""
        arrays = self.staging.arrays()
        total: WorkCounts | None = None
        for strip, workspace in self.workspaces.items():
            if batch is None:
                starts, lens, tables = _NO_STARTS, _NO_LENS, _NO_TABLES
            elif strip == CROSS:
                assert batch.cross_lens is not None and batch.cross_tables is not None
                starts, lens, tables = batch.query_start, batch.cross_lens, batch.cross_tables
            else:
                starts, lens, tables = batch.query_start, batch.seq_lens, batch.block_tables[strip]
            counts = workspace.write_list(starts, lens, tables, arrays[_list_of(strip)])  # type: ignore[arg-type]
            total = counts if total is None else total + counts
        assert total is not None, "a model has attention"
        return total

    def write_tables(self, batch: StepBatch) -> None:
        tables = self.staging.arrays()["block_tables"][: len(batch.seq_lens)]
        for strip, blocks in enumerate(batch.block_tables):
            first = strip * self._self_blocks
            tables[:, first : first + blocks.shape[1]] = blocks
        if batch.cross_tables is not None:
            first = len(self.strips) * self._self_blocks
            tables[:, first : first + batch.cross_tables.shape[1]] = batch.cross_tables

    def write_states(self, batch: StepBatch | None, num_tokens: int) -> None:
        """Which slots recurrent layers read and write in a step that is padded to so many tokens: what is padded is in
        no sequence."""
        if self._states is None:
            return
        arrays = self.staging.arrays()
        num_sequences, used = (0, 0) if batch is None else (len(batch.seq_lens), len(batch.input_ids))
        arrays["query_start"][num_sequences : num_tokens + 1] = used
        arrays["state_slots"][used:num_tokens] = NO_STATE
        if batch is not None:
            assert batch.state_starts is not None and batch.state_slots is not None
            arrays["query_start"][: num_sequences + 1] = batch.query_start
            arrays["state_starts"][:num_sequences] = batch.state_starts
            arrays["state_slots"][:used] = batch.state_slots

    def recurrent(self, size: StepSize) -> RecurrentStep | None:
        if self._states is None:
            return None
        num = size.num_tokens  # no step has more sequences
        names = ("query_start", "state_starts", "state_slots")
        query_start, starts, slots = (self.on_device(name) for name in names)
        one_each = not size.prefill
        return RecurrentStep(self._states, query_start[: num + 1], starts[:num], slots[:num], one_each=one_each)

    def send(self, num_sequences: int, update_bytes: int = 0) -> None:
        used = self.staging.used_bytes("block_tables", num_sequences)
        self.staging.send(used, "updates" if update_bytes else None, update_bytes)

    def bind(self, strip: int, size: StepSize) -> CudaAttentionPlan:
        tables, first = self.on_device("block_tables"), strip * self._self_blocks
        own = tables[:, first : first + self._self_blocks]
        return self.workspaces[strip].bind(
            self.on_device(_list_of(strip)),
            tables[:, len(self.strips) * self._self_blocks :] if strip == CROSS else own,
            max_query_len=size.num_tokens if size.prefill else 1,
            max_tokens=size.num_tokens,
            merges=size.merges,
        )
