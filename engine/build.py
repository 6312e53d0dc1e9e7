"""Puts an engine together: text side, runner, scheduler. What takes time is logged with its time."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bequest.engine.cache.kv_cache import KvCache
from bequest.engine.cache.recurrent import RecurrentStates
from bequest.engine.cache.states import Stateless
from bequest.engine.cache.tiers.host import HostTier
from bequest.engine.config import EngineConfig
from bequest.engine.drafting.choice import make_drafter
from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import InvalidAdapter, ModelError
from bequest.engine.fetch import model_path
from bequest.engine.fingerprint import Fingerprint
from bequest.engine.inheritance.retention import Retention, RetentionLimits
from bequest.engine.models.draft_kinds import is_eagle3
from bequest.engine.models.impl import Implementation
from bequest.engine.models.look import look_at
from bequest.engine.preload import load_torch_libraries, start_cuda
from bequest.engine.recording import Opened, Recorder, RecordingRunner
from bequest.engine.scheduling.limits import ExtractionLimits, SchedulerLimits
from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.state.corpus import Corpus
from bequest.engine.text import TextBundle, load_text, template_from_file, text_from_gguf
from bequest.engine.types import Runner
from bequest.engine.types.adapter import AdapterWeights
from bequest.engine.types.estate import NO_NOTES, Notes
from bequest.engine.types.image import MOST_TURNED
from bequest.engine.types.recurrent import StateSizes
from bequest.engine.types.store_url import parse_store_url
from bequest.engine.vault.mooncake import MooncakeStore, StoreUnusable
from bequest.engine.vault.neighbours import NeighbourShelf
from bequest.engine.vault.objects import ObjectShelf
from bequest.engine.vault.shelf import Shelf
from bequest.engine.vault.shelving import Shelving
from bequest.engine.watching.observation import Observer
from bequest.engine.work.desk import Drafter
from bequest.engine.work.kinds import KINDS, KindClass

if TYPE_CHECKING:
    from bequest.engine.runner.kept_weights import KeptWeights
    from bequest.engine.runner.prepare import Prepared

log = logging.getLogger("bequest.start")

_ADAPTERS_AT_ONCE = 4  # that are read at the start
# Two models that read this alike have the same tokens.
_PROBE = 'The quick brown fox, 3.14 times: {"größe": [1, 2]}\n\tfor i in range(10): print(i)  # 你好'


@dataclass(frozen=True, slots=True)
class Built:
    engine: AsyncEngine
    text: TextBundle


# Tokens: a lease keeps a window of 128 tokens for a few per cent of what a layer that sees all tokens keeps, and one of
# 1024 for a quarter; a child that starts in the middle computes so many again at most, a fraction of a second on a GPU.
WINDOW_INTERVAL = 4096


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """In blocks; the pools count their null block too."""

    block_size: int
    num_blocks: int
    num_host_blocks: int = 1
    num_lease_blocks: int = 0  # of the device's, that leases may hold
    states: StateSizes | None = None  # of a model with recurrent layers
    windows: tuple[int, ...] = (0,)  # of the strips of the cache (engine/models/strips.py); 0: all tokens
    window_interval: int = WINDOW_INTERVAL  # of positions that leases keep windows of
    num_file_blocks: int = 0  # that leases may have in files
    rows_of_state: int = 0  # as in RetentionLimits
    block_bytes: int = 0


def make_scheduler(
    limits: SchedulerLimits,
    sizes: CacheSizes,
    eos_token_ids: tuple[int, ...],
    *,
    max_records: int = 1024,
    max_leases: int | None = None,
    lease_fraction: float = 1.0,
    wall: Callable[[], float] = time.time,
    kinds: Sequence[KindClass] = KINDS,
    drafter: Drafter | None = None,
    corpus: Corpus | None = None,
) -> Scheduler:
    """A scheduler over empty pools. `lease_fraction` is what one tenant may hold of the budget of leases."""
    from bequest.engine._C import BlockPool

    pool = BlockPool(
        sizes.num_blocks,
        sizes.block_size,
        limits.prefix_caching,
        strips=(sizes.windows, sizes.window_interval, limits.most_tokens),
    )
    host = HostTier(BlockPool(sizes.num_host_blocks, sizes.block_size, prefix_index=False))
    budget = sizes.num_lease_blocks + sizes.num_host_blocks - 1
    states = Stateless() if sizes.states is None else RecurrentStates(sizes.states, sizes.block_size)
    per_tenant = int(budget * lease_fraction)
    kept = RetentionLimits(
        budget,
        per_tenant,
        max_leases,
        max_records,
        sizes.states,
        sizes.num_file_blocks,
        sizes.rows_of_state,
        sizes.block_bytes,
    )
    retention = Retention(kept, pool, wall, states, corpus)
    cache = KvCache(
        pool,
        host,
        retention.leases,
        retention.cross,
        states,
        device_budget=sizes.num_lease_blocks,
        prefix_caching=limits.prefix_caching,
    )
    return Scheduler(limits, cache, retention, eos_token_ids, kinds=kinds, drafter=drafter)


async def build_engine(
    config: EngineConfig, observer: Observer | None = None, *, tuning: Tuning = DEFAULT, notes: Notes = NO_NOTES
) -> Built:
    """Loads the model of `config` and starts its engine in the running event loop. Raises ModelError."""
    # The device thread should not wait 5 ms for the interpreter when it comes back from a kernel.
    sys.setswitchinterval(0.0001)
    path = await asyncio.to_thread(model_path, config.model, Implementation.of(config))
    text = await asyncio.to_thread(_read_text, config, path)
    prepared = await _prepare_apart(config, path)
    fingerprint = await asyncio.to_thread(Fingerprint, path, config.quantization)
    shelf = await asyncio.to_thread(_open_shelf, config)
    drafter = make_drafter(config.speculative, prepared.info.drafts)
    adapters = await asyncio.to_thread(_load_adapters, config, prepared)
    engine = AsyncEngine(
        prepared.info,
        make_scheduler(
            _limits(config, prepared, tuning),
            _sizes(config, prepared),
            prepared.info.eos_token_ids,
            max_records=config.retained_tokens_records,
            max_leases=config.max_leases,
            lease_fraction=config.max_lease_fraction,
            drafter=drafter,
            corpus=None if drafter is None else drafter.texts,
        ),
        _runner_of(config, path, prepared),
        text.tokenizer,
        pipelined=config.pipelined,
        max_queued=config.max_queued,
        seed=config.seed,
        step_timeout=config.step_timeout,
        idle_sleep=config.idle_sleep,
        observer=observer,
        fingerprint=fingerprint,
        notes=notes,
        adapters=prepared.adapters,
    )
    for name, weights in adapters.items():
        engine.adapters.add(name, weights)
    await engine.adapters.settled()
    if shelf is not None:
        await engine.open_files(shelf, config.durable_wait, warm=config.warm_estates)
    return Built(engine, text)


async def _prepare_apart(config: EngineConfig, path: Path) -> Prepared:
    """In a thread that ends: an allocator may keep the memory of threads that live, whoever frees it."""
    loader = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(loader, _prepare, config, path)
    finally:
        loader.shutdown(wait=False)


def _open_shelf(config: EngineConfig) -> Shelving | None:
    if config.estate_store is not None:
        return _open_store(config.estate_store)
    if config.estate_dir is None:
        return None
    try:
        path = Path(config.estate_dir).absolute()
        return NeighbourShelf(path) if config.estate_peers else Shelf(path)
    except OSError as error:
        raise ModelError(f"estate_dir={config.estate_dir}: {error.strerror}") from None


def _open_store(given: str) -> Shelving:
    url = parse_store_url(given)
    try:
        return ObjectShelf(MooncakeStore(url), url.name)
    except StoreUnusable as error:
        raise ModelError(f"estate_store={given}: {error}") from None


def _limits(config: EngineConfig, prepared: Prepared, tuning: Tuning) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=prepared.max_num_seqs,
        max_num_batched_tokens=prepared.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
        max_num_tokens_alone=prepared.max_num_tokens_alone,
        extraction=ExtractionLimits(
            share=config.extraction_share,
            max_queued=config.max_queued_extractions,
            max_request_bytes=int(config.max_extraction_mb * 2**20),
            max_bytes=int(config.extraction_mb * 2**20),
            max_step_rows=prepared.extracting.rows,
            max_step_tokens=prepared.extracting.tokens,
            short_steps=prepared.extracting.short,
            queues_steps=False,
            yields_from=prepared.extracting.yields_from,
        ),
        max_num_encoder_tokens=prepared.max_num_encoder_tokens,
        max_image_rows=_image_rows(config, prepared),
        turns_images=_turns_images(prepared),
        takes_embeds=config.allow_prompt_embeds,
        images_together=prepared.info.vision is not None and prepared.info.vision.together,
        prompt_pace=prepared.prompt_pace,
        follows_beams=_follows_beams(prepared),
        draft_rows=0 if prepared.info.drafts is None else prepared.info.drafts.rows,
        tuning=tuning,
    )


def _follows_beams(prepared: Prepared) -> bool:
    """A GPU would idle between two steps of a search. On a CPU a step that is launched in vain costs more than the gap.
    States of recurrent layers are not copied as blocks are, and who drafts reads the tokens of a plan."""
    on_gpu, costs = prepared.weights is not None, prepared.info.drafts
    drafts_itself = costs is not None and costs.model is not None
    return on_gpu and not drafts_itself and prepared.states is None


def _turns_images(prepared: Prepared) -> bool:
    vision = prepared.info.vision
    if vision is None or not vision.turns:
        return False
    if prepared.max_num_batched_tokens > MOST_TURNED:
        given = f"max_num_batched_tokens={prepared.max_num_batched_tokens}"
        raise ModelError(f"{given} is more than {MOST_TURNED}, what a step of this model may have")
    return True


def _image_rows(config: EngineConfig, prepared: Prepared) -> int:
    """Rows of images in the memory for them: as hidden states are."""
    info = prepared.info
    states = 1 if info.vision is None else info.vision.states_per_row
    row = states * info.hidden_size * (4 if info.states_dtype == "float32" else 2)
    return int(config.image_cache_mb * 2**20) // max(1, row)


def _sizes(config: EngineConfig, prepared: Prepared) -> CacheSizes:
    return CacheSizes(
        config.block_size,
        prepared.num_blocks,
        prepared.num_host_blocks,
        prepared.num_lease_blocks,
        prepared.states,
        prepared.windows,
        config.state_interval or WINDOW_INTERVAL,
        _file_blocks(config, prepared),
        prepared.runner.block_layout.rows_of_state,
        prepared.runner.block_layout.num_bytes,
    )


def _file_blocks(config: EngineConfig, prepared: Prepared) -> int:
    if not config.keeps_estates:
        return 0
    return int(config.estate_gb * 2**30) // prepared.runner.block_layout.num_bytes


def _load_adapters(config: EngineConfig, prepared: Prepared) -> dict[str, AdapterWeights]:
    """Those of the command line, by name. Raises ModelError."""

    def load(entry: str) -> AdapterWeights:
        try:
            return prepared.adapters.load(Path(entry.partition("=")[2]).expanduser())
        except InvalidAdapter as error:
            why = f"{error} Its limit is max_lora_rank=" if error.reason == "rank_too_large" else str(error)
            raise ModelError(f"lora={entry}: {why}") from None

    with ThreadPoolExecutor(_ADAPTERS_AT_ONCE) as threads:
        loaded = list(threads.map(load, config.lora))
    return {entry.partition("=")[0]: weights for entry, weights in zip(config.lora, loaded, strict=True)}


def _runner_of(config: EngineConfig, path: Path, prepared: Prepared) -> Runner:
    """The runner, which can be put away and built again. Not where images were seen, which only it knows; nor one of
    several ranks; nor one that writes down what passes it, which is to be one story."""
    if config.record is not None:
        return _recorded(prepared, config, Path(config.record))
    has_images = prepared.info.vision is not None or config.allow_prompt_embeds
    if has_images or config.tensor_parallel_size > 1:
        return prepared.runner
    from bequest.engine.runner.sleeping import SleepingRunner

    sizes, weights = _sizes(config, prepared), prepared.weights
    build = partial(_built_again, config, path, sizes, weights)
    drafts = prepared.info.drafts is not None and prepared.info.drafts.model is not None
    return SleepingRunner(prepared.runner, prepared.num_blocks, build, weights, drafts=drafts)


def _built_again(config: EngineConfig, path: Path, sizes: CacheSizes, weights: KeptWeights | None) -> Runner:
    """A runner of the same sizes, or larger ones, which nobody will use. Raises MemoryError."""
    rows = -(-sizes.num_blocks // len(sizes.windows))
    try:
        # The same once more, whatever share of the GPU it is: what the driver keeps has grown since the start.
        again = replace(config, num_blocks=rows, gpu_memory_utilization=1.0)
        prepared = _prepare(again, path, weights)
    except ModelError as error:
        raise MemoryError(str(error)) from None
    slots = 0 if prepared.states is None else prepared.states.num_slots
    needed = 0 if sizes.states is None else sizes.states.num_slots
    there = prepared.num_blocks, prepared.num_host_blocks, slots
    if any(a < b for a, b in zip(there, (sizes.num_blocks, sizes.num_host_blocks, needed), strict=True)):
        raise MemoryError("there is less memory than before")
    return prepared.runner


def _recorded(prepared: Prepared, config: EngineConfig, path: Path) -> Runner:
    recorder = Recorder(path)
    rows = -(-prepared.num_blocks // len(prepared.windows))  # as the configuration counts them, whatever the strips
    recorder.write(Opened(replace(config, record=None), rows, prepared.num_host_blocks))
    log.warning("recording to %s: it holds the prompts and answers of all users", recorder.path)
    return RecordingRunner(prepared.runner, recorder)


def _read_text(config: EngineConfig, path: Path) -> TextBundle:
    """Also checks what can be checked of the files: whoever named the wrong ones hears of it before torch is here."""
    started = time.perf_counter()
    impl = Implementation.of(config)
    looked = look_at(path, max_model_len=config.max_model_len, dummy=config.load_format == "dummy", impl=impl)
    # The linker runs beside this. No daemon: a process that ends in the middle of torch's constructors crashes.
    threading.Thread(target=load_torch_libraries, name="bequest-load-torch").start()
    text = load_text(path) if looked.gguf is None else text_from_gguf(looked.gguf)
    if config.draft_model is not None:
        _check_draft_tokens(config.draft_model, text, dummy=config.load_format == "dummy")
    if config.chat_template is not None:
        text = replace(text, chat_template=template_from_file(config.chat_template, text.tokenizer))
    log.info("config and tokenizer: %.2f s", time.perf_counter() - started)
    return text


def _check_draft_tokens(draft_model: str, text: TextBundle, *, dummy: bool) -> None:
    path = model_path(draft_model)
    if is_eagle3(path):  # made for one model, and it has no tokens of its own
        return
    looked = look_at(path, dummy=dummy)
    other = load_text(path) if looked.gguf is None else text_from_gguf(looked.gguf)
    if other.tokenizer.encode(_PROBE) != text.tokenizer.encode(_PROBE):
        raise ModelError(f"draft_model={draft_model} has other tokens than the model; take one of the same family")


def _prepare(config: EngineConfig, path: Path, weights: KeptWeights | None = None) -> Prepared:
    """In a worker thread, and torch is imported here: the server's own modules must not."""
    started = time.perf_counter()
    from bequest.engine._C import with_cuda

    if with_cuda and config.device != "cpu":
        threading.Thread(target=start_cuda, name="bequest-start-cuda").start()
    from bequest.engine.runner.prepare import prepare

    log.info("libraries: %.2f s", time.perf_counter() - started)
    if config.tensor_parallel_size == 1:
        return prepare(config, path, weights)
    from bequest.engine.ranks.leading import prepare_ranks

    return prepare_ranks(config, path)
