"""Puts an engine together: load, size memory, start. Each phase is logged with its time."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.engine import AsyncEngine
from engine.errors import ModelError
from engine.models.embedded import embedded_model_path
from engine.scheduler import Scheduler, SchedulerLimits
from engine.text import TextBundle, load_text
from engine.types import ModelInfo, Observer, Runner

if TYPE_CHECKING:
    from engine.runner.memory import MemoryPlan

log = logging.getLogger("bequest.start")

# A step of this many tokens takes about a third of a second on two cores: longer ones would stall running streams.
_CPU_BATCHED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Built:
    engine: AsyncEngine
    text: TextBundle


@dataclass(frozen=True, slots=True)
class _Loaded:
    runner: Runner
    text: TextBundle
    info: ModelInfo
    memory: MemoryPlan


async def build_engine(config: EngineConfig, observer: Observer | None = None) -> Built:
    """Loads the model of `config` and starts its engine in the running event loop. Raises ModelError."""
    # The device thread should not wait 5 ms for the interpreter when it comes back from a kernel.
    sys.setswitchinterval(0.0005)
    loaded = await asyncio.to_thread(_load, config)
    from engine._C import BlockPool

    pool = BlockPool(loaded.memory.num_blocks, config.block_size, config.enable_prefix_caching)
    limits = SchedulerLimits(
        config.max_num_seqs,
        config.max_num_batched_tokens or _CPU_BATCHED_TOKENS,
        config.enable_prefix_caching,
    )
    engine = AsyncEngine(
        loaded.info,
        Scheduler(limits, pool, loaded.info.eos_token_ids),
        loaded.runner,
        loaded.text.tokenizer,
        pipelined=config.pipelined,
        max_queued=config.max_queued,
        seed=config.seed,
        observer=observer,
    )
    return Built(engine, loaded.text)


def _load(config: EngineConfig) -> _Loaded:
    """Runs in a worker thread; imports torch, which the server must not."""
    path = Path(config.model) if config.model is not None else embedded_model_path()
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory; a model is a Hugging Face directory or a .gguf file")
    with _phase("libraries"):
        import torch

        from engine import kernels
        from engine.models.load import load_model
        from engine.runner.cpu import CpuRunner
        from engine.runner.memory import plan_memory

        threads = config.threads or len(os.sched_getaffinity(0))
        kernels.set_num_threads(threads)
        torch.set_num_threads(threads)
    with _phase(f"tokenizer of {path.name}"):
        text = load_text(path)
    with _phase("weights"):
        loaded = load_model(path, config.dtype, config.max_model_len)
    with _phase("cache"):
        shape = loaded.config.kv_shape(config.block_size)  # [L, 2, NKV, BS, D]
        memory = plan_memory(
            block_bytes=shape.numel() * loaded.dtype.itemsize,
            block_size=config.block_size,
            weights=loaded.weight_bytes,
            num_blocks=config.num_blocks,
            cache_gb=config.kv_cache_gb,
            max_model_len=loaded.max_model_len,
            max_model_len_asked=config.max_model_len is not None,
            max_num_seqs=config.max_num_seqs,
        )
        kv_cache = torch.empty((memory.num_blocks, *shape), dtype=loaded.dtype)
        kernels.keep_freed_memory()
    if memory.max_model_len < loaded.max_model_len:
        log.warning(
            "max_model_len lowered from %d to %d, what the cache holds", loaded.max_model_len, memory.max_model_len
        )
    log.info("memory: %s", memory.table(config.block_size))
    log.info("kernels: %s, %d threads; weights and cache in %s", kernels.isa(), threads, _name(loaded.dtype))
    info = ModelInfo(
        name=path.stem if path.suffix == ".gguf" else path.name,
        architecture=loaded.config.architecture,
        max_model_len=memory.max_model_len,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.generation.eos_token_ids,
        dtype=_name(loaded.dtype),
        num_parameters=loaded.num_parameters,
        default_sampling=dict(loaded.generation.sampling) if config.generation_config == "auto" else {},
    )
    return _Loaded(CpuRunner(loaded.model, kv_cache, config.max_num_seqs), text, info, memory)


@contextmanager
def _phase(name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    log.info("%s: %.2f s", name, time.perf_counter() - started)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
