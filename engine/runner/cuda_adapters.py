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
import numpy.typing as npt
import torch
from torch import Tensor

from bequest.engine.adapters.files import are_of_experts, are_of_vocabulary, names_in
from bequest.engine.adapters.load import loader_of
from bequest.engine.config import EngineConfig
from bequest.engine.errors import InvalidAdapter
from bequest.engine.kernels.cpu_lora import LoraPart
from bequest.engine.kernels.cuda_lora import (
    LoraRows,
    LoraTiles,
    PackedExperts,
    PackedPart,
    PackedTable,
    SiteShape,
    SiteSlots,
    TableSlots,
    most_tiles,
    rounded_rank,
    write_tiles,
)
from bequest.engine.kernels.streams import record
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.models.any_config import OwnConfig
from bequest.engine.models.loaded import LoadedModel
from bequest.engine.models.reader import Matrix
from bequest.engine.models.sites import OUTPUT, TABLE, first_expert
from bequest.engine.runner.cuda_sizes import StepSize
from bequest.engine.runner.kept_weights import KeptWeights
from bequest.engine.runner.memory import gib
from bequest.engine.runner.staging import Field
from bequest.engine.types import IntArray, StepBatch
from bequest.engine.types.adapter import NO_ADAPTER, AdapterSource, AdapterWeights, none_because
from bequest.engine.types.encoder import EncoderSpec

log = logging.getLogger("bequest.start")

_NO_SLOT = -1
_PATIENCE = 10.0  # seconds that an adapter waits for the slot of one that has just left

_Event = torch.cuda.Event
Send = Callable[[npt.NDArray[np.int32]], Tensor]


def make_adapters(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> CudaAdapters:
    """With the slots that the configuration asks for, if the model can have any."""
    wanted = len(config.lora) if config.lora_slots is None else config.lora_slots
    num_slots = wanted if isinstance(loaded.config, OwnConfig) else 0
    matrices = _adaptable(config, loaded.matrices) if num_slots else {}
    adapters = CudaAdapters(matrices, num_slots, config.max_lora_rank, device, loaded.dtype)
    if num_slots:
        log.info("adapters: %d places of rank %d, %s", num_slots, config.max_lora_rank, gib(adapters.nbytes))
    return adapters


def places_of(
    config: EngineConfig, loaded: LoadedModel, device: torch.device, weights: KeptWeights | None
) -> CudaAdapters:
    """Those of a runner that was put away stay the same: adapters are in their slots."""
    if weights is None:
        return make_adapters(config, loaded, device)
    assert isinstance(weights.places, CudaAdapters)
    weights.places.bring_back()
    return weights.places


def source_of(config: EngineConfig, loaded: LoadedModel, adapters: CudaAdapters) -> AdapterSource:
    """Raises for each that is asked for, where none can be placed."""
    most = config.max_loras
    if isinstance(loaded.config, OwnConfig) and not adapters.num_slots:
        why = "its GPU has no memory for them; start with lora_slots=, the most that a step can have"
        return AdapterSource(none_because(why), most)
    load = loader_of(loaded, config.max_lora_rank, adapters.pack)
    return AdapterSource(load, most, seats=adapters.num_slots, place=adapters.place)


def _adaptable(config: EngineConfig, matrices: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Those that slots have memory for. Experts take far more of it than all others, and the vocabulary takes time of
    every step: they count where an adapter of the start needs them, or the configuration asks for them."""
    given = [names_in(Path(entry.partition("=")[2]).expanduser()) for entry in config.lora]
    experts = config.lora_experts or any(map(are_of_experts, given))
    vocabulary = config.lora_vocabulary or any(map(are_of_vocabulary, given))
    return {
        name: matrix
        for name, matrix in matrices.items()
        if (experts or not matrix.num_experts) and (vocabulary or matrix.site not in (TABLE, OUTPUT))
    }


class PackedAdapter:
    """An adapter in the host's memory: by sites, and by their parts; experts have the site of the first one."""

    def __init__(
        self, sites: Mapping[int, Mapping[int, PackedPart] | PackedExperts], tables: Mapping[int, PackedTable]
    ) -> None:
        self.sites, self.tables = sites, tables

    @property
    def nbytes(self) -> int:
        of_sites = sum(
            parts.nbytes if isinstance(parts, PackedExperts) else sum(part.nbytes for part in parts.values())
            for parts in self.sites.values()
        )
        return of_sites + sum(table.nbytes for table in self.tables.values())


class PlacedAdapter:
    """An adapter in a slot, which is its as long as this object lives."""

    def __init__(self, slot: int, packed: PackedAdapter) -> None:
        self.slot, self.packed = slot, packed
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
        self.num_slots, self._device, self._dtype = num_slots, device, dtype
        self._most_rank = rounded_rank(max_rank)
        self._shapes = {site: shape for site, shape in _shapes(matrices).items() if shape.has_kernel}
        self._table_shapes = {own.site: (own.rows, own.columns) for own in matrices.values() if own.is_table}
        self._sites: dict[int, SiteSlots] = {}
        self._tables: dict[int, TableSlots] = {}
        self._of_rows: IntArray = np.empty(0, np.int32)  # the slot of each row of the step that was staged last
        self._writing = threading.Lock()  # whoever writes slots, or gives their memory back
        self._is_away = True
        self._living: weakref.WeakSet[PlacedAdapter] = weakref.WeakSet()
        self._free: deque[tuple[int, list[_Event]]] = deque((slot, []) for slot in range(num_slots))
        self._changed = threading.Condition()
        self._stream = torch.cuda.Stream(device)
        self._placed: dict[int, PlacedAdapter] = {}  # by handle
        self.bring_back()

    @property
    def nbytes(self) -> int:
        return sum(site.nbytes for site in self._sites.values()) + sum(table.nbytes for table in self._tables.values())

    # --- device thread, as the others below: while the engine sleeps -----------------------------------------------

    def put_away(self) -> None:
        """Gives the memory of slots back. Adapters keep their slots; handles are told again."""
        with self._writing:
            self._sites, self._tables = {}, {}
            self._is_away = True
            self._placed.clear()

    def bring_back(self) -> None:
        """Slots as they were. Raises OutOfMemoryError."""
        with self._writing:
            if not self._is_away or not self.num_slots:
                return
            sizes = (self.num_slots, self._most_rank, self._device, self._dtype)
            sites = {site: SiteSlots(shape, *sizes) for site, shape in self._shapes.items()}
            tables = {site: TableSlots(shape, *sizes) for site, shape in self._table_shapes.items()}
            torch.cuda.synchronize(self._device)  # they are filled with zeros on another stream
            self._sites, self._tables, self._is_away = sites, tables, False
            for placed in list(self._living):
                self._write(placed)

    # --- worker threads ------------------------------------------------------------------------------------------

    def pack(self, sites: Mapping[int, Sequence[LoraPart]]) -> PackedAdapter:
        """Raises InvalidAdapter."""
        by_expert: dict[int, dict[int, Sequence[LoraPart]]] = defaultdict(dict)
        packed: dict[int, Mapping[int, PackedPart] | PackedExperts] = {}
        tables: dict[int, PackedTable] = {}
        for site, parts in sites.items():
            if site in self._table_shapes:
                tables[site] = PackedTable.of(parts[0].a, parts[0].b, parts[0].scale, self._dtype)
            elif site in self._shapes and self._shapes[site].num_experts == 1:
                packed[site] = self._packed(site, parts)
            elif (first := first_expert(site)) in self._shapes:
                by_expert[first][site - first] = parts
            else:
                raise _without_memory(site)
        for first, experts in by_expert.items():
            parts_of = {(e, at): part for e, own in experts.items() for at, part in self._packed(first, own).items()}
            packed[first] = PackedExperts.of(self._shapes[first], parts_of)
        return PackedAdapter(packed, tables)

    def _packed(self, site: int, parts: Sequence[LoraPart]) -> dict[int, PackedPart]:
        """By their places among the parts of a product."""
        ends = self._shapes[site].ends
        return {
            ends.index(part.first_column + part.b.shape[1]): PackedPart.of(part.a, part.b, part.scale, self._dtype)
            for part in parts
        }

    def place(self, weights: AdapterWeights) -> AdapterWeights:
        """Writes an adapter that `pack` has made into a free slot. Raises InvalidAdapter if none becomes free."""
        packed = weights.matrices
        assert isinstance(packed, PackedAdapter), "loaded for another device"
        slot, last_read = self._take()
        placed = PlacedAdapter(slot, packed)
        weakref.finalize(placed, self._give_back, slot, placed.last_read).atexit = False
        with self._writing:
            self._living.add(placed)
            if not self._is_away:
                self._write(placed, last_read)
        return replace(weights, matrices=placed)

    def _write(self, placed: PlacedAdapter, last_read: Sequence[_Event] = ()) -> None:
        """Behind the last steps that read the slot."""
        slot, packed = placed.slot, placed.packed
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for event in last_read:
                event.wait(self._stream)
            for site, slots in self._sites.items():
                _write(slots, slot, packed.sites.get(site, {}))
            for site, table in self._tables.items():
                table.write(slot, packed.tables.get(site))
            self._stream.synchronize()

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

    def fields(self, max_tokens: int, max_samples: int) -> list[Field]:
        """Of the arrays that are staged for a step."""
        if not self.num_slots:
            return []
        fields = [Field("lora_slots", (max_tokens,), torch.int32), *self._tile_fields("lora", max_tokens)]
        return fields + (self._tile_fields("lora_output", max_samples) if OUTPUT in self._shapes else [])

    def _tile_fields(self, name: str, most: int) -> list[Field]:
        return [
            Field(f"{name}_rows", (most,), torch.int32),
            Field(f"{name}_tiles", (1 + most_tiles(most, self.num_slots), 3), torch.int32),
        ]

    def stage(
        self, batch: StepBatch | None, arrays: Mapping[str, Any], size: StepSize, samples: IntArray | None = None
    ) -> None:
        """Of a step that is padded to this size, and of the tokens that are sampled; None: of one of padding alone."""
        if not size.adapted:
            return
        arrays["lora_slots"][: size.num_tokens] = _NO_SLOT
        if batch is None or batch.adapters is None or samples is None:
            arrays["lora_tiles"][0] = 0
            if OUTPUT in self._shapes:
                arrays["lora_output_tiles"][0] = 0
            return
        of_rows = self._of_rows = np.repeat(self._slots_of(batch.adapters), np.diff(batch.query_start))
        arrays["lora_slots"][: len(of_rows)] = of_rows
        write_tiles(arrays["lora_slots"][: size.num_tokens], arrays["lora_rows"], arrays["lora_tiles"])
        if OUTPUT in self._shapes:
            sampled = np.full(size.num_samples, _NO_SLOT, np.int32)
            sampled[: len(samples)] = of_rows[samples]
            write_tiles(sampled, arrays["lora_output_rows"], arrays["lora_output_tiles"])

    def _slots_of(self, handles: IntArray) -> IntArray:
        of_handle = {handle: placed.slot for handle, placed in self._placed.items()}
        return np.asarray([of_handle.get(handle, _NO_SLOT) for handle in handles.tolist()], np.int32)

    def bind(self, size: StepSize, staged: Callable[[str], Tensor]) -> StepAdapters | None:
        """Of a step of this size, over the arrays that are `staged` on the device."""
        if not size.adapted:
            return None
        tiles = LoraTiles(staged("lora_rows"), staged("lora_tiles"), most_tiles(size.num_tokens, self.num_slots))
        return StepAdapters(self._rows(tiles, staged("lora_slots")), size.num_tokens)

    def bind_samples(self, size: StepSize, staged: Callable[[str], Tensor]) -> StepAdapters | None:
        """The same of the rows that are sampled from: for the output matrix alone."""
        if not size.adapted or OUTPUT not in self._shapes:
            return None
        most = most_tiles(size.num_samples, self.num_slots)
        tiles = LoraTiles(staged("lora_output_rows"), staged("lora_output_tiles"), most)
        return StepAdapters(self._rows(tiles, staged("lora_slots")), size.num_samples)

    def of_tokens(self, batch: StepBatch, tokens: npt.NDArray[np.integer], send: Send) -> StepAdapters | None:
        """Of rows that are those of tokens [N] of the step that was staged last. `send` brings an array to the
        device."""
        if batch.adapters is None or OUTPUT not in self._shapes:
            return None
        return StepAdapters(self._rows_of(self._of_rows[tokens], send), len(tokens))

    def of_encoders(self, specs: Sequence[EncoderSpec], send: Send) -> StepAdapters | None:
        """Of the states of encoder inputs, and of those whose keys and values are written, which are the first."""
        if not self.num_slots or not any(spec.adapter for spec in specs):
            return None
        slots = self._slots_of(np.asarray([spec.adapter for spec in specs], np.int32))
        of_rows = np.repeat(slots, [spec.input.length for spec in specs])
        written = sum(spec.input.length for spec in specs if spec.slots is not None)
        read = self._rows_of(of_rows[:written], send) if written else None
        return StepAdapters(self._rows_of(of_rows, send), len(of_rows), read)

    def _rows_of(self, of_rows: IntArray, send: Send) -> LoraRows:
        most = most_tiles(len(of_rows), self.num_slots)
        rows, tiles = np.zeros(len(of_rows), np.int32), np.zeros((1 + most, 3), np.int32)
        write_tiles(of_rows, rows, tiles)
        return self._rows(LoraTiles(send(rows), send(tiles), most), send(of_rows))

    def _rows(self, tiles: LoraTiles, slots: Tensor) -> LoraRows:
        return LoraRows(self._sites, tiles, slots, self._most_rank, self._tables)


def _without_memory(site: int) -> InvalidAdapter:
    what, option = ("matrices of experts", "lora_experts")
    if site in (TABLE, OUTPUT):
        what, option = ("the embedding or the output matrix", "lora_vocabulary")
    return InvalidAdapter(
        f"The adapter changes {what}, for which slots of this GPU have no memory; start with {option}=true, or name "
        "such an adapter with lora=."
    )


def _shapes(matrices: Mapping[str, Matrix]) -> dict[int, SiteShape]:
    by_site: dict[int, list[Matrix]] = defaultdict(list)
    for matrix in {(own.site, own.first_row): own for own in matrices.values() if not own.is_table}.values():
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
