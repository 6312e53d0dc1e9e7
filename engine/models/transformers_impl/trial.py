"""A trial before a model is served: what it computes over the paged cache is what transformers alone computes.

Two sequences of unequal length share steps and are cut into chunks, as requests are. What a model does beside its
attention over what it is given (another mask, a memory of its own, positions that it makes itself) shows here, and such
a model is refused: nothing wrong is served. Windows beyond the length of the trial are read from masks (masks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.models.batch import ModelInput
from bequest.engine.models.transformers_impl.described import refusal
from bequest.engine.models.transformers_impl.library_model import LibraryModel
from bequest.engine.models.transformers_impl.model import TransformersDecoder
from bequest.engine.models.transformers_impl.shape import TransformersConfig
from bequest.engine.models.transformers_impl.watched import failures_told

_LENGTHS = (23, 9)
_STEPS = ((14, 4), (8, 4), (1, 1))  # new tokens of each sequence, as long as it has some
_BLOCK_SIZE = 16
_BLOCKS_EACH = 2
# Of a row's norm. In float32 rows differ by roundings alone; in bfloat16 a router may choose another expert now and
# then, so half of the rows are enough.
_MOST_APART = {torch.float32: 1e-3, torch.bfloat16: 0.08}


@dataclass(frozen=True, slots=True)
class Computed:
    """Of all tokens, sequence by sequence."""

    logits: Tensor  # [T, V]
    states: Tensor | None  # [layers + 1, T, H]; None: the library tells none


def token_ids(config: TransformersConfig) -> list[Tensor]:
    """The sequences, [length] int64 each: none is longer than a request can be."""
    random = torch.Generator().manual_seed(1)
    lengths = [min(length, config.max_position) for length in _LENGTHS]
    return [torch.randint(config.vocab_size, (length,), generator=random) for length in lengths]


@torch.inference_mode()
def by_the_library(model: LibraryModel, config: TransformersConfig) -> Computed:
    """Each sequence by itself, with transformers' own attention and masks."""
    logits, states = [], []
    for tokens in token_ids(config):
        rows, layers = model.run(tokens.to(model.device))
        logits.append(rows.float())
        if layers is not None:
            states.append(layers.float())
    return Computed(torch.cat(logits), torch.cat(states, dim=1) if states else None)


def compare(model: TransformersDecoder, expected: Computed, dtype: torch.dtype, name: str) -> None:
    """Raises ModelError where the model computes something else over the paged cache."""
    with failures_told(name):
        computed = over_the_cache(model, dtype, expected.logits.device)
    most = _MOST_APART[dtype]
    if (apart := _apart(computed.logits, expected.logits, dtype)) > most:
        raise refusal(name, f"its logits differ from those of transformers alone by {apart:.1%} in a trial")
    assert computed.states is not None
    if expected.states is None or expected.states.shape != computed.states.shape:
        raise refusal(name, "transformers tells no hidden state of each of its layers")
    if (apart := _apart(computed.states, expected.states, dtype)) > most:
        raise refusal(name, f"its hidden states differ from those of transformers alone by {apart:.1%} in a trial")


def _apart(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> float:
    norms = torch.linalg.vector_norm(ours - theirs, dim=-1) / torch.linalg.vector_norm(theirs, dim=-1).clamp(min=1e-6)
    return float(norms.max() if dtype is torch.float32 else norms.median())


@torch.inference_mode()
def over_the_cache(model: TransformersDecoder, dtype: torch.dtype, device: torch.device) -> Computed:
    """All sequences in the same steps, in chunks."""
    config = model.config
    sequences = token_ids(config)
    num_blocks = 1 + len(config.strips.windows) * len(sequences) * _BLOCKS_EACH
    cache = torch.zeros((num_blocks, *config.kv_shape(_BLOCK_SIZE)), dtype=dtype, device=device)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    states: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for wanted in _STEPS:
        counts = [min(count, len(tokens) - n) for count, tokens, n in zip(wanted, sequences, done, strict=True)]
        if not any(counts):
            break
        step = _Step(sequences, done, counts, len(config.strips.windows))
        ring = _ring(config, step, cache)
        hidden = model.forward(step.input(config, cache, ring))
        tapped = ring.ring.float().view(step.num_tokens, config.num_layers + 1, -1).transpose(0, 1)
        rows = model.logits(hidden).float().split(counts)
        for each, row, state in zip(range(len(counts)), rows, tapped.split(counts, dim=1), strict=True):
            logits[each].append(row)
            states[each].append(state)
        done = [before + more for before, more in zip(done, counts, strict=True)]
    flat = [part for parts in states for part in parts]
    return Computed(torch.cat([row for rows in logits for row in rows]), torch.cat(flat, dim=1))


class _Step:
    """Some next tokens of each sequence."""

    def __init__(self, sequences: Sequence[Tensor], done: Sequence[int], counts: Sequence[int], strips: int) -> None:
        self.num_tokens = sum(counts)
        spans = [torch.arange(first, first + count) for first, count in zip(done, counts, strict=True)]
        self._ids = torch.cat([tokens[span] for tokens, span in zip(sequences, spans, strict=True)])
        self._positions = torch.cat(spans)
        # Blocks of the sequences take turns: neighbours in a sequence lie apart.
        numbers = 1 + torch.arange(strips * len(sequences) * _BLOCKS_EACH)
        self._tables = numbers.view(strips, _BLOCKS_EACH, -1).transpose(1, 2)  # [strips, sequences, MB]
        owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        blocks = self._tables[:, owners, self._positions // _BLOCK_SIZE]
        self._slots = blocks * _BLOCK_SIZE + self._positions % _BLOCK_SIZE
        self._starts = torch.tensor([0, *counts]).cumsum(0).int()
        self._lens = (torch.tensor(done) + torch.tensor(counts)).int()

    def input(self, config: TransformersConfig, cache: Tensor, tap: HiddenTap) -> ModelInput:
        device = cache.device
        return ModelInput(
            input_ids=self._ids.int().to(device),
            positions=self._positions.int().to(device),
            slot_mapping=self._slots.to(device).unbind(),
            kv_cache=cache,
            attention=self._attention(config, cache),
            tap=tap,
        )

    def _attention(self, config: TransformersConfig, cache: Tensor) -> tuple[AttentionWork, ...]:
        tables = self._tables.int().contiguous()
        return tuple(
            _work(config, cache, window, self._starts, self._lens, of_strip)
            for window, of_strip in zip(config.strips.windows, tables, strict=True)
        )


def _work(
    config: TransformersConfig, cache: Tensor, window: int, starts: Tensor, lens: Tensor, tables: Tensor
) -> AttentionWork:
    num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    if cache.is_cpu:
        return kernels.AttentionPlan(
            starts,
            lens,
            tables,
            num_q_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=_BLOCK_SIZE,
            num_blocks=cache.shape[0],
            window=window,
        )
    from bequest.engine.kernels.cuda_attention import CudaAttentionWorkspace

    most = sum(_LENGTHS)
    space = CudaAttentionWorkspace(
        num_q_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_sequences=most,
        max_tokens=most,
        dtype=cache.dtype,
        window=window,
        block_size=_BLOCK_SIZE,
        device=cache.device,
    )
    return space.plan(starts, lens, tables)


def _ring(config: TransformersConfig, step: _Step, cache: Tensor) -> HiddenTap:
    """All layers of all tokens."""
    each = config.num_layers + 1
    bits = torch.zeros(step.num_tokens, 2, dtype=torch.int64)
    for layer in range(each):
        bits[:, layer // 64] |= torch.tensor(1 << layer % 64 if layer % 64 < 63 else -(1 << 63))
    rows = each * torch.arange(step.num_tokens, dtype=torch.int32)
    dtype = torch.float32 if cache.is_cpu else cache.dtype
    ring = torch.empty(each * step.num_tokens, config.hidden_size, dtype=dtype, device=cache.device)
    return HiddenTap(rows.to(cache.device), bits.to(cache.device), ring)
