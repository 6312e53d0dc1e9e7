"""The runner of the CPU backend: a StepPlan becomes tensors, a forward pass, sampled tokens. Device thread only."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.delta_net import RecurrentStep
from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.layers.start import Overlay
from bequest.engine.models.any_model import Model, logits_of
from bequest.engine.models.batch import ModelInput, ReadRows, strip_views
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.listening import cross_weights
from bequest.engine.models.towers.tower import Tower
from bequest.engine.runner.adapters import CpuAdapters
from bequest.engine.runner.beams import CpuBeams
from bequest.engine.runner.block_bytes import bytes_of, layout_of, move_blocks
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.cpu_attention import CpuAttention
from bequest.engine.runner.device_drafts import DeviceDrafts, Drafted
from bequest.engine.runner.encoders import encode_on_cpu
from bequest.engine.runner.feature_tap import FeatureTap
from bequest.engine.runner.images import SeenImages
from bequest.engine.runner.prompt_logprobs import split_logprobs
from bequest.engine.runner.read_rows import ReadTokens, read_tokens, samples_each
from bequest.engine.runner.sampling import RowSampler
from bequest.engine.types import (
    BeamCandidates,
    IntArray,
    LogprobArrays,
    MaskSource,
    StepBatch,
    StepMoves,
    StepPlan,
    StepResult,
)
from bequest.engine.types.adapter import AdapterWeights
from bequest.engine.types.blocks import BlockBytes, BlockLayout, BlockRead, BlockWrite, StateRead, StateWrite
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.hidden import StepTaps
from bequest.engine.types.listening import CrossHeads, FloatRows
from bequest.engine.types.states import StatesArray

# Logits of prompt log-probabilities are made this many rows at a time: [rows, V] float32 stays small.
_LOGIT_ROWS = 64


class CpuRunner:
    """Owns the weights, the KV cache and the sampler rows."""

    def __init__(
        self,
        model: Model,
        kv_cache: torch.Tensor,
        host_cache: torch.Tensor,
        max_rows: int,
        dtype: torch.dtype,
        states: torch.Tensor | None = None,
        tower: Tower | None = None,
        drafts: DeviceDrafts | None = None,
    ) -> None:
        self._model = model
        self._images = SeenImages(tower, kv_cache.device, torch.float32)
        self._drafts = drafts
        # A head may want what is behind the last layer of every token.
        self._reads_all = drafts is not None and model.config.num_layers in drafts.layers
        self._states = states  # [NS, LR, E] float32 of a model with recurrent layers, those of the host among them
        self._bfloat16 = dtype is torch.bfloat16
        self._kv_cache = kv_cache  # [NB, L, 2, NKV, BS, D]
        self._attend = CpuAttention(model.config, kv_cache, bfloat16=self._bfloat16)
        self._host_cache = host_cache  # the same for the blocks of the host pool
        strips = model.config.strips
        self._windows, self._last_strip = strips.windows, strips.places[-1].strip
        self._strip_caches = strip_views(kv_cache, strips.shapes(kv_cache.shape[4]))
        self._catalogues = PlacedCatalogues(torch.device("cpu"))
        self._sampler = RowSampler(max_rows, model.config.vocab_size, self._catalogues)
        self._beams = CpuBeams(model.config.vocab_size, self._catalogues)
        self._adapters = CpuAdapters()
        self._experts_read = torch.zeros(1, dtype=torch.int64)
        self._num_experts = model.count_experts(self._experts_read) if isinstance(model, Decoder) else 0
        self._masks: MaskSource | None = None

    def connect(self, masks: MaskSource) -> None:
        self._masks = masks

    def register(self, handle: int, catalogue: Catalogue) -> None:
        self._catalogues.register(handle, catalogue)

    def release(self, handle: int) -> None:
        self._catalogues.release(handle)

    def register_adapter(self, handle: int, weights: AdapterWeights) -> None:
        self._adapters.register(handle, weights)

    def release_adapter(self, handle: int) -> None:
        self._adapters.release(handle)

    def is_quick(self, plan: StepPlan) -> bool:
        return False

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        plan = self._beams.fill(plan)
        self._experts_read.zero_()
        self._move(plan.moves)
        self._sampler.update_rows(plan.rows)
        tap = None if plan.taps is None else self._tap(plan.taps)
        if plan.encoders:
            assert isinstance(self._model, EncoderDecoder)
            taps, ring = ((), None) if plan.taps is None or tap is None else (plan.taps.encoders, tap.ring)
            adapters = self._adapters.of_encoders(plan.encoders)
            encode_on_cpu(
                self._model, self._kv_cache, plan.encoders, taps, ring, bfloat16=self._bfloat16, adapters=adapters
            )
        overlay = None
        if plan.images is not None:
            overlay = self._images.see(plan.images, plan.batch, self._kv_cache.shape[4])
        if not plan.num_tokens:
            return self._nothing_computed(plan, tap, started)
        drafted = self._draft(plan)
        if self._drafts is not None:
            plan = replace(plan, samples=drafted.samples)
        features = self._features(plan)
        read = None if self._reads_all else read_tokens(plan, self._model.config.num_layers)
        table = tap if features is None else features.table
        batch = self._batch(plan.batch, drafted.input_ids, read, table, overlay)
        hidden = self._model.forward(batch)  # [R, H]
        prompt_logprobs = self._prompt_logprobs(plan, hidden, read) if plan.prompt_logprobs else ()
        tokens, bad, logprobs, beams = self._sample(plan, hidden, read)
        ring = None if tap is None else tap.ring
        if self._drafts is not None and features is not None:
            self._drafts.learn(plan.batch, plan.samples, drafted.input_ids, features.features(), tokens)
            ring = None if plan.taps is None else features.of_requests()
        seconds = time.perf_counter() - started
        states = () if plan.taps is None or ring is None else _states(plan.taps, ring.numpy())
        return StepResult(
            step=plan.step,
            tokens=tokens,
            bad_rows=bad,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            beams=beams,
            device_seconds=seconds,
            states=states,
            experts=(int(self._experts_read), self._num_experts),
            drafts=None if self._drafts is None else plan.samples.drafts,
        )

    def _draft(self, plan: StepPlan) -> Drafted:
        known = self._sampler.resolve(plan.batch)
        if self._drafts is None:
            return Drafted(known, plan.samples)
        return self._drafts.draft(plan.batch, plan.samples, known, self._sampler.guess)

    def _features(self, plan: StepPlan) -> FeatureTap | None:
        if self._drafts is None or not self._drafts.layers:
            return None
        return FeatureTap(plan.taps, self._drafts.layers, plan.num_tokens, self._model.config.hidden_size)

    def _nothing_computed(self, plan: StepPlan, tap: HiddenTap | None, started: float) -> StepResult:
        """A step whose encoders were all there was to do."""
        states = () if plan.taps is None or tap is None else _states(plan.taps, tap.ring.numpy())
        return StepResult(
            step=plan.step,
            tokens=np.empty(0, np.int32),
            bad_rows=np.empty(0, np.bool_),
            device_seconds=time.perf_counter() - started,
            states=states,
        )

    def _move(self, moves: StepMoves) -> None:
        move_blocks(self._kv_cache, self._host_cache, moves)
        self._move_states(moves.states)
        if self._drafts is not None:
            self._drafts.move(moves)

    @property
    def block_layout(self) -> BlockLayout:
        return layout_of(self._kv_cache, self._windows, self._states)

    def read_blocks(self, read: BlockRead) -> BlockBytes:
        self._move(read.moves)
        own, on_host = self._caches(of_drafts=read.of_drafts)
        return np.concatenate([bytes_of(own)[read.device], bytes_of(on_host)[read.host]])

    def write_blocks(self, write: BlockWrite) -> None:
        self._move(write.moves)
        bytes_of(self._caches(of_drafts=write.of_drafts)[0])[write.blocks] = write.content

    def _caches(self, *, of_drafts: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the device and of the host."""
        if not of_drafts:
            return self._kv_cache, self._host_cache
        assert self._drafts is not None, "nothing drafts on this device"
        return self._drafts.caches

    def read_states(self, read: StateRead) -> BlockBytes:
        assert self._states is not None, "the model has no recurrent layers"
        self._move_states(read.moves)
        return bytes_of(self._states)[read.slots]

    def write_states(self, write: StateWrite) -> None:
        assert self._states is not None, "the model has no recurrent layers"
        self._move_states(write.moves)
        bytes_of(self._states)[write.slots] = write.content

    def _move_states(self, moves: IntArray) -> None:
        """One after the other: a slot may be left and taken again."""
        for source, destination in moves.tolist():
            assert self._states is not None, "the model has no recurrent layers"
            self._states[destination] = self._states[source]

    @torch.inference_mode()
    def cross_weights(self, asked: CrossHeads) -> FloatRows:
        assert isinstance(self._model, EncoderDecoder)
        return cross_weights(self._model, asked, torch.float32)

    def close(self) -> None:
        """Nothing to give back: the memory goes with the object."""

    def _tap(self, taps: StepTaps) -> HiddenTap:
        """Rows of memory that the result takes along."""
        ring = torch.empty(taps.num_rows, self._model.config.hidden_size)
        return HiddenTap(torch.from_numpy(taps.rows), torch.from_numpy(taps.layers.view(np.int64)), ring)

    def _batch(
        self,
        batch: StepBatch,
        input_ids: IntArray,
        read: ReadTokens | None,
        tap: HiddenTap | None,
        overlay: Overlay | None,
    ) -> ModelInput:
        return ModelInput(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(batch.positions),
            slot_mapping=torch.from_numpy(batch.slot_mapping).unbind(),
            kv_cache=self._kv_cache,
            strip_caches=self._strip_caches,
            attention=tuple(self._attention(batch, batch.query_start, strip) for strip in range(len(self._windows))),
            read=None
            if read is None
            else ReadRows(torch.from_numpy(read.rows), self._attention(batch, read.query_start, self._last_strip)),
            cross=self._cross(batch),
            recurrent=self._recurrent(batch),
            tap=tap,
            overlay=overlay,
            adapters=self._adapters.of_step(batch.adapters, batch.query_start, None if read is None else read.rows),
        )

    def _recurrent(self, batch: StepBatch) -> RecurrentStep | None:
        if self._states is None or batch.state_starts is None or batch.state_slots is None:
            return None
        arrays = (batch.query_start, batch.state_starts, batch.state_slots)
        query_start, starts, slots = map(torch.from_numpy, arrays)
        return RecurrentStep(self._states, query_start, starts, slots)

    def _cross(self, batch: StepBatch) -> kernels.AttentionPlan | None:
        if batch.cross_tables is None or batch.cross_lens is None:
            return None
        return self._attend.plan(batch.query_start, batch.cross_lens, batch.cross_tables, causal=False)

    def _attention(self, batch: StepBatch, query_start: IntArray, strip: int) -> kernels.AttentionPlan:
        tables = batch.block_tables[strip]
        return self._attend.plan(query_start, batch.seq_lens, tables, window=self._windows[strip], strip=strip)

    def _sample(
        self, plan: StepPlan, hidden: torch.Tensor, read: ReadTokens | None
    ) -> tuple[np.ndarray, np.ndarray, LogprobArrays | None, tuple[BeamCandidates, ...]]:
        if not len(plan.samples):
            return np.empty(0, np.int32), np.empty(0, np.bool_), None, ()
        if samples_each(plan):
            logits = self._logits(plan.batch, plan.samples.tokens, hidden)
        else:
            logits = self._sampled_logits(plan, hidden, read)
        sampled = self._sampler.sample(logits, plan.samples, self._masks)
        return *sampled, self._beams.candidates(logits, plan.beams) if plan.beams else ()

    def _sampled_logits(self, plan: StepPlan, hidden: torch.Tensor, read: ReadTokens | None) -> torch.Tensor:
        """[N, V]"""
        # Choices that part ways here share their row of logits: compute each row once.
        rows, which = np.unique(plan.samples.tokens, return_inverse=True)
        places = rows if read is None else read.places(rows)
        logits = self._logits(plan.batch, rows, hidden[torch.from_numpy(places)])  # [rows, V]
        if np.array_equal(rows, plan.samples.tokens):
            return logits
        return logits[torch.from_numpy(which)]  # shared, or those of beams before them in the step

    def _logits(self, batch: StepBatch, tokens: npt.NDArray[np.integer], hidden: torch.Tensor) -> torch.Tensor:
        """Of these tokens of the step, whose states are these rows."""
        return logits_of(self._model, hidden, self._adapters.of_tokens(batch, tokens))

    def _prompt_logprobs(
        self, plan: StepPlan, hidden: torch.Tensor, read: ReadTokens | None
    ) -> tuple[LogprobArrays, ...]:
        """Those of all specs at once, some rows of logits at a time."""
        specs, batch = plan.prompt_logprobs, plan.batch
        tokens = np.concatenate([np.arange(s.first_token, s.first_token + len(s.targets)) for s in specs])
        rows = hidden[torch.from_numpy(tokens if read is None else read.places(tokens))]
        targets, top = np.concatenate([s.targets for s in specs]), max(s.top for s in specs)
        pieces = [slice(i, i + _LOGIT_ROWS) for i in range(0, len(tokens), _LOGIT_ROWS)]
        parts = [
            self._sampler.logprobs(self._logits(batch, tokens[piece], rows[piece]), targets[piece], top)
            for piece in pieces
        ]
        return split_logprobs(parts, specs)


def _states(taps: StepTaps, ring: StatesArray) -> tuple[StatesArray, ...]:
    """Each sequence's in memory of its own: who reads slowly keeps no others'."""
    parts = taps.split(ring)
    return parts if len(parts) == 1 else tuple(part.copy() for part in parts)
