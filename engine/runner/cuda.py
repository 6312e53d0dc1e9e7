"""The runner of the CUDA backend. Device thread only, one stream; results are waited for elsewhere.

A step is: one copy of its arrays to the device, row updates and block copies if it has any, one graph (forward, logits,
sampling), one copy of its results back, which a step that is its graph alone does without. Nothing else synchronises,
so the next step can be queued while this one runs. Log-probabilities, steps larger than any graph and steps that yield
add launches of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bequest.engine.kernels import cuda as kernels
from bequest.engine.kernels.cuda_capture import captured
from bequest.engine.kernels.cuda_sampler import NOT_TOLD, CudaSampler
from bequest.engine.kernels.streams import StreamScope
from bequest.engine.layers.start import FixedOverlay, Overlay
from bequest.engine.models.any_model import Model, logits_of
from bequest.engine.models.batch import ModelInput, ReadRows, strip_views
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.towers.tower import Tower
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.cuda_adapters import CudaAdapters
from bequest.engine.runner.cuda_beams import CudaBeams
from bequest.engine.runner.cuda_blocks import BlockTransfers, PendingRead, PendingWrite
from bequest.engine.runner.cuda_buffer_sizes import SMALL_STEP, BufferSizes
from bequest.engine.runner.cuda_buffers import CROSS, StepBuffers
from bequest.engine.runner.cuda_drafts import MakeDrafts, QueuedStep, fill_fields, queued_step, stage_fill
from bequest.engine.runner.cuda_encoders import CudaEncoders
from bequest.engine.runner.cuda_limits import RunnerLimits as RunnerLimits
from bequest.engine.runner.cuda_logprobs import prompt_logprobs
from bequest.engine.runner.cuda_masks import DeviceMasks
from bequest.engine.runner.cuda_overlay import FixedPlaces
from bequest.engine.runner.cuda_pieces import Pieces
from bequest.engine.runner.cuda_results import PendingResults, ResultBuffers
from bequest.engine.runner.cuda_rows import send_step, stage_samples, stage_tokens
from bequest.engine.runner.cuda_sizes import CHECKED_ROWS, Ladder, StepSize, is_plain
from bequest.engine.runner.cuda_states import StatesRing
from bequest.engine.runner.cuda_times import DraftTimes, draft_times, one_sequence, time_replays
from bequest.engine.runner.host_cache import PinnedHostCache
from bequest.engine.runner.images import SeenImages
from bequest.engine.runner.staging import Field
from bequest.engine.runner.timestamps import TimestampRows
from bequest.engine.types import (
    NO_ROW,
    NO_SLOT,
    NO_TOKEN,
    LogprobArrays,
    MaskSource,
    MaskSpec,
    StepBatch,
    StepMoves,
    StepPlan,
    StepSamples,
)
from bequest.engine.types.adapter import AdapterWeights
from bequest.engine.types.blocks import BlockLayout, BlockRead, BlockWrite, StateRead, StateWrite
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.listening import CrossHeads, FloatRows


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    outputs: _Outputs


@dataclass(frozen=True, slots=True)
class _Outputs:
    hidden: Tensor  # [T, H], or [N, H] of a narrow size
    logits: Tensor  # [N, V]


class CudaRunner:
    """Owns the weights, the KV cache, the sampler rows and the graphs."""

    def __init__(
        self,
        model: Model,
        kv_cache: Tensor,
        dtype: torch.dtype,
        num_host_blocks: int,
        limits: RunnerLimits,
        adapters: CudaAdapters,
        states: Tensor | None = None,
        tower: Tower | None = None,
        drafts: MakeDrafts | None = None,
    ) -> None:
        """`states`: [NS, LR, E] float32 of a model with recurrent layers; `tower`: of one that sees."""
        self._model = model
        self._images = SeenImages(tower, kv_cache.device, dtype)
        self._fixed = FixedPlaces(model, tower, limits.max_tokens, dtype, kv_cache.device)
        self._adapters = adapters
        self._recurrent = states
        self._kv_cache = kv_cache  # [NB, L, 2, NKV, BS, D] in `dtype` or fp8
        self._strip_caches = strip_views(kv_cache, model.config.strips.shapes(kv_cache.shape[4]))
        self._dtype = dtype  # of weights and activations
        self._host_cache = PinnedHostCache(num_host_blocks, kv_cache)
        self._limits = limits
        self._device = kv_cache.device
        self._stream = torch.cuda.Stream(self._device)
        self._scope = StreamScope(self._stream)
        config = model.config
        self._sampler = CudaSampler(limits.max_num_seqs, config.vocab_size, self._device)
        self._drafts = None if drafts is None else drafts(self._sampler)
        beside = None if self._drafts is None else self._drafts.cache.transfers
        self._transfers = BlockTransfers(kv_cache, self._host_cache, config.strips.windows, states, beside)
        self._encoders: CudaEncoders | None = None
        self._timestamps: TimestampRows | None = None
        if isinstance(model, EncoderDecoder):
            if model.config.encoder.takes == "audio":
                self._timestamps = TimestampRows(limits.max_num_seqs, config.vocab_size, self._device)
            self._encoders = CudaEncoders(model, kv_cache, dtype, limits.max_num_seqs, limits.max_num_encoder_tokens)
        self._buffers = BufferSizes(model, kv_cache, dtype, limits, self._fields, states)
        layers = () if self._drafts is None else self._drafts.layers
        rows, tokens = limits.states_rows, limits.max_tokens
        self._states = StatesRing(rows, config.hidden_size, dtype, self._device, layers, tokens)
        self._results = ResultBuffers(limits.max_samples, self._device)
        self._results.count_experts(model)
        self._catalogues = PlacedCatalogues(self._device)
        self._beams = CudaBeams(config.vocab_size, limits.max_samples, self._device, self._catalogues)
        self._masks = DeviceMasks(limits.max_num_seqs, config.vocab_size, self._device)
        self._ladder = Ladder(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            adapted=adapters.num_slots > 0,
            num_layers=config.num_layers if self._drafts is None else None,  # heads that draft read all states
        )
        self._graphs: dict[StepSize, _Graph] = {}
        # All of the above was made on the default stream, which this runner's stream does not wait for.
        torch.cuda.synchronize(self._device)

    def _fields(self, max_tokens: int, max_samples: int) -> list[Field]:
        """Of a step's arrays, those of adapters and drafts."""
        fields = self._adapters.fields(max_tokens, max_samples)
        return fields if self._drafts is None else fields + fill_fields(max_samples)

    def connect(self, masks: MaskSource) -> None:
        self._masks.connect(masks)

    def register(self, handle: int, catalogue: Catalogue) -> None:
        self._catalogues.register(handle, catalogue)

    def release(self, handle: int) -> None:
        self._catalogues.release(handle)

    # --- steps ---------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> PendingResults:
        with self._scope:
            self._results.begin()
            overlay = self._overlay(plan)  # first: the tower works while the rest of the step is staged
            buffers = self._buffers.of_rows(plan.num_tokens, len(plan.samples))
            work = buffers.write_lists(plan.batch if plan.num_tokens else None)
            size = self._ladder.size_of(plan, prefill=work.prefill_items > 0, merges=work.merges > 0)
            graph = None if size is None or not self._fixed.knows(plan.images, size) else self._graphs.get(size)
            padded = size if size is not None and graph is not None else self._ladder.exact_size(plan)
            if buffers is not self._buffers.of(padded):
                buffers = self._buffers.of(padded)
                buffers.write_lists(plan.batch)
            plain = graph is not None and is_plain(plan) and self._drafts is None
            if not plain:
                self._masks.settle()
            is_told = plain and plan.samples.masks is None
            self._stage(plan, padded, buffers, self._results.host_tokens if is_told else NOT_TOLD)
            self._beams.follow(plan, buffers.on_device("input_ids"), buffers.on_device("copies"))
            self._move(plan.moves, buffers)
            if plan.encoders:
                assert self._encoders is not None
                with torch.inference_mode():
                    taps = () if plan.taps is None else plan.taps.encoders
                    self._encoders.run(plan.encoders, taps, self._states.rows, self._adapters)
            if not plan.num_tokens:  # encoders were all there was to do
                told = self._results.send(plan.step, 0, None, (), None)
                told.states = None if plan.taps is None else self._states.send(plan.taps)
                return told
            queued = self._draft(plan, buffers)
            if graph is not None:
                self._fixed.place(overlay, buffers.on_device("positions"))
                graph.graph.replay()
                outputs = graph.outputs
            else:
                with torch.inference_mode():
                    outputs = self._forward(padded, overlay)
            if plan.samples.masks is not None:
                self._sample_masked(plan.samples, plan.samples.masks, outputs.logits, plain, buffers)
            return self._collect(plan, outputs, queued, is_told=is_told)

    def launch_yielding(self, plan: StepPlan, between: Callable[[], None]) -> PendingResults:
        """A graph cannot be left and come back to, so the step runs kernel by kernel."""
        buffers, size = self._buffers.yielding, self._ladder.exact_size(plan)

        def let_pass() -> None:
            self._results.interrupt()
            between()

        with StreamScope(self._stream):  # `launch` enters the runner's scope between
            self._results.begin()
            pieces = Pieces(let_pass, buffers, self._limits.tokens_of_piece, plan)
            buffers.write_lists(plan.batch)
            self._stage(plan, size, buffers)
            self._move(plan.moves, buffers)
            with torch.inference_mode():
                outputs = self._forward(size, None, pieces)
            return self._collect(plan, outputs, None).timed_by(pieces.began, pieces.end())

    def _move(self, moves: StepMoves, buffers: StepBuffers) -> None:
        if len(moves.swaps_out):
            self._host_cache.swap_out(moves.swaps_out)
        if len(moves.swaps_in):
            self._host_cache.swap_in(moves.swaps_in)
        self._transfers.move_states(moves.states)
        copies = buffers.on_device("copies")
        if len(moves.copies):
            kernels.copy_blocks(self._kv_cache, copies[: len(moves.copies)])
        if self._drafts is not None:
            self._drafts.move(moves, copies)

    def _draft(self, plan: StepPlan, buffers: StepBuffers) -> QueuedStep | None:
        """Fills in the drafts of a step whose arrays are on the device. None: nobody drafts there."""
        if self._drafts is None:
            return None
        queued = queued_step(plan, buffers, self._results.tokens)
        with torch.inference_mode():
            self._drafts.draft(queued)
        return queued

    def _overlay(self, plan: StepPlan) -> Overlay | None:
        """Looks at the images of a step."""
        if plan.images is None:
            return None
        self._masks.settle()  # pinning memory may wait for the device
        with torch.inference_mode():
            return self._images.see(plan.images, plan.batch, self._kv_cache.shape[4])

    def register_adapter(self, handle: int, weights: AdapterWeights) -> None:
        self._adapters.register(handle, weights)

    def release_adapter(self, handle: int) -> None:
        with self._apart():
            self._adapters.release(handle)

    def is_quick(self, plan: StepPlan) -> bool:
        """Whether it is a small graph, without anything beside it that may take a while or is the first of its kind.
        One that is waited for may be larger: it takes the host as long."""
        if plan.num_tokens > (4 if plan.is_awaited else 1) * SMALL_STEP or not self._graphs:
            return False
        moves = len(plan.moves.swaps_out) + len(plan.moves.swaps_in) + len(plan.moves.states)
        if moves or plan.encoders or plan.images is not None or plan.prompt_logprobs or plan.rows.open:
            return False
        if plan.samples.masks is not None or plan.taps is not None:
            return False
        catalogues = (spec.catalogue for spec in plan.beams)
        return all(catalogue is None or self._catalogues.is_placed(catalogue.handle) for catalogue in catalogues)

    @property
    def block_layout(self) -> BlockLayout:
        return self._transfers.layout

    def read_blocks(self, read: BlockRead) -> PendingRead:
        self._masks.settle()  # pinning memory may wait for the device
        with self._apart():
            return self._transfers.read(read)

    def write_blocks(self, write: BlockWrite) -> PendingWrite:
        self._masks.settle()
        with self._apart():
            return self._transfers.write(write)

    def read_states(self, read: StateRead) -> PendingRead:
        self._masks.settle()
        with self._apart():
            return self._transfers.read_states(read)

    def write_states(self, write: StateWrite) -> PendingWrite:
        self._masks.settle()
        with self._apart():
            return self._transfers.write_states(write)

    def cross_weights(self, asked: CrossHeads) -> FloatRows:
        assert self._encoders is not None
        self._masks.settle()
        with self._apart():
            return self._encoders.cross_weights(asked)

    def _apart(self) -> StreamScope:
        """The scope of what is between steps: its time is not that of the next one."""
        self._results.interrupt()
        return self._scope

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._graphs.clear()

    def capture(self) -> int:
        """Captures a graph for every size of the ladder; returns their number."""
        pool = torch.cuda.graph_pool_handle()
        self._images.use_graphs(pool)
        follows_narrow = False
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for size in self._ladder.sizes():
                self._stage_padding(size)
                # A size without merges comes behind its twin, and a narrow one behind its twin and other narrow ones.
                if size.merges and not (size.narrow and follows_narrow):
                    # Loads kernels and cuBLAS plans, which a capture must not.
                    self._forward(size, self._fixed.of(size))
                follows_narrow = size.narrow
                # Not `torch.cuda.graph`: it gives the memory of the forward above back to the driver, each time anew.
                with captured(pool) as graph:
                    outputs = self._forward(size, self._fixed.of(size))
                self._graphs[size] = _Graph(graph, outputs)
            if self._drafts is not None:
                self._drafts.capture(pool)
        torch.cuda.synchronize(self._device)
        return len(self._graphs)

    def time_drafts(self) -> DraftTimes | None:
        """None: there are no graphs."""
        if not self._graphs:
            return None
        seconds, large = {}, self._buffers.large
        strips, crosses = len(large.strips), CROSS in large.workspaces
        with torch.cuda.stream(self._stream):
            for rows in CHECKED_ROWS:
                size = self._ladder.size_for(rows, 1, rows, prefill=rows > 1, merges=True)
                if size is not None:  # a budget may be smaller
                    self._stage_padding(size, one_sequence(rows, strips, self._kv_cache.shape[4], crosses=crosses))
                    seconds[rows] = time_replays(self._graphs[size].graph.replay)
            one_pass = None if self._drafts is None else self._drafts.time_pass()
        return draft_times(list(seconds), list(seconds.values()), one_pass)

    def run_padding(self, num_tokens: int) -> None:
        """One eager step of nothing but padding: what it allocates at its peak is what steps of this size need."""
        samples = min(self._limits.max_samples, self._limits.max_tokens)
        size = StepSize(num_tokens, samples, prefill=True, adapted=self._adapters.num_slots > 0)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stage_padding(size)
            self._forward(size)
            if self._drafts is not None:
                self._drafts.run_padding(num_tokens)
        torch.cuda.synchronize(self._device)

    def run_encoder_padding(self) -> None:
        """The same of the encoders of a step, and of its tower, if there are any."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._encoders is not None:
                self._encoders.run_padding()
            self._images.look_at_nothing(self._limits.max_num_encoder_tokens)
        torch.cuda.synchronize(self._device)

    # --- a step's arrays -----------------------------------------------------------------------------------------

    def _stage(self, plan: StepPlan, size: StepSize, buffers: StepBuffers, told: tuple[int, ...] = NOT_TOLD) -> None:
        """Writes the plan's arrays, padded to `size`, and queues their copy and the sampler's row updates."""
        arrays = buffers.staging.arrays()
        arrays["told"][:] = told
        batch, samples = plan.batch, plan.samples
        stage_tokens(batch, arrays, size.num_tokens)
        tapped = arrays["tap_rows"][: size.num_tokens], arrays["tap_layers"]
        if self._drafts is not None and self._drafts.layers:
            self._states.stage_features(plan.taps, plan.num_tokens, *tapped)
        else:
            self._states.stage(plan.taps, *tapped)
        stage_samples(samples, arrays, size.num_samples)
        if self._drafts is not None:
            stage_fill(samples, arrays["fill_tokens"], arrays["fill_samples"])
        if len(plan.moves.copies):
            arrays["copies"][: len(plan.moves.copies)] = plan.moves.copies
        buffers.write_tables(batch)
        buffers.write_states(batch, size.num_tokens)
        self._adapters.stage(batch, arrays, size, samples.tokens)
        if self._timestamps is not None:
            self._timestamps.update_rows(plan.rows)
        send_step(plan, buffers, self._sampler, self._catalogues)

    def _stage_padding(self, size: StepSize, batch: StepBatch | None = None) -> None:
        """A step of `size` without one real token: nothing is written or sampled, or attended but for `batch`."""
        buffers = self._buffers.of(size)
        arrays = buffers.staging.arrays()
        arrays["told"][:] = NOT_TOLD
        arrays["input_ids"][: size.num_tokens] = NO_TOKEN
        arrays["positions"][: size.num_tokens] = 0
        if batch is not None:
            arrays["input_ids"][: len(batch.input_ids)] = batch.input_ids
            arrays["positions"][: len(batch.positions)] = batch.positions
            buffers.write_tables(batch)
        arrays["slot_mapping"][:, : size.num_tokens] = NO_SLOT
        self._states.stage(None, arrays["tap_rows"][: size.num_tokens], arrays["tap_layers"])
        arrays["sample_tokens"][: size.num_samples] = 0
        arrays["sample_rows"][: size.num_samples] = NO_ROW
        buffers.write_lists(batch)
        buffers.write_states(None, size.num_tokens)
        self._adapters.stage(None, arrays, size)
        buffers.send(0 if batch is None else 1)

    # --- what a graph holds --------------------------------------------------------------------------------------

    def _forward(
        self, size: StepSize, overlay: Overlay | FixedOverlay | None = None, pieces: Pieces | None = None
    ) -> _Outputs:
        """From the staged arrays to sampled tokens; every tensor it touches has a fixed place."""
        buffers = self._buffers.of(size) if pieces is None else pieces.buffers
        samples = buffers.on_device("sample_tokens")[: size.num_samples]
        hidden = self._model.forward(
            ModelInput(
                input_ids=buffers.on_device("input_ids")[: size.num_tokens],
                positions=buffers.on_device("positions")[: size.num_tokens],
                slot_mapping=buffers.on_device("slot_mapping")[:, : size.num_tokens].unbind(),
                kv_cache=self._kv_cache,
                strip_caches=self._strip_caches,
                attention=tuple(buffers.bind(strip, size) for strip in buffers.strips),
                read=ReadRows(samples.long(), None) if size.narrow else None,
                last_tokens=self._sampler.last_tokens,
                overlay=overlay,
                cross=buffers.bind(CROSS, size) if CROSS in buffers.workspaces else None,
                recurrent=buffers.recurrent(size),
                adapters=self._adapters.bind(size, buffers.on_device),
                tap=self._states.table(
                    buffers.on_device("tap_rows")[: size.num_tokens], buffers.on_device("tap_layers")[: size.num_tokens]
                ),
                between=pieces,
            )
        )
        # `embedding` gathers rows of anything, and starts beside the kernel before it. One row is itself.
        is_itself = size.narrow or size.num_tokens == size.num_samples == 1
        sampled = hidden if is_itself else kernels.embedding(samples, hidden)
        logits = logits_of(self._model, sampled, self._adapters.bind_samples(size, buffers.on_device))
        rows = buffers.on_device("sample_rows")[: size.num_samples]
        tokens = self._results.tokens[: size.num_samples]
        # A step of one token for each sequence has nothing that was drafted.
        drafts = buffers.on_device("sample_drafts")[: size.num_samples] if size.prefill else None
        self._sampler.sample(
            logits if self._timestamps is None else self._timestamps.masked(logits, rows, drafts),
            rows,
            buffers.on_device("sample_positions")[: size.num_samples],
            tokens,
            self._results.bad[: size.num_samples],
            drafts=drafts,
            told=buffers.on_device("told"),
        )
        if self._timestamps is not None:
            self._timestamps.record(rows, tokens, drafts)
        return _Outputs(hidden, logits)

    def _sample_masked(
        self, samples: StepSamples, masks: MaskSpec, logits: Tensor, plain: bool, buffers: StepBuffers
    ) -> None:
        """Rows with a grammar are sampled by a launch of their own: their masks are made while the forward runs."""
        self._sampler.sample_part(
            logits,
            masks.part,
            buffers.on_device("masked_rows"),
            buffers.on_device("sample_positions"),
            self._results.tokens,
            self._results.bad,
            self._masks.send(masks, plain),
            None if samples.drafts is None else buffers.on_device("sample_drafts"),
        )

    # --- results -------------------------------------------------------------------------------------------------

    def _collect(
        self, plan: StepPlan, outputs: _Outputs, queued: QueuedStep | None, *, is_told: bool = False
    ) -> PendingResults:
        num_samples, num_logprobs = len(plan.samples), plan.samples.num_logprobs
        if queued is not None and len(queued.drafted.samples):
            self._results.drafts[:num_samples].copy_(queued.drafts)
        if num_logprobs is not None and num_samples:
            kernels.logprobs(
                outputs.logits[:num_samples],
                self._results.tokens[:num_samples],
                num_logprobs,
                self._results.logprobs(num_samples, num_logprobs),
            )
        prompt: tuple[LogprobArrays, ...] = ()
        if plan.prompt_logprobs:
            with torch.inference_mode():
                prompt = prompt_logprobs(self._model, outputs.hidden, plan, self._adapters)
        beams = self._beams.launch(outputs.logits, plan.beams) if plan.beams else None
        drafted = queued is not None and len(queued.drafted.samples) > 0
        told = self._results.send(plan.step, num_samples, num_logprobs, prompt, beams, drafted=drafted, is_told=is_told)
        if plan.taps is not None or self._drafts is not None:
            self._results.interrupt()
        if self._drafts is not None and self._drafts.layers and queued is not None:
            with torch.inference_mode():
                self._drafts.learn(queued, self._states.features(plan.taps))
        told.states = None if plan.taps is None else self._states.send(plan.taps)
        return told
