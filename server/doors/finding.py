"""The doors that there are: each folder beside this file is one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from bequest.server import doors
from bequest.server.door import Door


def _found() -> Iterator[Door]:
    for module in iter_modules(doors.__path__):
        if module.ispkg:
            door = import_module(f"{doors.__name__}.{module.name}.door").DOOR
            assert isinstance(door, Door), module.name
            yield door


DOORS = tuple(_found())
