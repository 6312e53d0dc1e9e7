"""Places for leases that outlive their process, for tests that hold for all of them."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from bequest.engine.vault.objects import ObjectShelf, ObjectStore
from bequest.engine.vault.shelf import Shelf
from bequest.engine.vault.shelving import Shelving


class Shelves(ABC):
    """One place, which is opened again and again."""

    @abstractmethod
    def open(self) -> Shelving: ...

    @abstractmethod
    def num_leases(self) -> int: ...

    @abstractmethod
    def num_bytes(self) -> int:
        """Of blocks."""

    @abstractmethod
    def change(self, folder: str, data: bytes | None) -> None:
        """The one thing in `leases` or `blocks` becomes this; None: it is gone."""

    @abstractmethod
    def look(self, folder: str) -> bytes: ...

    @property
    def is_empty(self) -> bool:
        return self.num_leases() == 0 == self.num_bytes()


class Files(Shelves):
    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> Shelving:
        return Shelf(self._path)

    def num_leases(self) -> int:
        return len(self._files("leases"))

    def num_bytes(self) -> int:
        return sum(map(_size, self._files("blocks")))

    def change(self, folder: str, data: bytes | None) -> None:
        [file] = self._files(folder)
        file.unlink()
        if data is not None:
            file.write_bytes(data)

    def look(self, folder: str) -> bytes:
        [file] = self._files(folder)
        return file.read_bytes()

    def _files(self, folder: str) -> list[Path]:
        return [file for file in (self._path / folder).iterdir() if file.suffix != ".new"]


def _size(file: Path) -> int:
    """0 of one that goes at this moment."""
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


class Objects(Shelves):
    """In a store that several may open at once."""

    def __init__(self, store: ObjectStore, name: str = "test") -> None:
        self.store = store
        self.name = name

    def open(self) -> ObjectShelf:
        return ObjectShelf(Uncloseable(self.store), self.name)

    def num_leases(self) -> int:
        return len(self._keys("leases"))

    def num_bytes(self) -> int:
        return sum(len(self.store.get(key) or b"") for key in self._keys("blocks"))

    def change(self, folder: str, data: bytes | None) -> None:
        [key] = self._keys(folder)
        self.store.remove(key)
        if data is not None:
            self.store.put(key, data)

    def look(self, folder: str) -> bytes:
        [key] = self._keys(folder)
        return self.store.get(key) or b""

    @property
    def is_empty(self) -> bool:
        return not self._keys("")

    def _keys(self, folder: str) -> list[str]:
        return self.store.keys(f"{self.name}/{folder}")


class Uncloseable:
    """A store that outlives who uses it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def close(self) -> None: ...


class MemoryStore:
    """An ObjectStore for tests: objects of this process. `is_down`: every call fails."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_down = False

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._check()
        self.objects.setdefault(key, bytes(data))

    def get(self, key: str) -> bytes | None:
        self._check()
        return self.objects.get(key)

    def exists(self, key: str) -> bool:
        self._check()
        return key in self.objects

    def keys(self, prefix: str) -> list[str]:
        self._check()
        return [key for key in list(self.objects) if key.startswith(prefix)]

    def remove(self, key: str) -> None:
        self._check()
        self.objects.pop(key, None)

    def remove_under(self, prefix: str) -> None:
        for key in self.keys(prefix):
            self.remove(key)

    def close(self) -> None: ...

    def _check(self) -> None:
        if self.is_down:
            raise OSError(errno.EIO, "nobody answers")
