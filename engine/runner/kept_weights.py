"""The weights of a model that sleeps, in the host's memory, where the device copies them from by itself.

A tensor keeps its object and loses its memory: its storage is emptied, and filled again when the model wakes. So all
that refers to it (weights, norms, chains) is right again without being built anew. Graphs are not: they hold addresses,
and go with their runner. Device thread only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, UntypedStorage

from bequest.engine.models.loaded import LoadedModel
from bequest.engine.runner.memory import gib, host_memory

if TYPE_CHECKING:
    from bequest.engine.runner.prepare_draft import LoadedDrafts

log = logging.getLogger("bequest.sleep")

_MOST_OF_HOST = 0.5  # of the memory that is free there
_LEAST_FOUND = 0.9  # of the bytes of weights that a model says it has


class Places(Protocol):
    """Memory of the device beside weights, whose content is somewhere else, too: that of adapters."""

    def put_away(self) -> None: ...

    def bring_back(self) -> None:
        """Raises OutOfMemoryError."""
        ...


class KeptWeights:
    def __init__(
        self, loaded: LoadedModel, device: torch.device, places: Places, drafts: LoadedDrafts | None = None
    ) -> None:
        """`drafts`: who drafts beside the model."""
        self.places = places
        self.drafts = drafts
        self._loaded: LoadedModel | None = loaded
        self._device = device
        self._away: _HostCopy | None = None

    def put_away(self) -> None:
        """The device's memory of the weights is free. Where the host has no room for them, they are forgotten."""
        self.places.put_away()
        if self._loaded is None or self._away is not None:
            return
        storages = _storages_of((self._loaded.model, self.drafts), self._device)
        num_bytes = sum(storage.nbytes() for storage in storages)
        if num_bytes > _MOST_OF_HOST * host_memory():
            self._forget(f"the host has no room for {gib(num_bytes)}")
        elif num_bytes < _LEAST_FOUND * self._loaded.weight_bytes:
            self._forget("not all of them are tensors")
        else:
            self._away = _HostCopy(storages, num_bytes)

    def bring_back(self) -> LoadedModel | None:
        """None: they are to be read again. Raises OutOfMemoryError; they are then still away."""
        if self._away is not None:
            self._away.fill()
            self._away = None
        return self._loaded

    def _forget(self, why: str) -> None:
        log.info("weights: read from the files again when the model wakes, because %s", why)
        self._loaded = self.drafts = None


class _HostCopy:
    def __init__(self, storages: list[UntypedStorage], num_bytes: int) -> None:
        """Empties the storages."""
        self._host = torch.empty(num_bytes, dtype=torch.uint8)
        self._is_pinned = _pin(self._host)
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        for part, storage in self._parts():
            part.copy_(_bytes_of(storage), non_blocking=True)
        _synchronise()
        for storage in storages:
            storage.resize_(0)

    def fill(self) -> None:
        """All or none of them."""
        try:
            for storage, size in self._sizes:
                storage.resize_(size)
        except torch.cuda.OutOfMemoryError:
            for storage, _ in self._sizes:
                storage.resize_(0)
            raise
        for part, storage in self._parts():
            _bytes_of(storage).copy_(part, non_blocking=True)
        _synchronise()
        # Giving so much memory back takes longer than the copies.
        threading.Thread(target=_unpin, args=(self._host, self._is_pinned), name="bequest-unpin").start()

    def _parts(self) -> Iterator[tuple[Tensor, UntypedStorage]]:
        begin = 0
        for storage, size in self._sizes:
            yield self._host[begin : begin + size], storage
            begin += size


def _pin(host: Tensor) -> bool:
    """Whether a device copies to and from it by itself. Memory of torch's own pinned kind would never be given back,
    and be up to twice as large."""
    if not torch.cuda.is_initialized() or not host.nbytes:
        return False
    return int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0


def _unpin(host: Tensor, is_pinned: bool) -> None:
    if is_pinned:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def _synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages_of(root: object, device: torch.device) -> list[UntypedStorage]:
    """Of all tensors on the device that an object refers to, each once."""
    found: dict[int, UntypedStorage] = {}
    for tensor in _tensors_in(root):
        if tensor.device == device and tensor.nbytes:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
    return list(found.values())


def _tensors_in(root: object) -> Iterator[Tensor]:
    """Follows containers and attributes of our own objects, and of torch's modules."""
    seen, waiting = set[int](), [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        else:
            waiting += _parts_of(one)


def _parts_of(one: object) -> Iterable[object]:
    if isinstance(one, dict):
        return list(one.values())
    if isinstance(one, list | tuple | set | frozenset):
        return list(one)
    if not isinstance(one, torch.nn.Module) and not type(one).__module__.startswith("bequest."):
        return ()
    names = {name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())}
    slots = [getattr(one, name) for name in names if hasattr(one, name)]
    return [*slots, *getattr(one, "__dict__", {}).values()]
