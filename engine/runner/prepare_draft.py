"""From a configuration to a draft model or a head: load it, and say what it adds to a block and to a step."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.fetch import model_path
from bequest.engine.layers.backend import Backend
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.draft_kinds import is_eagle3
from bequest.engine.models.eagle3 import load_eagle3
from bequest.engine.models.load import load_model
from bequest.engine.models.loaded import LoadedModel
from bequest.engine.models.mtp import check_mtp, load_mtp
from bequest.engine.runner.device_drafts import DeviceDrafts
from bequest.engine.runner.draft_model import DraftModel
from bequest.engine.runner.head_drafts import Head, HeadDrafts
from bequest.engine.runner.untouched import untouched_zeros
from bequest.engine.types.speculation import DraftCosts, DraftMethod, ModelDrafts, parse_speculative

if TYPE_CHECKING:
    from bequest.engine.kernels.cuda_sampler import CudaSampler
    from bequest.engine.runner.cuda_drafts import CudaDrafts, DraftCache, MakeDrafts
    from bequest.engine.runner.cuda_limits import RunnerLimits
    from bequest.engine.runner.cuda_passes import PassLimits

log = logging.getLogger("bequest.start")


class LoadedDrafts(ABC):
    """What drafts beside a target."""

    method: DraftMethod
    target: LoadedModel
    config: DecoderConfig  # of what has keys and values
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_parameters: int  # that a draft meets

    def drafts(self, costs: DraftCosts, one_pass: float | None = None) -> ModelDrafts:
        """`costs`: of the device; `one_pass`: in steps, None: by its weights."""
        part = self.num_parameters / self.target.num_active_parameters
        return ModelDrafts(method=self.method, costs=costs.by_model(part if one_pass is None else one_pass))

    def block_bytes(self, block_size: int) -> int:
        return math.prod(self.config.kv_shape(block_size)) * self.kv_dtype.itemsize

    def place(self, num_blocks: int, num_host_blocks: int, block_size: int, num_rows: int) -> DeviceDrafts:
        """With as many blocks as the target has, and its sampler rows."""
        shape = self.config.kv_shape(block_size)
        # Zeros: a guess may read what nobody has written, and should not be slow by it.
        caches = [untouched_zeros((count, *shape), self.kv_dtype) for count in (num_blocks, num_host_blocks)]
        return self._placed(caches[0], caches[1], num_rows, self.dtype is torch.bfloat16)

    @abstractmethod
    def _placed(self, kv_cache: Tensor, host_cache: Tensor, num_rows: int, bfloat16: bool) -> DeviceDrafts: ...

    @abstractmethod
    def queued(self, cache: DraftCache, limits: PassLimits, sampler: CudaSampler) -> CudaDrafts: ...


class LoadedDraftModel(LoadedDrafts):
    method = "draft"

    def __init__(self, model: Decoder, loaded: LoadedModel, target: LoadedModel) -> None:
        self._model = model
        self.target = target
        self.config = model.config
        self.dtype, self.kv_dtype = loaded.dtype, loaded.kv_dtype
        self.num_parameters = loaded.num_active_parameters

    def _placed(self, kv_cache: Tensor, host_cache: Tensor, num_rows: int, bfloat16: bool) -> DeviceDrafts:
        return DraftModel(self._model, kv_cache, host_cache, self.target.config.vocab_size, bfloat16=bfloat16)

    def queued(self, cache: DraftCache, limits: PassLimits, sampler: CudaSampler) -> CudaDrafts:
        from bequest.engine.runner.cuda_draft_model import CudaDraftModel

        return CudaDraftModel(self._model, cache, self.dtype, limits, sampler)


class LoadedHead(LoadedDrafts):
    def __init__(self, method: DraftMethod, head: Head, num_parameters: int, target: LoadedModel) -> None:
        self._head = head
        self.method = method
        self.target = target
        self.config = head.config
        self.dtype, self.kv_dtype = target.dtype, target.kv_dtype
        self.num_parameters = num_parameters

    def _placed(self, kv_cache: Tensor, host_cache: Tensor, num_rows: int, bfloat16: bool) -> DeviceDrafts:
        vocab_size = self.target.config.vocab_size
        return HeadDrafts(self._head, kv_cache, host_cache, num_rows, vocab_size, bfloat16=bfloat16)

    def queued(self, cache: DraftCache, limits: PassLimits, sampler: CudaSampler) -> CudaDrafts:
        from bequest.engine.runner.cuda_head_drafts import CudaHeadDrafts

        return CudaHeadDrafts(self._head, cache, self.dtype, limits, sampler)


def place_on_gpu(
    drafts: LoadedDrafts | None, num_blocks: int, num_host_blocks: int, block_size: int, limits: RunnerLimits
) -> MakeDrafts | None:
    """With as many blocks as the target has; the runner brings its sampler."""
    if drafts is None:
        return None
    from bequest.engine.runner.cuda_drafts import DraftCache
    from bequest.engine.runner.cuda_passes import PassLimits

    cache = DraftCache((num_blocks, *drafts.config.kv_shape(block_size)), num_host_blocks, drafts.kv_dtype)
    # The pairs of a head are those of a step's tokens, and one that was left over of each sequence.
    of_passes = PassLimits(
        max_tokens=max(limits.max_tokens + limits.max_num_seqs, limits.max_samples),
        max_blocks=limits.max_blocks_per_sequence,
        num_rows=limits.max_num_seqs,
    )
    return partial(drafts.queued, cache, of_passes)


def check_draft(config: EngineConfig, path: Path) -> None:
    """What can be said before the target at `path` is loaded. Raises ModelError."""
    if not _by_own_head(config):
        return
    if config.draft_model is not None:
        raise ModelError("speculative=mtp drafts by the head of the model's own checkpoint: leave draft_model out")
    check_mtp(path, dummy=config.load_format == "dummy")


def _by_own_head(config: EngineConfig) -> bool:
    return parse_speculative(config.speculative)[0] == "mtp"


def load_draft(
    config: EngineConfig, path: Path, target: LoadedModel, backend: Backend | None = None
) -> LoadedDrafts | None:
    """`path`: of the target; `backend`: of a GPU. None: nothing of that kind is wanted. Raises ModelError."""
    by_own_head = _by_own_head(config)
    if config.draft_model is None and not by_own_head:
        return None
    field = "speculative=mtp" if by_own_head else "draft_model"
    if not isinstance(target.config, DecoderConfig) or not isinstance(target.model, Decoder):
        raise ModelError(f"{field}: nothing drafts for a model like {target.config.architecture}; leave it out")
    if by_own_head and target.cutting is not None:
        raise ModelError("speculative=mtp: a head is not read for several processes; set tensor_parallel_size=1")
    if any(target.config.strips.windows_below(target.max_model_len)):
        raise ModelError(f"{field}: this model's layers have sliding windows, and who drafts needs all blocks")
    drafts = _load(config, path, target, target.model, backend)
    log.info("drafts: %s, %.2f billion parameters", drafts.method, drafts.num_parameters / 1e9)
    return drafts


def _load(
    config: EngineConfig, path: Path, target: LoadedModel, model: Decoder, backend: Backend | None
) -> LoadedDrafts:
    dtype, length = target.dtype, target.max_model_len
    if config.draft_model is None:
        dummy = config.load_format == "dummy"
        own = load_mtp(path, model, backend or CpuBackend.of(config), dtype, length, dummy=dummy)
        return LoadedHead("mtp", own, own.num_parameters, target)
    beside = model_path(config.draft_model)
    if not is_eagle3(beside):
        return _load_model(config, config.draft_model, beside, target, backend or CpuBackend.of(config))
    head = load_eagle3(beside, model, backend or CpuBackend(), dtype, length)
    return LoadedHead("eagle3", head, head.num_parameters, target)


def _load_model(config: EngineConfig, name: str, path: Path, target: LoadedModel, backend: Backend) -> LoadedDraftModel:
    dummy = config.load_format == "dummy"
    loaded = load_model(path, config.dtype, backend=backend, dummy=dummy, kv_cache_dtype=config.kv_cache_dtype)
    model, own = loaded.model, loaded.config
    if not isinstance(model, Decoder) or not isinstance(own, DecoderConfig) or own.recurrent is not None:
        raise ModelError(f"draft_model={name}: {own.architecture} cannot draft; take a plain decoder")
    if len(own.strips.windows) > 1:
        raise ModelError(f"draft_model={name}: its layers have windows of their own; take another model")
    if own.max_position < target.max_model_len:
        raise ModelError(
            f"draft_model={name} has {own.max_position} positions, fewer than the "
            f"{target.max_model_len} of the model; set max_model_len={own.max_position} or take another one"
        )
    return LoadedDraftModel(model, loaded, target)
