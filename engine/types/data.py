"""What it means to be data: values that can be pickled, logged, sent to another process and compared.

Data are numbers, strings, bytes, arrays, tuples of data, and frozen structs or dataclasses of data.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import msgspec
import numpy as np


class Data(msgspec.Struct, frozen=True, eq=False):
    """A frozen struct of data: a step makes a dozen, and a dataclass takes ten times as long to make. Equal if every
    field is, arrays with their types, shapes and bits."""

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def __eq__(self, other: object) -> bool:
        return equal(self, other)


def equal(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Data):
        return all(equal(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if is_dataclass(one):
        return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return one == other
