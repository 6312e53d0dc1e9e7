"""Adapters on a GPU: slots of one size in device memory, who is in which, and which rows of a step have them.

All that are loaded lie in the host's memory, packed as slots hold them. A worker thread that brings one takes a slot
and writes it, on a stream of its own, beside steps that read other slots. The device thread then gives the slot its
handle. What a step has is data: graphs read tiles of rows from staged arrays. Slots are given back when the device
thread holds the adapter no more, and written again behind the last step that read them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bequest.engine.adapters.files import has_experts
from bequest.engine.adapters.load import loader_of
from bequest.engine.config import EngineConfig
from bequest.engine.errors import InvalidAdapter
from bequest.engine.kernels.cpu_lora import LoraPart
from bequest.engine.kernels.cuda_lora import (
    LoraRows,
    LoraTiles,
    PackedExperts,
    PackedPart,
    SiteShape,
    SiteSlots,
    most_tiles,
    rounded_rank,
    write_tiles,
)
from bequest.engine.kernels.streams import record
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.loaded import LoadedModel
from bequest.engine.models.reader import Matrix, first_expert
from bequest.engine.runner.cuda_sizes import StepSize
from bequest.engine.runner.memory import gib
from bequest.engine.runner.staging import Field
from bequest.engine.types import StepBatch
from bequest.engine.types.adapter import NO_ADAPTER, AdapterSource, AdapterWeights, none_because

log = logging.getLogger("bequest.start")

_NO_SLOT = -1
_PATIENCE = 10.0  # seconds that an adapter waits for the slot of one that has just left

_Event = torch.cuda.Event


def make_adapters(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> CudaAdapters:
    """With the slots that the configuration asks for, if the model can have any."""
    wanted = len(config.lora) if config.lora_slots is None else config.lora_slots
    num_slots = 0 if _refusal(loaded) is not None else wanted
    matrices = loaded.matrices if _adapts_experts(config) else without_experts(loaded.matrices)
    adapters = CudaAdapters(matrices, num_slots, config.max_lora_rank, device, loaded.dtype)
    if num_slots:
        log.info("adapters: %d places of rank %d, %s", num_slots, config.max_lora_rank, gib(adapters.nbytes))
    return adapters


def source_of(config: EngineConfig, loaded: LoadedModel, adapters: CudaAdapters) -> AdapterSource:
    """Raises for each that is asked for, where none can be placed."""
    most = config.max_loras
    if (refusal := _refusal(loaded)) is not None:
        return AdapterSource(none_because(refusal), most)
    if not adapters.num_slots:
        why = "its GPU has no memory for them; start with lora_slots=, the most that a step can have"
        return AdapterSource(none_because(why), most)
    load = loader_of(loaded, config.max_lora_rank, adapters.pack)
    return AdapterSource(load, most, lasting=False, seats=adapters.num_slots, place=adapters.place)


def _refusal(loaded: LoadedModel) -> str | None:
    if not isinstance(loaded.config, DecoderConfig):
        return "on a GPU only decoders of our own families take them; start with device=cpu"
    return None


def _adapts_experts(config: EngineConfig) -> bool:
    """Whether slots have memory for matrices of experts, which takes far more than all others."""
    return config.lora_experts or any(has_experts(Path(entry.partition("=")[2])) for entry in config.lora)


def without_experts(matrices: Mapping[str, Matrix]) -> dict[str, Matrix]:
    return {name: matrix for name, matrix in matrices.items() if not matrix.num_experts}


class PackedAdapter:
    """An adapter in the host's memory: by sites, and by their parts; experts have the site of the first one."""

    def __init__(self, sites: Mapping[int, Mapping[int, PackedPart] | PackedExperts]) -> None:
        self.sites = sites

    @property
    def nbytes(self) -> int:
        return sum(
            parts.nbytes if isinstance(parts, PackedExperts) else sum(part.nbytes for part in parts.values())
            for parts in self.sites.values()
        )


class PlacedAdapter:
    """An adapter in a slot, which is its as long as this object lives."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.last_read: list[_Event] = []  # behind the last step that may read it


class CudaAdapters:
    def __init__(
        self,
        matrices: Mapping[str, Matrix],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Without slots none can be loaded, and steps are told nothing."""
        self.num_slots, self._dtype = num_slots, dtype
        self._most_rank = rounded_rank(max_rank)
        self._sites = {
            site: SiteSlots(shape, num_slots, self._most_rank, device, dtype)
            for site, shape in _shapes(matrices).items()
            if shape.has_kernel and num_slots
        }
        self._free: deque[tuple[int, list[_Event]]] = deque((slot, []) for slot in range(num_slots))
        self._changed = threading.Condition()
        self._stream = torch.cuda.Stream(device)
        self._placed: dict[int, PlacedAdapter] = {}  # by handle

    @property
    def nbytes(self) -> int:
        return sum(site.nbytes for site in self._sites.values())

    # --- worker threads ------------------------------------------------------------------------------------------

    def pack(self, sites: Mapping[int, Sequence[LoraPart]]) -> PackedAdapter:
        """Raises InvalidAdapter."""
        by_expert: dict[int, dict[int, Sequence[LoraPart]]] = defaultdict(dict)
        packed: dict[int, Mapping[int, PackedPart] | PackedExperts] = {}
        for site, parts in sites.items():
            if site in self._sites and self._sites[site].shape.num_experts == 1:
                packed[site] = self._packed(site, parts)
            elif (first := first_expert(site)) in self._sites:
                by_expert[first][site - first] = parts
            else:
                raise InvalidAdapter(
                    "The adapter changes matrices of experts, for which slots of this GPU have no memory; start with "
                    "lora_experts=true, or name such an adapter with lora=."
                )
        for first, experts in by_expert.items():
            parts_of = {(e, at): part for e, own in experts.items() for at, part in self._packed(first, own).items()}
            packed[first] = PackedExperts.of(self._sites[first].shape, parts_of)
        return PackedAdapter(packed)

    def _packed(self, site: int, parts: Sequence[LoraPart]) -> dict[int, PackedPart]:
        """By their places among the parts of a product."""
        ends = self._sites[site].shape.ends
        return {
            ends.index(part.first_column + part.b.shape[1]): PackedPart.of(part.a, part.b, part.scale, self._dtype)
            for part in parts
        }

    def place(self, weights: AdapterWeights) -> AdapterWeights:
        """Writes an adapter that `pack` has made into a free slot. Raises InvalidAdapter if none becomes free."""
        packed = weights.matrices
        assert isinstance(packed, PackedAdapter), "loaded for another device"
        slot, last_read = self._take()
        placed = PlacedAdapter(slot)
        weakref.finalize(placed, self._give_back, slot, placed.last_read).atexit = False
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for event in last_read:
                event.wait(self._stream)
            for site, slots in self._sites.items():
                _write(slots, slot, packed.sites.get(site, {}))
            self._stream.synchronize()
        return replace(weights, matrices=placed)

    def _take(self) -> tuple[int, list[_Event]]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, _PATIENCE):
                raise InvalidAdapter(f"None of the {self.num_slots} places for adapters on this GPU became free.")
            return self._free.popleft()

    def _give_back(self, slot: int, last_read: list[_Event]) -> None:
        with self._changed:
            self._free.append((slot, last_read))
            self._changed.notify()

    # --- device thread -------------------------------------------------------------------------------------------

    def register(self, handle: int, weights: AdapterWeights) -> None:
        assert handle not in self._placed and handle != NO_ADAPTER, "a handle stands for one adapter"
        assert isinstance(weights.matrices, PlacedAdapter), "loaded for another device"
        self._placed[handle] = weights.matrices

    def release(self, handle: int) -> None:
        """On the current stream: behind it nothing reads the slot."""
        event = _Event()
        record(event)
        self._placed.pop(handle).last_read.append(event)

    def fields(self, max_tokens: int) -> list[Field]:
        """Of the arrays that are staged for a step."""
        if not self.num_slots:
            return []
        return [
            Field("lora_slots", (max_tokens,), torch.int32),
            Field("lora_rows", (max_tokens,), torch.int32),
            Field("lora_tiles", (1 + most_tiles(max_tokens, self.num_slots), 3), torch.int32),
        ]

    def stage(self, batch: StepBatch | None, arrays: Mapping[str, Any], size: StepSize) -> None:
        """Of a step that is padded to this size; None: of one of padding alone."""
        if not size.adapted:
            return
        arrays["lora_slots"][: size.num_tokens] = _NO_SLOT
        if batch is None or batch.adapters is None:
            arrays["lora_tiles"][0] = 0
            return
        of_handle = {handle: placed.slot for handle, placed in self._placed.items()}
        slots = np.asarray([of_handle.get(handle, _NO_SLOT) for handle in batch.adapters.tolist()], np.int32)
        of_rows = np.repeat(slots, np.diff(batch.query_start))
        arrays["lora_slots"][: len(of_rows)] = of_rows
        write_tiles(of_rows, arrays["lora_rows"], arrays["lora_tiles"])

    def bind(self, size: StepSize, staged: Callable[[str], Tensor]) -> StepAdapters | None:
        """Of a step of this size, over the arrays that are `staged` on the device."""
        if not size.adapted:
            return None
        tiles = LoraTiles(staged("lora_rows"), staged("lora_tiles"), most_tiles(size.num_tokens, self.num_slots))
        rows = LoraRows(self._sites, tiles, staged("lora_slots"), self._most_rank)
        return StepAdapters(rows, size.num_tokens)


def _shapes(matrices: Mapping[str, Matrix]) -> dict[int, SiteShape]:
    by_site: dict[int, list[Matrix]] = defaultdict(list)
    for matrix in matrices.values():
        if not matrix.num_experts or matrix.site == first_expert(matrix.site):
            by_site[matrix.site].append(matrix)
    return {
        site: SiteShape(
            tuple(sorted(part.first_row + part.rows for part in parts)), parts[0].columns, parts[0].num_experts or 1
        )
        for site, parts in by_site.items()
    }


def _write(slots: SiteSlots, slot: int, parts: Mapping[int, PackedPart] | PackedExperts) -> None:
    if isinstance(parts, PackedExperts):
        slots.write_experts(slot, parts)
        return
    count = len(slots.shape.ends) * slots.shape.num_experts
    ranks, scales = [0] * count, [0.0] * count
    for at, part in parts.items():
        slots.write_part(slot, at, part)
        ranks[at], scales[at] = part.rank, part.scale
    slots.describe(slot, ranks, scales)
