"""From a configuration to a runner that is ready: load, size the cache, capture graphs. Logs each phase with its time.

Imports torch; called from a worker thread.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bequest.engine.adapters.load import loader_of
from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.kernels import cpu as kernels
from bequest.engine.layers.backend import Backend
from bequest.engine.layers.ranks import SOLO, Ranks
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.impl import Implementation
from bequest.engine.models.load import LoadedModel, load_model
from bequest.engine.runner.cpu import CpuRunner
from bequest.engine.runner.encoder_info import max_encoder_len
from bequest.engine.runner.extracting import ExtractingSteps, extracting_on_cpu, extracting_on_gpu, tokens_of_piece
from bequest.engine.runner.kept_weights import KeptWeights
from bequest.engine.runner.memory import (
    GIB,
    CachePlan,
    CacheWish,
    Share,
    gib,
    host_bytes,
    host_memory,
    plan_cache,
    table,
)
from bequest.engine.runner.model_info import check_embeds, drafts_on_cpu, drafts_on_gpu, dtype_name, model_info
from bequest.engine.runner.part_runner import as_whole
from bequest.engine.runner.prepare_draft import LoadedDrafts, check_draft, load_draft, place_on_gpu
from bequest.engine.runner.state_memory import plan_states, state_wish
from bequest.engine.runner.warm_pages import populate_in_background
from bequest.engine.types import ModelInfo, Runner
from bequest.engine.types.adapter import NO_ADAPTERS, AdapterSource
from bequest.engine.types.recurrent import StateSizes
from bequest.engine.types.speculation import ON_CPU, ON_GPU, DraftCosts

if TYPE_CHECKING:
    from bequest.engine.runner.cuda import CudaRunner, RunnerLimits
    from bequest.engine.runner.cuda_adapters import CudaAdapters
    from bequest.engine.runner.cuda_drafts import MakeDrafts
    from bequest.engine.runner.cuda_times import DraftTimes

log = logging.getLogger("bequest.start")

# A step of this many tokens takes about an eighth of a second on two cores: longer ones would stall running streams.
_CPU_BATCHED_TOKENS = 128
# Where none runs, only who comes next waits for the end of the step.
_CPU_TOKENS_ALONE = 512
# A step takes the time of its tokens on a CPU: a slot that holds a prompt costs the others little. On a GPU it takes as
# long for a few as for a hundred, and should have a stream for each slot.
_CPU_PROMPT_PACE, _CUDA_PROMPT_PACE = 0.625, 2.0
# Here every step still fits a graph.
_CUDA_BATCHED_TOKENS = 2048
# An encoder's run is part of a step: on a CPU it keeps running streams waiting, on a GPU it should fill the device.
_CPU_ENCODER_TOKENS = 2048
_CUDA_ENCODER_TOKENS = 16384
# Hidden states that one step stores, in bytes.
_CPU_STATES = 64 << 20
_CUDA_STATES = 128 << 20
# On a CPU the cache shares its memory with everything else on the machine: by default it takes at most this much.
_CPU_SHARE = 0.4
_CPU_MOST = 4 * GIB
# What it has pages for soon after the start. Later ones come as they are written to, 2 MiB at a time, in a fifth of a
# millisecond each: that is not worth a gigabyte of a machine that may have other uses for it.
_CPU_PAGES_AT_START = GIB // 8
_HOST_STATES = 0.5  # of the host's share, for states of leases; blocks have the rest

# Graphs keep memory of their own beside the activations.
_GRAPH_BYTES = GIB // 2


@dataclass(frozen=True, slots=True)
class Prepared:
    runner: Runner
    info: ModelInfo
    num_blocks: int  # with the null block, as is the next one
    num_host_blocks: int
    num_lease_blocks: int  # of the first, that leases may hold
    windows: tuple[int, ...]  # of the cache's strips (engine/models/strips.py)
    max_num_batched_tokens: int
    prompt_pace: float  # as in SchedulerLimits
    extracting: ExtractingSteps
    max_num_tokens_alone: int | None = None  # as in SchedulerLimits
    max_num_encoder_tokens: int = 0  # likewise
    max_num_seqs: int = 1  # as in SchedulerLimits
    states: StateSizes | None = None  # of a model with recurrent layers
    adapters: AdapterSource = NO_ADAPTERS
    weights: KeptWeights | None = None  # of a GPU


def prepare(config: EngineConfig, path: Path, weights: KeptWeights | None = None, *, ranks: Ranks = SOLO) -> Prepared:
    """`weights`: of a GPU's runner that was put away. Of several `ranks` each loads its part, and all come to the same
    sizes."""
    if uses_cuda(config):
        return _prepare_cuda(config, path, weights, ranks)
    return _prepare_cpu(config, path, ranks)


@contextmanager
def phase(name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    log.info("%s: %.2f s", name, time.perf_counter() - started)


def uses_cuda(config: EngineConfig) -> bool:
    if config.device == "cpu" or (config.device == "auto" and not kernels.WITH_CUDA):
        return False
    available = torch.cuda.is_available()
    if config.device == "cuda" and not kernels.WITH_CUDA:
        raise ModelError("device=cuda, but this build has no CUDA: build with BEQUEST_CUDA=on")
    if config.device == "cuda" and not available:
        raise ModelError("device=cuda, but torch finds no CUDA device")
    return available


def _prepare_cpu(config: EngineConfig, path: Path, ranks: Ranks) -> Prepared:
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // ranks.size)
    kernels.set_num_threads(threads)
    torch.set_num_threads(threads)
    check_draft(config, path)
    with phase("weights"):
        loaded = _load(config, path, ranks, CpuBackend.of(config))
        draft = load_draft(config, path, loaded)
    with phase("cache"):
        available = ranks.least(host_memory())
        shares = [*_weight_shares(loaded), Share("free before the cache", available)]
        wish = _wish(config, loaded, ranks, 0 if draft is None else draft.block_bytes(config.block_size))
        most = min(int(available * _CPU_SHARE), _CPU_MOST)
        states = plan_states(state_wish(config, loaded, wish, ranks.size), most)
        plan = plan_cache(wish, available - states.num_bytes, most - states.num_bytes, shares)
        shape = loaded.config.kv_shape(config.block_size)
        kv_cache = torch.empty((plan.num_blocks, *shape), dtype=loaded.kv_dtype)
        kv_cache[0] = 0  # the null block stands for what slid out of windows: no kernel may meet a NaN beside them
        # Pages that nothing is written to take no memory.
        on_host = host_bytes(wish, (available - ranks.size * kv_cache.nbytes) // 2)
        states = states.with_host(int(on_host * _HOST_STATES))
        num_host = 1 + (on_host - states.host_bytes) // wish.block_bytes
        host_cache = torch.empty((num_host, *shape), dtype=loaded.kv_dtype)
        # A block is first written in the middle of a step, which should not wait for its pages.
        kernels.advise_large_pages(kv_cache)
        populate_in_background(kv_cache, _CPU_PAGES_AT_START)
        kernels.keep_freed_memory()
    _log_memory(wish, plan, num_host, loaded, shares)
    log.info("kernels: %s, %d threads; %s%s", kernels.isa(), threads, _storage(loaded), _products(loaded))
    _log_notes(loaded)
    seqs, recurrent = states.max_num_seqs, states.allocate()
    drafting = None if draft is None else draft.place(plan.num_blocks, num_host, config.block_size, seqs)
    runner = CpuRunner(loaded.model, kv_cache, host_cache, seqs, loaded.dtype, recurrent, loaded.tower, drafting)
    tokens = config.max_num_batched_tokens or _CPU_BATCHED_TOKENS
    alone = _CPU_TOKENS_ALONE if config.max_num_batched_tokens is None else None
    drafts = drafts_on_cpu(loaded.config, None if draft is None else draft.drafts(ON_CPU))
    info = model_info(config, path, loaded, plan, torch.float32, drafts)
    rows = _states_rows(loaded, _CPU_STATES, torch.float32)
    return Prepared(
        as_whole(runner, loaded.cutting, ranks),
        info,
        plan.num_blocks,
        num_host,
        plan.num_lease_blocks,
        loaded.config.strips.windows_below(plan.max_model_len),
        tokens,
        _CPU_PROMPT_PACE,
        extracting_on_cpu(rows),
        alone,
        config.max_num_encoder_tokens or _CPU_ENCODER_TOKENS,
        states.max_num_seqs,
        states.sizes,
        AdapterSource(loader_of(loaded, config.max_lora_rank), config.max_loras),
    )


def _prepare_cuda(config: EngineConfig, path: Path, weights: KeptWeights | None, ranks: Ranks) -> Prepared:
    from bequest.engine.runner.cuda import CudaRunner, RunnerLimits
    from bequest.engine.runner.cuda_adapters import places_of, source_of

    check_draft(config, path)
    device = torch.device("cuda", torch.cuda.current_device())
    tokens = config.max_num_batched_tokens or _CUDA_BATCHED_TOKENS
    with phase("device"):
        memory = _DeviceMemory.measure(device)
    with phase("weights"):
        kept = None if weights is None else weights.bring_back()
        loaded = kept or _load_cuda(config, path, device, memory, ranks)
        draft = weights.drafts if weights and kept else _load_draft_cuda(config, path, loaded, device)
    wish = _wish(config, loaded, ranks, 0 if draft is None else draft.block_bytes(config.block_size))
    left = ranks.size * ranks.least(_left_beside_weights(config, device))
    memory_of_states = plan_states(state_wish(config, loaded, wish, ranks.size), left)
    num_seqs, recurrent = memory_of_states.max_num_seqs, memory_of_states.allocate(device)
    shape = loaded.config.kv_shape(config.block_size)
    adapters = places_of(config, loaded, device, weights)
    states = _states_rows(loaded, _CUDA_STATES, loaded.dtype)
    encoder_tokens = config.max_num_encoder_tokens or _CUDA_ENCODER_TOKENS
    others = draft is not None or recurrent is not None or ranks.size > 1
    piece, most = 0 if others else _tokens_of_piece(config, loaded), tokens + _tokens_beyond(loaded)
    limits = RunnerLimits(num_seqs, most, wish.self_blocks, states, wish.cross_blocks, encoder_tokens, piece)
    with phase("activations"):
        probed = place_on_gpu(draft, 2, 1, config.block_size, limits)
        activations = _measure_activations(loaded, shape, device, limits, recurrent, adapters, probed)
    with phase("cache"):
        shares = _cuda_shares(config, loaded, device, memory.others, activations)
        available = ranks.size * ranks.least(shares[-1].num_bytes)
        plan = plan_cache(wish, available, available, shares)
        # Not empty: rows of padding read the null block, and NaN there would be spread by nobody but is hard to debug.
        kv_cache = torch.zeros((plan.num_blocks, *shape), dtype=loaded.kv_dtype, device=device)
    on_host = host_bytes(wish, ranks.least(host_memory()) // 2)
    memory_of_states = memory_of_states.with_host(int(on_host * _HOST_STATES))
    num_host = 1 + (on_host - memory_of_states.host_bytes) // wish.block_bytes
    _log_memory(wish, plan, num_host, loaded, shares)
    _log_device(loaded, device)
    drafting = place_on_gpu(draft, plan.num_blocks, num_host, config.block_size, limits)
    runner = CudaRunner(
        loaded.model, kv_cache, loaded.dtype, num_host, limits, adapters, recurrent, loaded.tower, drafting
    )
    _capture(runner, config, loaded)
    drafts = drafts_on_gpu(loaded.config, _measured(runner.time_drafts(), draft))
    return Prepared(
        as_whole(runner, loaded.cutting, ranks),
        model_info(config, path, loaded, plan, loaded.dtype, drafts),
        plan.num_blocks,
        num_host,
        plan.num_lease_blocks,
        loaded.config.strips.windows_below(plan.max_model_len),
        tokens,
        _CUDA_PROMPT_PACE,
        extracting_on_gpu(loaded, states, tokens, yields=limits.tokens_of_piece > 0),
        max_num_encoder_tokens=encoder_tokens,
        max_num_seqs=memory_of_states.max_num_seqs,
        states=memory_of_states.sizes,
        adapters=source_of(config, loaded, adapters),
        weights=KeptWeights(loaded, device, adapters, draft) if kept is None else weights,
    )


def _measured(times: DraftTimes | None, draft: LoadedDrafts | None) -> DraftCosts:
    costs = ON_GPU if times is None else replace(ON_GPU, steps=times.steps)
    if draft is None:
        return costs
    return replace(costs, model=draft.drafts(costs, None if times is None else times.one_pass))


def _capture(runner: CudaRunner, config: EngineConfig, loaded: LoadedModel) -> None:
    if _takes_graphs(config, loaded):
        with phase("graphs"):
            count = runner.capture()
        log.info("graphs: %d sizes", count)
    elif loaded.without_graphs is not None:
        log.info("graphs: none, because %s", loaded.without_graphs)


def _log_device(loaded: LoadedModel, device: torch.device) -> None:
    log.info("device: %s; %s", torch.cuda.get_device_name(device), _storage(loaded))
    _log_notes(loaded)


def _tokens_of_piece(config: EngineConfig, loaded: LoadedModel) -> int:
    """As in RunnerLimits: of a model alone on its device, whose plans are written down by nobody."""
    sees = loaded.sight is not None or config.allow_prompt_embeds
    return 0 if sees or config.record is not None or not config.pipelined else tokens_of_piece(loaded)


def _tokens_beyond(loaded: LoadedModel) -> int:
    """That a step may have beyond its budget, for the end of an image that is computed at once."""
    vision = None if loaded.sight is None else loaded.sight.info
    return vision.max_tokens if vision is not None and vision.together else 0


def _log_notes(loaded: LoadedModel) -> None:
    if isinstance(loaded.config, DecoderConfig) and (experts := loaded.config.experts) is not None:
        of_all = f"{loaded.num_active_parameters / 1e9:.2f} of {loaded.num_parameters / 1e9:.2f} billion parameters"
        layers = f"{len(experts.layers)} of {loaded.config.num_layers} layers"
        log.info("experts: a token takes %d of %d in %s, %s", experts.top_k, experts.num_experts, layers, of_all)
    for note in loaded.notes:
        log.info("layers: %s", note)


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """Of a GPU, before anything of ours is in it."""

    free: int
    total: int

    @classmethod
    def measure(cls, device: torch.device) -> _DeviceMemory:
        return cls(*torch.cuda.mem_get_info(device))

    @property
    def others(self) -> int:
        return self.total - self.free


def _load(config: EngineConfig, path: Path, ranks: Ranks, backend: Backend) -> LoadedModel:
    loaded = load_model(
        path,
        config.dtype,
        config.max_model_len,
        backend=backend,
        dummy=config.load_format == "dummy",
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
        impl=Implementation.of(config),
        ranks=ranks,
    )
    check_embeds(config, loaded)
    return loaded


def _load_cuda(
    config: EngineConfig, path: Path, device: torch.device, memory: _DeviceMemory, ranks: Ranks
) -> LoadedModel:
    from bequest.engine.backends.cuda.backend import CudaBackend

    try:
        loaded = _load(config, path, ranks, CudaBackend(device))
    except torch.cuda.OutOfMemoryError:
        shares = [
            Share("total", memory.total),
            Share("others", memory.others),
            Share("free before the weights", memory.free),
        ]
        raise ModelError(
            f"The weights of {path.name} do not fit this GPU ({table(shares)}). Take a smaller model, "
            "dtype=bfloat16 if it was float32, or device=cpu."
        ) from None
    torch.cuda.synchronize(device)
    return loaded


def _load_draft_cuda(
    config: EngineConfig, path: Path, loaded: LoadedModel, device: torch.device
) -> LoadedDrafts | None:
    from bequest.engine.backends.cuda.backend import CudaBackend

    draft = load_draft(config, path, loaded, CudaBackend(device))
    torch.cuda.synchronize(device)
    return draft


def _left_beside_weights(config: EngineConfig, device: torch.device) -> int:
    """Bytes."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(total * (1 - config.gpu_memory_utilization)))


def _measure_activations(
    loaded: LoadedModel,
    shape: tuple[int, ...],
    device: torch.device,
    limits: RunnerLimits,
    states: torch.Tensor | None,
    adapters: CudaAdapters,
    drafts: MakeDrafts | None,
) -> int:
    """Bytes. One step of the largest size beside a cache of one block tells what the steps need."""
    from bequest.engine.runner.cuda import CudaRunner

    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    two_blocks = torch.zeros((2, *shape), dtype=loaded.kv_dtype, device=device)
    probe = CudaRunner(loaded.model, two_blocks, loaded.dtype, 1, limits, adapters, states, loaded.tower, drafts)
    probe.run_padding(limits.max_num_batched_tokens)
    probe.run_encoder_padding()
    activations = torch.cuda.max_memory_allocated(device) - before
    probe.close()
    del probe, two_blocks
    torch.cuda.empty_cache()
    return activations


def _cuda_shares(
    config: EngineConfig, loaded: LoadedModel, device: torch.device, others: int, activations: int
) -> list[Share]:
    """What the memory of the GPU goes to; what is left for the cache comes last."""
    free, total = torch.cuda.mem_get_info(device)
    graphs = activations + _GRAPH_BYTES if _takes_graphs(config, loaded) else 0
    images = int(config.image_cache_mb * 2**20) if loaded.sight is not None or config.allow_prompt_embeds else 0
    available = free - int(total * (1 - config.gpu_memory_utilization)) - activations - graphs - images
    return [
        Share("total", total),
        Share("others", others),
        *_weight_shares(loaded),
        Share("activations", activations),
        Share("graphs", graphs),
        *([Share("images", images)] if images else []),
        Share("left for the cache", max(0, available)),
    ]


def _weight_shares(loaded: LoadedModel) -> list[Share]:
    return [Share(f"weights in {name}", count) for name, count in loaded.bytes_by_format.items()]


def _takes_graphs(config: EngineConfig, loaded: LoadedModel) -> bool:
    return not config.enforce_eager and loaded.without_graphs is None


def _wish(config: EngineConfig, loaded: LoadedModel, ranks: Ranks, draft_bytes: int = 0) -> CacheWish:
    """In bytes of all ranks. `draft_bytes`: what a draft model has of each block, on each."""
    own = math.prod(loaded.config.kv_shape(config.block_size)) * loaded.kv_dtype.itemsize
    return CacheWish(
        block_bytes=ranks.size * (own + draft_bytes),
        block_size=config.block_size,
        max_model_len=loaded.max_model_len,
        max_model_len_asked=config.max_model_len is not None,
        max_num_seqs=config.max_num_seqs,
        num_blocks=config.num_blocks,
        cache_gb=config.kv_cache_gb,
        retain_fraction=config.retain_fraction,
        host_cache_gb=config.host_cache_gb,
        max_encoder_len=max_encoder_len(config, loaded),
        num_strips=len(loaded.config.strips.windows),
    )


def _log_memory(wish: CacheWish, plan: CachePlan, num_host: int, loaded: LoadedModel, shares: list[Share]) -> None:
    if plan.max_model_len < loaded.max_model_len:
        log.warning(
            "max_model_len lowered from %d to %d, what the cache holds", loaded.max_model_len, plan.max_model_len
        )
    log.info(
        "memory: %s; cache %s (%s blocks of %d tokens, %s tokens)",
        table(shares),
        gib(plan.num_blocks * wish.block_bytes),
        f"{plan.num_blocks:,}",
        wish.block_size,
        f"{(plan.num_blocks - 1) // wish.num_strips * wish.block_size:,}",
    )
    _log_strips(loaded, plan)
    log.info(
        "leases: up to %s blocks of the cache and %s on the host (%s)",
        f"{plan.num_lease_blocks:,}",
        f"{num_host - 1:,}",
        gib((num_host - 1) * wish.block_bytes),
    )


def _log_strips(loaded: LoadedModel, plan: CachePlan) -> None:
    strips = loaded.config.strips
    windows = strips.windows_below(plan.max_model_len)
    if any(windows):
        held = [f"{windows.count(w)} of {f'a window of {w} tokens' if w else 'all tokens'}" for w in sorted({*windows})]
        layers = " or ".join(map(str, sorted({*strips.units})))
        log.info("windows: a block holds %s layers; for each token one block %s", layers, ", ".join(held))


def _states_rows(loaded: LoadedModel, num_bytes: int, dtype: torch.dtype) -> int:
    """Rows of hidden states in so much memory; room for all layers of a token in any case."""
    config = loaded.config
    layers = config.num_layers
    if isinstance(config, EncoderDecoderConfig):
        layers = max(layers, config.encoder.num_layers)
    return max(num_bytes // (config.hidden_size * dtype.itemsize), layers + 1)


def _storage(loaded: LoadedModel) -> str:
    weights, cache = " and ".join(loaded.formats), dtype_name(loaded.kv_dtype)
    return f"weights and cache in {cache}" if weights == cache else f"weights in {weights}, cache in {cache}"


def _products(loaded: LoadedModel) -> str:
    if loaded.matmul == "fast":
        return f", products of codes in integers ({kernels.dot()})"
    by_units = loaded.dtype is torch.bfloat16 and kernels.multiplies_tiles()
    return ", products in bfloat16 by matrix units" if by_units else ", products in float32"
