"""From a configuration to a draft model or a head: load it, and say what it adds to a block and to a step."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.fetch import model_path
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.draft_kinds import is_eagle3
from bequest.engine.models.eagle3 import EagleHead, load_eagle3
from bequest.engine.models.load import load_model
from bequest.engine.models.loaded import LoadedModel
from bequest.engine.runner.device_drafts import DeviceDrafts
from bequest.engine.runner.draft_model import DraftModel
from bequest.engine.runner.eagle import EagleDrafts
from bequest.engine.types.speculation import ON_CPU, DraftCosts, DraftMethod, ModelDrafts

log = logging.getLogger("bequest.start")


class LoadedDrafts(ABC):
    """What drafts beside a target."""

    method: DraftMethod
    target: LoadedModel
    config: DecoderConfig  # of what has keys and values
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_parameters: int  # that a draft meets

    @property
    def drafts(self) -> ModelDrafts:
        """It takes a step of its own for each draft, and one more to read what came of them."""
        part = self.num_parameters / self.target.num_active_parameters
        return ModelDrafts(method=self.method, costs=DraftCosts(row=ON_CPU.row + part, check=part, rows=ON_CPU.rows))

    def block_bytes(self, block_size: int) -> int:
        return math.prod(self.config.kv_shape(block_size)) * self.kv_dtype.itemsize

    def place(self, num_blocks: int, num_host_blocks: int, block_size: int, num_rows: int) -> DeviceDrafts:
        """With as many blocks as the target has, and its sampler rows."""
        shape = self.config.kv_shape(block_size)
        # Zeros: a guess may read what nobody has written, and should not be slow by it.
        caches = [torch.zeros((count, *shape), dtype=self.kv_dtype) for count in (num_blocks, num_host_blocks)]
        return self._placed(caches[0], caches[1], num_rows, self.dtype is torch.bfloat16)

    @abstractmethod
    def _placed(self, kv_cache: Tensor, host_cache: Tensor, num_rows: int, bfloat16: bool) -> DeviceDrafts: ...


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


class LoadedHead(LoadedDrafts):
    method = "eagle3"

    def __init__(self, head: EagleHead, target: LoadedModel) -> None:
        self._head = head
        self.target = target
        self.config = head.config
        self.dtype, self.kv_dtype = target.dtype, target.kv_dtype
        self.num_parameters = head.num_parameters

    def _placed(self, kv_cache: Tensor, host_cache: Tensor, num_rows: int, bfloat16: bool) -> DeviceDrafts:
        vocab_size = self.target.config.vocab_size
        return EagleDrafts(self._head, kv_cache, host_cache, num_rows, vocab_size, bfloat16=bfloat16)


def load_draft(config: EngineConfig, target: LoadedModel) -> LoadedDrafts | None:
    """None: nothing of that kind is wanted. Raises ModelError."""
    if config.draft_model is None:
        return None
    if not isinstance(target.config, DecoderConfig) or target.config.recurrent is not None:
        raise ModelError(f"draft_model: nothing drafts for a model like {target.config.architecture}; leave it out")
    if any(target.config.strips.windows_below(target.max_model_len)):
        raise ModelError("draft_model: this model's layers have sliding windows, and a draft model needs all blocks")
    path = model_path(config.draft_model)
    drafts = _load_head(path, target) if is_eagle3(path) else _load_model(config, config.draft_model, path, target)
    log.info("drafts: %s, %.2f billion parameters", drafts.method, drafts.num_parameters / 1e9)
    return drafts


def _load_model(config: EngineConfig, name: str, path: Path, target: LoadedModel) -> LoadedDraftModel:
    dummy = config.load_format == "dummy"
    loaded = load_model(
        path, config.dtype, backend=CpuBackend.of(config), dummy=dummy, kv_cache_dtype=config.kv_cache_dtype
    )
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


def _load_head(path: Path, target: LoadedModel) -> LoadedHead:
    assert isinstance(target.model, Decoder)
    return LoadedHead(load_eagle3(path, target.model, CpuBackend(), target.dtype, target.max_model_len), target)
