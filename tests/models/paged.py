"""A batch of sequences over a paged cache, for tests of whole models: the least that a runner does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels.cpu import AttentionPlan
from bequest.engine.kernels.cpu_lora import LoraMatrices
from bequest.engine.kernels.delta_net import RecurrentStep
from bequest.engine.layers.step import strip_views
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.models.any_model import logits_of
from bequest.engine.models.batch import ModelInput, ReadRows
from bequest.engine.models.decoder import Decoder
from bequest.engine.runner.adapters import step_adapters

BLOCK_SIZE = 4


class PagedSequences:
    """Sequences by number, each with blocks scattered over the cache. Unwritten cache is NaN: reading it shows."""

    def __init__(self, model: Decoder, num_sequences: int, max_len: int, dtype: torch.dtype = torch.float32) -> None:
        config = model.config
        self.model = model
        blocks_each = -(-max_len // BLOCK_SIZE)
        self.windows = config.strips.windows
        num_strips = len(self.windows)
        num_blocks = 1 + num_sequences * blocks_each * num_strips
        self.kv_cache = torch.full((num_blocks, *config.kv_shape(BLOCK_SIZE)), torch.nan, dtype=dtype)
        self.strip_caches = strip_views(self.kv_cache, config.strips.shapes(BLOCK_SIZE))
        self.states = torch.full((2 * num_sequences, *config.state_shape), torch.nan)  # two slots for each
        self._slots = [2 * sequence for sequence in range(num_sequences)]
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        self.block_tables = order.reshape(num_strips, num_sequences, blocks_each).int()  # [strips, sequences, MB]
        self.lens = [0] * num_sequences
        self.adapters: dict[int, LoraMatrices] = {}  # of sequences

    def step(self, new_tokens: Mapping[int, Sequence[int]], read: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """Computes the next tokens of some sequences in one batch; each one's logits, [tokens, V].

        With `read` only those of so many last tokens of each sequence.
        """
        sequences = list(new_tokens)
        counts = [len(new_tokens[s]) for s in sequences]
        begins = [self.lens[s] for s in sequences]
        positions = [
            torch.arange(self.lens[s], self.lens[s] + count) for s, count in zip(sequences, counts, strict=True)
        ]
        slots = [
            self.block_tables[:, s, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            for s, at in zip(sequences, positions, strict=True)
        ]
        recurrent = self._recurrent(sequences, counts)
        for sequence, count in zip(sequences, counts, strict=True):
            self.lens[sequence] += count
        query_start = torch.tensor([0, *counts]).cumsum(0).int()
        seq_lens = torch.tensor([self.lens[s] for s in sequences], dtype=torch.int32)
        tables = self.block_tables[:, sequences].clone()
        self._forget_what_slid_out(tables, begins)
        rows_wanted = None
        if read is not None:
            wanted = [read[s] for s in sequences]
            ends = query_start[1:].tolist()
            rows = [torch.arange(end - count, end) for end, count in zip(ends, wanted, strict=True)]
            starts = torch.tensor([0, *wanted]).cumsum(0).int()
            last = self.model.config.strips.places[-1].strip
            rows_wanted = ReadRows(torch.cat(rows), self._attention(starts, seq_lens, tables, last))
        batch = ModelInput(
            input_ids=torch.tensor([token for s in sequences for token in new_tokens[s]], dtype=torch.int32),
            positions=torch.cat(positions).int(),
            slot_mapping=torch.cat(slots, dim=1).unbind(),
            kv_cache=self.kv_cache,
            strip_caches=self.strip_caches,
            attention=tuple(
                self._attention(query_start, seq_lens, tables, strip) for strip in range(len(self.windows))
            ),
            read=rows_wanted,
            recurrent=recurrent,
            adapters=self._adapters(sequences, query_start, rows_wanted),
        )
        hidden = self.model.forward(batch)
        adapters = batch.adapters
        of_read = None if adapters is None else StepAdapters(adapters.of(len(hidden)), len(hidden))
        logits = logits_of(self.model, hidden, of_read)
        return dict(zip(sequences, logits.split(counts if read is None else wanted), strict=True))

    def _adapters(self, sequences: Sequence[int], starts: Tensor, read: ReadRows | None) -> StepAdapters | None:
        if not any(sequence in self.adapters for sequence in sequences):
            return None
        bounds = pairwise(starts.tolist())
        rows = [(self.adapters.get(s), np.arange(*bound)) for s, bound in zip(sequences, bounds, strict=True)]
        return step_adapters(rows, None if read is None else read.rows.numpy())

    def _recurrent(self, sequences: Sequence[int], counts: Sequence[int]) -> RecurrentStep:
        """States go from one of a sequence's slots to the other."""
        starts = [self._slots[s] if self.lens[s] else -1 for s in sequences]
        slots = torch.full((sum(counts),), -1, dtype=torch.int32)
        query_start = torch.tensor([0, *counts]).cumsum(0).int()
        for sequence, count, end in zip(sequences, counts, query_start[1:].tolist(), strict=True):
            if count:
                self._slots[sequence] ^= 1
                slots[end - 1] = self._slots[sequence]
        return RecurrentStep(self.states, query_start, torch.tensor(starts, dtype=torch.int32), slots)

    def _forget_what_slid_out(self, tables: Tensor, begins: Sequence[int]) -> None:
        """The null block, which holds NaN, stands for what no query sees any more."""
        for strip, window in enumerate(self.windows):
            for row, begin in enumerate(begins):
                if window:
                    tables[strip, row, : max(0, begin - window + 1) // BLOCK_SIZE] = 0

    def _attention(self, query_start: Tensor, seq_lens: Tensor, tables: Tensor, strip: int) -> AttentionPlan:
        heads = self.model.config.strips.heads[strip]
        return AttentionPlan(
            query_start,
            seq_lens,
            tables[strip],
            num_q_heads=self.model.config.num_heads,
            num_kv_heads=heads.count,
            head_dim=heads.size,
            block_size=BLOCK_SIZE,
            num_blocks=self.kv_cache.shape[0],
            window=self.windows[strip],
            bfloat16=self.kv_cache.dtype is torch.bfloat16,
        )

    def run(self, sequence: int, tokens: Sequence[int], chunk: int) -> Tensor:
        """One sequence alone, `chunk` tokens a step; logits of all tokens, [tokens, V]."""
        parts = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
        return torch.cat([self.step({sequence: part})[sequence] for part in parts])
