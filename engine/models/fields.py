"""Typed reading of a checkpoint's key-value description (config.json or GGUF metadata); every error names the key."""

from __future__ import annotations

from collections.abc import Mapping

from bequest.engine.errors import ModelError


class Fields:
    """A mapping whose `None` values count as absent. `source` names it in errors."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def raw(self, name: str, default: object = None) -> object:
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            raise self._wrong(name, value, "a whole number")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value, "a number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """One number or a list of them; empty when absent."""
        value = self.raw(name, [])
        given = value if isinstance(value, list) else [value]
        numbers = tuple(item for item in given if isinstance(item, int) and not isinstance(item, bool))
        if len(numbers) < len(given):
            raise self._wrong(name, value, "a whole number or a list of them")
        return numbers

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.list_of(name)
        numbers = tuple(float(n) for n in value if isinstance(n, (int, float)) and not isinstance(n, bool))
        if len(numbers) < len(value) or not numbers:
            raise self._wrong(name, value, "a list of numbers")
        return numbers

    def list_of(self, name: str) -> list[object]:
        """Empty when absent."""
        value = self.raw(name, [])
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return value

    def section(self, name: str) -> Fields:
        """A nested object; empty when absent."""
        value = self.raw(name, {})
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return Fields(value, f"{self.source}: {name}")

    def _required(self, name: str, default: object) -> object:
        value = self.raw(name, default)
        if value is None:
            raise ModelError(f"{self.source} lacks {name}")
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> ModelError:
        return ModelError(f"{self.source}: {name} must be {wanted}, not {value!r}")
