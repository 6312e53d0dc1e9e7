"""Sequences of an encoder-decoder model over a paged cache, for tests of whole models: the least that a runner does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels.cpu import AttentionPlan
from bequest.engine.kernels.cuda_attention import CudaAttentionWorkspace
from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.models.batch import EncoderInputs, ModelInput
from bequest.engine.models.encoder_batch import lay_out
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.load import LoadedModel

BLOCK_SIZE = 4

EncoderInput = Sequence[int] | Tensor  # tokens, or features [n_mels, frames]


def make_plan(
    query_start: np.ndarray,
    lens: np.ndarray,
    tables: np.ndarray,
    kv_cache: Tensor,
    *,
    window: int | None,
    bfloat16: bool = False,
) -> AttentionPlan:
    """One query head per kv head, on the device of the cache. `window` None: not causal."""
    mask: dict[str, Any] = {"causal": window is not None, "window": window or 0}
    num_blocks, _, _, num_heads, block_size, head_dim = kv_cache.shape
    heads: dict[str, Any] = {"num_q_heads": num_heads, "num_kv_heads": num_heads, "head_dim": head_dim}
    if kv_cache.is_cpu:
        blocks = {"block_size": block_size, "num_blocks": num_blocks}
        return AttentionPlan(query_start, lens, tables, **heads, **blocks, **mask, bfloat16=bfloat16)
    sizes = {"max_sequences": len(lens), "max_tokens": int(query_start[-1])}
    workspace = CudaAttentionWorkspace(**heads, **sizes, dtype=kv_cache.dtype, device=kv_cache.device, **mask)
    return workspace.plan(query_start, lens, tables)  # type: ignore[return-value]


def rounds(loaded: LoadedModel) -> bool:
    """Whether products may be in bfloat16."""
    return loaded.dtype is torch.bfloat16


def encoder_inputs(loaded: LoadedModel, inputs: Sequence[EncoderInput], scratch_block: int = 8) -> EncoderInputs:
    """A batch of inputs, whose scratch is NaN."""
    model = loaded.model
    assert isinstance(model, EncoderDecoder)
    config, device = model.config, model.device
    features = tuple(item.to(device) for item in inputs if isinstance(item, Tensor))
    frames = [-(-item.shape[1] // config.encoder.frames_per_state) for item in features]
    layout = lay_out(frames or [len(item) for item in inputs], scratch_block)
    shape = (layout.num_blocks, *config.scratch_shape(scratch_block))
    dtype = torch.float32 if device.type == "cpu" else loaded.dtype  # that of activations
    scratch = torch.full(shape, torch.nan, dtype=dtype, device=device)
    tokens = None if features else torch.tensor([token for item in inputs for token in item], dtype=torch.int32)
    return EncoderInputs(
        make_plan(layout.query_start, layout.lens, layout.tables, scratch, window=None, bfloat16=rounds(loaded)),
        scratch,
        torch.from_numpy(layout.slots).to(device),
        torch.from_numpy(layout.positions).to(device),
        token_ids=None if tokens is None else tokens.to(device),
        features=features,
    )


class CrossSequences:
    """Sequences by number, each with an encoder input. Blocks lie scattered over a cache of NaN."""

    def __init__(
        self, loaded: LoadedModel, inputs: Sequence[EncoderInput], max_len: int, block_size: int = BLOCK_SIZE
    ) -> None:
        model = loaded.model
        assert isinstance(model, EncoderDecoder)
        self.model, self.device = model, model.device
        self.block_size = block_size
        self.bfloat16 = rounds(loaded)
        batch = encoder_inputs(loaded, inputs)
        self.states = model.encode(batch)
        starts = np.flatnonzero(batch.positions.cpu().numpy() == 0)
        self.cross_lens = np.diff([*starts, len(self.states)]).astype(np.int32)
        columns = -(-self.cross_lens // block_size)
        blocks_each = -(-max_len // block_size)
        num_blocks = 1 + len(inputs) * blocks_each + int(columns.sum())
        shape = (num_blocks, *model.config.kv_shape(block_size))
        self.kv_cache = torch.full(shape, torch.nan, dtype=loaded.dtype, device=self.device)
        order = np.random.default_rng(7).permutation(np.arange(1, num_blocks)).astype(np.int32)
        own, cross = np.split(order, [len(inputs) * blocks_each])
        self.block_tables = own.reshape(len(inputs), blocks_each)
        self.cross_tables = np.zeros((len(inputs), columns.max()), np.int32)
        for table, blocks in zip(self.cross_tables, np.split(cross, np.cumsum(columns)[:-1]), strict=True):
            table[: len(blocks)] = blocks
        self.lens = [0] * len(inputs)
        slots = [self._slots(table, 0, n) for table, n in zip(self.cross_tables, self.cross_lens, strict=True)]
        model.write_cross(self.states, self._tensor(np.concatenate(slots)), self.kv_cache)

    def _slots(self, table: np.ndarray, begin: int, end: int) -> np.ndarray:
        at = np.arange(begin, end)
        return table[at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def step(self, new_tokens: Mapping[int, Sequence[int]], tap: HiddenTap | None = None) -> dict[int, Tensor]:
        """Computes the next tokens of some sequences in one batch; each one's logits, [tokens, V]."""
        sequences = list(new_tokens)
        begins = [self.lens[s] for s in sequences]
        for s in sequences:
            self.lens[s] += len(new_tokens[s])
        spans = list(zip(sequences, begins, (self.lens[s] for s in sequences), strict=True))
        query_start = np.cumsum([0, *(end - begin for _, begin, end in spans)], dtype=np.int32)
        seq_lens = np.array([self.lens[s] for s in sequences], np.int32)
        tokens = np.array([token for s in sequences for token in new_tokens[s]], np.int32)
        positions = np.concatenate([np.arange(begin, end, dtype=np.int32) for _, begin, end in spans])
        slots = np.concatenate([self._slots(self.block_tables[s], begin, end) for s, begin, end in spans])
        own, cross = self.block_tables[sequences], self.cross_tables[sequences]
        window = self.model.config.sliding_windows[0]
        batch = ModelInput(
            input_ids=self._tensor(tokens),
            positions=self._tensor(positions),
            slot_mapping=(self._tensor(slots),),
            kv_cache=self.kv_cache,
            attention=(self._plan(query_start, seq_lens, own, window),),
            cross=self._plan(query_start, self.cross_lens[sequences], cross, None),
            tap=tap,
        )
        logits = self.model.logits(self.model.forward(batch))
        return dict(zip(sequences, logits.split(np.diff(query_start).tolist()), strict=True))

    def _plan(self, query_start: np.ndarray, lens: np.ndarray, tables: np.ndarray, window: int | None) -> AttentionPlan:
        return make_plan(query_start, lens, tables, self.kv_cache, window=window, bfloat16=self.bfloat16)

    def run(self, sequence: int, tokens: Sequence[int], chunk: int) -> Tensor:
        """One sequence alone, `chunk` tokens a step; logits of all tokens, [tokens, V]."""
        parts = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
        return torch.cat([self.step({sequence: part})[sequence] for part in parts])
