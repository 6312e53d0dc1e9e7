"""Sequences of an encoder-decoder model over a paged cache, for tests of whole models: the least that a runner does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu import AttentionPlan
from engine.models.batch import EncoderInputs, ModelInput
from engine.models.encoder_batch import lay_out
from engine.models.encoder_decoder import EncoderDecoder, Tap

BLOCK_SIZE = 4

EncoderInput = Sequence[int] | Tensor  # tokens, or features [n_mels, frames]


def encoder_inputs(model: EncoderDecoder, inputs: Sequence[EncoderInput], scratch_block: int = 8) -> EncoderInputs:
    """A batch of inputs, whose scratch is NaN."""
    config = model.config
    audio = config.encoder.takes == "audio"
    lens = [-(-item.shape[1] // config.encoder.frames_per_state) if audio else len(item) for item in inputs]  # type: ignore[union-attr]
    layout = lay_out(lens, scratch_block)
    scratch = torch.full((layout.num_blocks, *config.scratch_shape(scratch_block)), torch.nan)
    plan = AttentionPlan(
        layout.query_start,
        layout.lens,
        layout.tables,
        num_q_heads=config.encoder.num_heads,
        num_kv_heads=config.encoder.num_heads,
        head_dim=config.head_dim,
        block_size=scratch_block,
        num_blocks=layout.num_blocks,
        causal=False,
    )
    return EncoderInputs(
        plan,
        scratch,
        torch.from_numpy(layout.slots),
        torch.from_numpy(layout.positions),
        token_ids=None if audio else torch.tensor([token for item in inputs for token in item], dtype=torch.int32),
        features=tuple(inputs) if audio else (),  # type: ignore[arg-type]
    )


class CrossSequences:
    """Sequences by number, each with an encoder input. Blocks lie scattered over a cache of NaN."""

    def __init__(
        self, model: EncoderDecoder, inputs: Sequence[EncoderInput], max_len: int, block_size: int = BLOCK_SIZE
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.states = model.encode(encoder_inputs(model, inputs))
        batch = encoder_inputs(model, inputs)
        self.cross_lens = np.bincount(np.cumsum(batch.positions.numpy() == 0) - 1).astype(np.int32)
        columns = -(-self.cross_lens // block_size)
        blocks_each = -(-max_len // block_size)
        num_blocks = 1 + len(inputs) * blocks_each + int(columns.sum())
        self.kv_cache = torch.full((num_blocks, *model.config.kv_shape(block_size)), torch.nan)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        own, cross = order[: len(inputs) * blocks_each], order[len(inputs) * blocks_each :]
        self.block_tables = own.reshape(len(inputs), blocks_each).int()
        self.cross_tables = torch.zeros(len(inputs), int(columns.max()), dtype=torch.int32)
        taken = 0
        for s, count in enumerate(columns.tolist()):
            self.cross_tables[s, :count] = cross[taken : taken + count]
            taken += count
        self.lens = [0] * len(inputs)
        slots = [self._slots(self.cross_tables[s], torch.arange(n)) for s, n in enumerate(self.cross_lens.tolist())]
        model.write_cross(self.states, torch.cat(slots), self.kv_cache)

    def _slots(self, table: Tensor, at: Tensor) -> Tensor:
        return table[at // self.block_size].long() * self.block_size + at % self.block_size

    def step(self, new_tokens: Mapping[int, Sequence[int]], tap: Tap | None = None) -> dict[int, Tensor]:
        """Computes the next tokens of some sequences in one batch; each one's logits, [tokens, V]."""
        sequences = list(new_tokens)
        counts = [len(new_tokens[s]) for s in sequences]
        positions = [torch.arange(self.lens[s], self.lens[s] + n) for s, n in zip(sequences, counts, strict=True)]
        slots = [self._slots(self.block_tables[s], at) for s, at in zip(sequences, positions, strict=True)]
        for s, count in zip(sequences, counts, strict=True):
            self.lens[s] += count
        query_start = torch.tensor([0, *counts]).cumsum(0).int()
        seq_lens = torch.tensor([self.lens[s] for s in sequences], dtype=torch.int32)
        cross_lens = torch.from_numpy(self.cross_lens)[sequences]
        batch = ModelInput(
            input_ids=torch.tensor([token for s in sequences for token in new_tokens[s]], dtype=torch.int32),
            positions=torch.cat(positions).int(),
            slot_mapping=torch.cat(slots),
            kv_cache=self.kv_cache,
            attention={0: self._plan(query_start, seq_lens, self.block_tables[sequences].contiguous(), causal=True)},
            cross=self._plan(query_start, cross_lens, self.cross_tables[sequences].contiguous(), causal=False),
        )
        logits = self.model.logits(self.model.forward(batch, tap))
        return dict(zip(sequences, logits.split(counts), strict=True))

    def _plan(self, query_start: Tensor, lens: Tensor, tables: Tensor, *, causal: bool) -> AttentionPlan:
        config = self.model.config
        return AttentionPlan(
            query_start,
            lens,
            tables,
            num_q_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self.block_size,
            num_blocks=self.kv_cache.shape[0],
            causal=causal,
        )

    def run(self, sequence: int, tokens: Sequence[int], chunk: int) -> Tensor:
        """One sequence alone, `chunk` tokens a step; logits of all tokens, [tokens, V]."""
        parts = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
        return torch.cat([self.step({sequence: part})[sequence] for part in parts])
