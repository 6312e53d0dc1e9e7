"""The sampler on a device: the contract and the tokens of engine.kernels.Sampler, with all state in device memory.

Rows are opened and closed by records built here and applied by one kernel before the next sampling; they take effect in
the order of the stream. A row's lists (masks, bias, bad words, penalty counts) live in a storage of its own, laid out
here and read by csrc/ops/cuda/sampling.cu; a row that needs none has none.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.catalogue import CatalogueRule
from bequest.engine.kernels.cuda import logit_rows
from bequest.engine.kernels.streams import current_stream
from bequest.engine.types import NO_ROW, IntArray, RowSpec, mask_words

# csrc/ops/cuda/sampling.h: RowUpdate (row, last token, payload begin and length), then SamplerRow.
_UPDATE = struct.Struct("<4i Qq 3fi 3fI 16i Qi4x")
_CLOSED, _GREEDY, _DRAWS = 0, 1, 2
# Steps launched past a sequence's end record a token each before they are discarded.
_DISCARDED_STEPS = 16
HOST_TOKENS = 4  # addresses: csrc/ops/cuda/sampling.h
NOT_TOLD = (0,) * HOST_TOKENS


@dataclass(frozen=True, slots=True)
class _Lists:
    """A row's storage: its initial content, its size, and where in it everything is."""

    content: IntArray
    size: int
    layout: tuple[int, ...]  # allowed, bias, num_bias, ..., num_counts: the fields of SamplerRow, in order


def _history(spec: RowSpec) -> list[int]:
    return [*spec.prompt_token_ids, *spec.output_token_ids]


def _allowed_mask(ids: tuple[int, ...], vocab_size: int) -> IntArray:
    """Bit i of the words is set if token i is allowed."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _counts(spec: RowSpec) -> list[tuple[int, int]]:
    """(token, times among the outputs) of what penalties apply to."""
    counts = Counter(spec.output_token_ids)
    if spec.penalties.repetition != 1:
        for token in spec.prompt_token_ids:
            counts.setdefault(token, 0)
    return list(counts.items())


def _ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def _lay_out(spec: RowSpec, vocab_size: int) -> _Lists:
    bounds = spec.bounds
    parts: list[IntArray] = []

    def add(part: IntArray) -> int:
        parts.append(part)
        return sum(p.size for p in parts[:-1])

    allowed = -1 if bounds.allowed_token_ids is None else add(_allowed_mask(bounds.allowed_token_ids, vocab_size))
    bias_ids = _ints(*(token for token, _ in bounds.logit_bias))
    bias_values = np.array([value for _, value in bounds.logit_bias], np.float32).view(np.int32)
    bias = add(np.concatenate([bias_ids, bias_values]))
    held_back = _ints(*bounds.held_back)
    held_back_at = add(held_back)
    starts = np.cumsum([0, *map(len, bounds.bad_words)], dtype=np.int32)
    bad_words = add(np.concatenate([starts, *(_ints(*word) for word in bounds.bad_words)])) if bounds.bad_words else 0
    tail_capacity = max(map(len, bounds.bad_words), default=1) - 1
    tail = _ints(*_history(spec)[-tail_capacity:]) if tail_capacity else _ints()
    tail_at = add(np.concatenate([tail, np.zeros(tail_capacity - tail.size, np.int32)]))
    counts: list[tuple[int, int]] = []
    capacity = 0
    if spec.penalties.any:
        counts = _counts(spec)
        capacity = min(vocab_size, len(counts) + spec.max_tokens + _DISCARDED_STEPS)
        if sum(p.size for p in parts) % 2:
            parts.append(_ints(0))  # counts are read in pairs
    counts_at = add(np.array(counts, np.int32).reshape(-1))
    content = np.concatenate(parts)
    layout = (
        *(allowed, bias, bias_ids.size, held_back_at, held_back.size, bad_words, len(bounds.bad_words)),
        *(tail_at, tail_capacity, tail.size, counts_at, capacity, len(counts)),
    )
    return _Lists(content, counts_at + 2 * capacity if capacity else content.size, layout)


class CudaSampler:
    """Chooses tokens for `num_rows` sampler rows of a device.

    last_tokens int32 [num_rows] holds the last token of each row, -1 before the first; cuda.embedding reads it.
    All calls belong to one stream.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        assert _UPDATE.size == _C.cuda_row_update_bytes
        self.vocab_size = vocab_size
        self._device = device
        self._rows = torch.zeros(num_rows * _C.cuda_sampler_row_bytes, dtype=torch.uint8, device=device)
        self.last_tokens = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self._bound = _C.CudaSamplerRows(self._rows.data_ptr(), self.last_tokens.data_ptr(), num_rows)
        # What an open row refers to: its storage and its catalogue.
        self._open: dict[int, tuple[Tensor | None, CatalogueRule | None]] = {}
        self._updates: dict[
            int, tuple[bytes, IntArray]
        ] = {}  # per row the last one: record but for its payload's place

    def open_row(self, spec: RowSpec, rule: CatalogueRule | None = None) -> None:
        """Takes effect at the next flush or sampling. Errors as in the CPU's sampler.

        With a rule the row samples items of a catalogue, then end tokens, and is bad after those.
        """
        self._check(spec)
        assert rule is None or rule.catalogue.vocab_size <= self.vocab_size
        draw, penalties = spec.draw, spec.penalties
        lists = _lay_out(spec, self.vocab_size)
        storage = torch.empty(lists.size, dtype=torch.int32, device=self._device) if lists.size else None
        greedy = draw.greedy
        last_token = spec.output_token_ids[-1] if spec.output_token_ids else -1
        temperature = float(np.float32(draw.temperature))
        min_p = float(np.float32(draw.min_p))
        record = _UPDATE.pack(
            *(spec.row, last_token, 0, lists.content.size),
            *(draw.seed, 0 if storage is None else storage.data_ptr()),
            0.0 if greedy else float(np.float32(1) / np.float32(draw.temperature)),
            draw.top_p,
            float(np.float32(math.log(min_p)) * np.float32(temperature)) if min_p > 0 else -math.inf,
            min(draw.top_k, self.vocab_size),
            *(penalties.presence, penalties.frequency, penalties.repetition, draw.choice),
            *(_GREEDY if greedy else _DRAWS, spec.bounds.min_tokens, len(spec.output_token_ids)),
            *lists.layout,
            *((0, 0) if rule is None else (rule.address, rule.catalogue.walk(spec.output_token_ids))),
        )
        self._open[spec.row] = (storage, rule)
        self._updates[spec.row] = (record, lists.content)

    def close_row(self, row: int) -> None:
        if row not in self._open:
            raise _C.Error(f"sampler: row {row} is not open")
        del self._open[row]
        record = _UPDATE.pack(row, -1, 0, 0, 0, 0, *(0.0,) * 3, 0, *(0.0,) * 3, 0, _CLOSED, *(0,) * 15, 0, 0)
        self._updates[row] = (record, _ints())

    def pack_updates(self) -> tuple[bytes, int] | None:
        """What has to be on the device before the next sampling, and its number of records; None: nothing.

        For a runner that sends it along with its own staging copy and then calls apply_updates.
        """
        if not self._updates:
            return None
        records: list[bytes] = []
        payload: list[IntArray] = []
        begin = 0
        for record, content in self._updates.values():
            records.append(record[:8] + struct.pack("<i", begin) + record[12:])
            payload.append(content)
            begin += content.size
        self._updates = {}
        return b"".join([*records, *(content.tobytes() for content in payload)]), len(records)

    def apply_updates(self, staged: Tensor, num_updates: int) -> None:
        """`staged` uint8: a device copy of what pack_updates gave, aligned to 8 bytes."""
        assert staged.is_cuda and staged.dtype is torch.uint8 and staged.data_ptr() % 8 == 0
        updates = staged.data_ptr()
        self._bound.update(updates, num_updates, updates + num_updates * _UPDATE.size, current_stream())

    def flush(self) -> None:
        """Sends rows opened and closed to the device. Not inside a graph's capture."""
        packed = self.pack_updates()
        if packed is None:
            return
        content, num_updates = packed
        pinned = torch.frombuffer(bytearray(content), dtype=torch.uint8).pin_memory()
        self.apply_updates(pinned.to(self._device, non_blocking=True), num_updates)

    def resolve(self, input_ids: Tensor, input_rows: Tensor) -> Tensor:
        """A copy of input_ids int32 [T] with the last token of row input_rows[i] in place i, unless that is NO_ROW."""
        return torch.where(input_rows == NO_ROW, input_ids, self.last_tokens[input_rows.clamp_min(0)])

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        tokens: Tensor | None = None,
        bad: Tensor | None = None,
        masks: Tensor | None = None,
        drafts: Tensor | None = None,
        told: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens int32 [N] for logits [N, V], float32 or bfloat16, of distinct rows, and which are bad, bool [N].

        rows and positions int32 [N] are on the device; row -1 is skipped (token 0, not bad). Bad: NaN or +inf in the
        logits, nothing left to sample, or a closed row; the token is 0 and the row stays as it was. masks int32
        [N, ceil(V / 32)] are on the device: tokens whose bit is not set are not sampled. Flush first. Where a graph is
        captured, nothing in it may change the rows, their numbers or `told` before: they are read early.

        With drafts int32 [N] a row may be there several times, in a run: a sample that is not what was drafted to
        follow, or is bad, is the last of its row, and the tokens behind it in the run are 0 and not bad.

        `told` int64 [HOST_TOKENS] on the device: addresses of pinned memory that gets tokens and bad, too, and of
        where a number goes [1] and comes from [1] on the device (csrc/ops/cuda/sampling.h). 0: nowhere.
        """
        num = logits.shape[0]
        assert not self._updates, "flush() the sampler first"
        assert logits.shape == (num, self.vocab_size), (tuple(logits.shape), num, self.vocab_size)
        for array in (rows, positions) if drafts is None else (rows, positions, drafts):
            assert array.is_cuda and array.dtype is torch.int32 and array.is_contiguous() and array.shape == (num,)
        if tokens is None:
            tokens = torch.empty(num, dtype=torch.int32, device=self._device)
        if bad is None:
            bad = torch.empty(num, dtype=torch.bool, device=self._device)
        assert tokens.shape == bad.shape == (num,) and tokens.dtype is torch.int32 and bad.dtype is torch.bool
        if masks is not None:
            assert masks.is_cuda and masks.dtype is torch.int32 and masks.is_contiguous()
            assert masks.shape == (num, mask_words(self.vocab_size))
        masked = 0 if masks is None else masks.data_ptr()
        if told is not None:
            assert told.is_cuda and told.dtype is torch.int64 and told.shape == (HOST_TOKENS,)
        out = (tokens.data_ptr(), bad.data_ptr(), 0 if told is None else told.data_ptr())
        by = (rows.data_ptr(), positions.data_ptr(), 0 if drafts is None else drafts.data_ptr())
        self._bound.sample(logit_rows(logits), by, masked, out, current_stream())
        return tokens, bad

    def sample_part(
        self,
        logits: Tensor,
        part: slice,
        rows: Tensor,
        positions: Tensor,
        tokens: Tensor,
        bad: Tensor,
        masks: Tensor,
        drafts: Tensor | None = None,
    ) -> None:
        """The samples `part` of a step, with masks; all tensors but `rows` and `masks` are those of all samples.

        Tensors of the part would take longer to make than all else here: five of them, in each step.
        """
        num = part.stop - part.start
        address, count, vocab_size, stride, dtype = logit_rows(logits)
        assert not self._updates, "flush() the sampler first"
        assert part.stop <= count and vocab_size == self.vocab_size, (part, count, vocab_size)
        for array in (rows, positions, tokens) if drafts is None else (rows, positions, tokens, drafts):
            assert array.is_cuda and array.dtype is torch.int32 and array.is_contiguous()
        assert len(rows) >= num and min(len(positions), len(tokens), len(bad)) >= part.stop
        assert bad.dtype is torch.bool and bad.is_contiguous() and (drafts is None or len(drafts) >= part.stop)
        assert masks.dtype is torch.int32 and masks.is_contiguous()
        assert masks.shape == (num, mask_words(vocab_size)), masks.shape
        read = (address + part.start * stride * logits.itemsize, num, vocab_size, stride, dtype)
        first = 4 * part.start  # bytes of int32
        by = (rows.data_ptr(), positions.data_ptr() + first, 0 if drafts is None else drafts.data_ptr() + first)
        out = (tokens.data_ptr() + first, bad.data_ptr() + part.start, 0)
        self._bound.sample(read, by, masks.data_ptr(), out, current_stream())

    def guess(self, logits: Tensor, rows: Tensor, positions: Tensor, guessed: Tensor) -> Tensor:
        """What `sample` would choose for logits [N, V] of distinct rows, which stay as they are: tokens int32 [N].

        Where that is bad, or the row is -1, it is 0; the others' go to guessed int32 [num_rows], too.
        """
        num = logits.shape[0]
        assert not self._updates, "flush() the sampler first"
        assert logits.shape == (num, self.vocab_size), (tuple(logits.shape), num, self.vocab_size)
        for array, size in ((rows, num), (positions, num), (guessed, len(self.last_tokens))):
            assert array.is_cuda and array.dtype is torch.int32 and array.is_contiguous() and array.shape == (size,)
        tokens = torch.empty(num, dtype=torch.int32, device=self._device)
        bad = torch.empty(num, dtype=torch.bool, device=self._device)
        by, out = (rows.data_ptr(), positions.data_ptr(), 0), (tokens.data_ptr(), bad.data_ptr(), 0)
        self._bound.guess(logit_rows(logits), by, guessed.data_ptr(), out, current_stream())
        return tokens

    def _check(self, spec: RowSpec) -> None:
        bounds = spec.bounds
        if not 0 <= spec.row < self.last_tokens.shape[0]:
            raise _C.Error(f"sampler: row {spec.row} is out of range")
        if spec.row in self._open:
            raise _C.Error(f"sampler: row {spec.row} is open")
        if not all(bounds.bad_words):
            raise _C.Error("sampler: empty bad word")
        named = [*(token for token, _ in bounds.logit_bias), *(token for word in bounds.bad_words for token in word)]
        named += [*(bounds.allowed_token_ids or ()), *bounds.held_back]
        named += spec.output_token_ids
        if bounds.bad_words or spec.penalties.repetition != 1:
            named += spec.prompt_token_ids
        if named and not 0 <= min(named) <= max(named) < self.vocab_size:
            raise _C.Error("sampler: a token is outside the vocabulary")
